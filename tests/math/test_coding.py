from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded

from jaxcoded.codes import NAMES
from jaxcoded.plan.parent_code import AUTO, coding_of, largest_coded_set

fractions = st.fractions(min_value=Fraction(1), max_value=9, max_denominator=6)


@st.composite
def parents(draw, kinds=("auto", "random_generator")):
    capacities = tuple(draw(st.lists(fractions, min_size=1, max_size=7)))
    slices = draw(st.integers(1, min(2, len(capacities))))
    stragglers = draw(st.integers(0, min(2, len(capacities) - slices)))
    return capacities, stragglers, slices, draw(st.sampled_from(kinds))


@bounded
@given(st.lists(fractions, min_size=1, max_size=9), st.data())
def test_capacity_equation(capacities, data):
    holders = data.draw(st.integers(1, len(capacities)))
    Q = largest_coded_set(capacities, holders)

    def room(size):
        return sum(min(c, size) for c in capacities)

    assert room(Q) == holders * Q
    # Σ min(c, Q) − h·Q is concave and 0 at 0: as a slightly larger Q does not fit, no
    # larger Q fits
    assert room(Q * Fraction(1001, 1000)) < holders * Q * Fraction(1001, 1000)


@bounded
@given(parents())
def test_every_piece_of_the_set_has_as_many_holders_as_needed(case):
    capacities, stragglers, slices, _ = case
    coding = coding_of(*case, 0)
    assert (coding.code.support.sum(axis=0) == stragglers + slices).all()
    assert (coding.code.stragglers, coding.code.m) == (stragglers, slices)
    assert sorted(coding.rows) == list(range(len(capacities)))
    assert sum(coding.code.sizes) == 1
    assert min(coding.code.sizes) > 0


@bounded
@given(parents())
def test_no_child_exceeds_its_capacity_and_nothing_is_wasted(case):
    capacities, stragglers, slices, _ = case
    coding = coding_of(*case, 0)
    given_ = {
        row: coding.capacity * share
        for row, share in zip(coding.rows, coding.code.shares)
    }
    assert coding.capacity == largest_coded_set(capacities, stragglers + slices)
    for child, capacity in enumerate(capacities):
        assert given_[child] == min(capacity, coding.capacity)


@bounded
@given(parents(), st.integers(0, 200))
def test_partitions_add_up_and_runs_of_them_miss_less_than_one(case, examples):
    coding = coding_of(*case, 0)
    sizes = np.diff(coding.cuts(Fraction(examples), whole=True)).astype(int)
    assert sizes.sum() == examples and (sizes >= 0).all()
    for share, held in zip(coding.code.shares, coding.code.support @ sizes):
        assert abs(held - share * examples) < 1


@pytest.mark.parametrize(
    ("capacities", "s", "m", "name"),
    [
        ([1] * 3, 0, 1, "uncoded"),
        ([1, 5, 2], 0, 1, "uncoded"),
        ([1] * 6, 1, 1, "fractional_repetition"),
        ([1] * 6, 5, 1, "fractional_repetition"),
        ([1, 3, 1, 3], 1, 1, "fractional_repetition"),
        ([1] * 5, 1, 1, "cyclic_repetition"),
        ([1, 1, 2], 1, 1, "random_generator"),
        ([1] * 6, 1, 2, "random_generator"),
        ([1] * 3, 0, 2, "random_generator"),
    ],
)
def test_auto_takes_repetition_if_it_fits(capacities, s, m, name):
    assert (
        coding_of(tuple(map(Fraction, capacities)), s, m, "auto", 0).code.name == name
    )


def test_groups_are_of_equal_capacity():
    coding = coding_of(
        tuple(map(Fraction, [1, 3, 1, 3])), 1, 1, "fractional_repetition", 0
    )
    assert coding.capacity == 4
    assert coding.rows == (1, 3, 0, 2)
    np.testing.assert_array_equal(
        coding.code.shares, [Fraction(3, 4)] * 2 + [Fraction(1, 4)] * 2
    )


@pytest.mark.parametrize("kind", ["fractional_repetition", "cyclic_repetition"])
@bounded
@given(capacities=st.lists(fractions, min_size=4, max_size=4))
def test_repetition_asked_for_stays_within_every_capacity(kind, capacities):
    coding = coding_of(tuple(capacities), 1, 1, kind, 0)
    assert coding.code.name == kind
    for row, share in zip(coding.rows, coding.code.shares):
        assert coding.capacity * share <= capacities[row]


@bounded
@given(parents())
def test_making_a_code_twice_gives_equal_codes(case):
    coding_of.cache_clear()
    again = coding_of(*case, 0)
    coding_of.cache_clear()
    assert coding_of(*case, 0) == again


@pytest.mark.parametrize(
    ("n", "s", "m", "kind", "message"),
    [
        (
            3,
            1,
            1,
            "uncoded",
            "code='uncoded' .*: pass",
        ),
        (
            4,
            1,
            2,
            "fractional_repetition",
            "has 1 slice, not 2: pass slices=1 or .* 'random_generator'",
        ),
        (
            4,
            1,
            2,
            "cyclic_repetition",
            "has 1 slice, not 2: pass slices=1 or .* 'random_generator'",
        ),
        (
            5,
            1,
            1,
            "fractional_repetition",
            r"needs s \+ 1 = 2 to divide n = 5; take n = 4 children",
        ),
    ],
)
def test_codes_that_cannot_be(n, s, m, kind, message):
    with pytest.raises(ValueError, match=message):
        coding_of((Fraction(1),) * n, s, m, kind, 0)


@pytest.mark.parametrize("kind", [AUTO, *NAMES])
def test_without_stragglers_every_kind_is_uncoded(kind):
    assert coding_of((Fraction(1),) * 3, 0, 1, kind, 0).code.name == "uncoded"
