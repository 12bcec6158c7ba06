"""Whole trees: the root's vector is the batch's sum for every tolerated pattern of
missing ranks.
"""

import itertools

import numpy as np
import pytest
from cases import more
from hypothesis import given
from hypothesis import strategies as st
from independent import (
    bounded,
    gradients_for,
    own_messages,
    paper_parents,
    random_missing,
    tree_sum,
)

from jaxcoded import Coded, make_plan

UNIT = 1e-14  # a generous multiple of the rounding of one float64 operation


def assert_exact(plan, batch, patterns, seed=0):
    gradients = gradients_for(plan, batch, seed)
    own = own_messages(plan, gradients)
    atol = UNIT * batch * plan.size * max(10.0, plan.amplification)
    assert atol < 1e-3  # the tolerance still detects errors
    for missing in patterns:
        total = tree_sum(plan, own, missing)
        np.testing.assert_allclose(total, gradients.sum(axis=0), rtol=0, atol=atol)


def one_missing_at_each(parents):
    """Return every choice of at most one missing child of each of these parents."""
    return [
        {child for child in choice if child} for choice in itertools.product(*parents)
    ]


@pytest.mark.parametrize("code", ["auto", "cyclic_repetition", "random_generator"])
@pytest.mark.parametrize("root_computes", [False, True])
def test_every_pattern_of_the_3_2_tree(code, root_computes):
    plan = make_plan(13, Coded(fanout=3, code=code, root_computes=root_computes))
    families = [(None, 1, 2, 3), (None, 4, 5, 6), (None, 7, 8, 9), (None, 10, 11, 12)]
    assert_exact(plan, 31, one_missing_at_each(families))  # 4⁴ patterns


@pytest.mark.parametrize("slices", [1, 2])
def test_every_pattern_of_the_3_2_tree_at_its_limit(slices):
    plan = make_plan(13, Coded(fanout=3, stragglers=3 - slices, slices=slices))
    families = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    choices = [
        [
            set(c)
            for lost in range(4 - slices)
            for c in itertools.combinations(family, lost)
        ]
        for family in families
    ]
    assert_exact(
        plan, 7, [set().union(*parts) for parts in itertools.product(*choices)]
    )


def test_one_missing_too_many_is_not_the_sum():
    plan = make_plan(13, Coded(fanout=3))
    gradients = gradients_for(plan, 31)
    total = tree_sum(plan, own_messages(plan, gradients), {1, 2})
    assert np.abs(total - gradients.sum(axis=0)).max() > 1e-2


CASES = {
    "(4, 2) s = 1, m = 2": (21, {"fanout": 4, "slices": 2}),
    "(5, 2) s = 1, m = 2": (31, {"fanout": 5, "slices": 2}),
    "(4, 1) s = 1, m = 3": (5, {"slices": 3}),
    "(4, 2) s = 1, m = 3": (21, {"fanout": 4, "slices": 3}),
    "(4, 3) s = 1": (85, {"fanout": 4}),
    "(6, 2) s = 2": (43, {"fanout": 6, "stragglers": 2}),
    "(3, 2) s = 0, m = 3": (13, {"fanout": 3, "stragglers": 0, "slices": 3}),
    "17 ranks, s = 2": (17, {"stragglers": 2}),
    "23 ranks, m = 2": (23, {"slices": 2}),
    "8 ranks, truncated": (8, {"parents": paper_parents(8, 3)}),
    "23 ranks, truncated": (23, {"parents": paper_parents(23, 4), "stragglers": 2}),
    "10 ranks, truncated, m = 2": (10, {"parents": paper_parents(10, 3), "slices": 2}),
    "root in the middle": (9, {"parents": [3, 3, 3, -1, 0, 0, 0, 1, 2]}),
    "chain": (6, {"fanout": 1, "stragglers": 0}),
    "star": (65, {"fanout": 64}),
    "two": (2, {"stragglers": 0}),
    "one": (1, {}),
    "one with slices": (1, {"slices": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("root_computes", [False, True])
@pytest.mark.parametrize("batch", [1, 5, *map(more, [2, 37])])
def test_sampled_patterns(size, options, root_computes, batch):
    plan = make_plan(size, Coded(root_computes=root_computes, **options))
    rng = np.random.default_rng(batch)
    assert_exact(plan, batch, [set(), *(random_missing(plan, rng) for _ in range(4))])


@st.composite
def irregular_plans(draw):
    size = draw(st.integers(3, 24))
    parents = [
        -1,
        *(draw(st.integers(max(0, rank - 8), rank - 1)) for rank in range(1, size)),
    ]
    most = max(parents.count(rank) for rank in range(size))
    slices = draw(st.integers(1, min(3, most)))
    stragglers = draw(st.integers(0, min(2, most - slices)))
    return make_plan(
        size,
        Coded(
            parents=parents,
            stragglers=stragglers,
            slices=slices,
            root_computes=draw(st.booleans()),
        ),
    )


@pytest.mark.slow
@bounded
@given(irregular_plans(), st.integers(1, 60), st.integers(0, 999))
def test_irregular_trees(plan, batch, seed):
    assert_exact(plan, batch, [random_missing(plan, np.random.default_rng(seed))], seed)


@pytest.mark.slow
@bounded
@given(
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 999),
)
def test_any_number_of_ranks(s, m, more, batch, seed):
    plan = make_plan(s + m + more, Coded(stragglers=s, slices=m))
    assert_exact(plan, batch, [random_missing(plan, np.random.default_rng(seed))], seed)


@pytest.mark.slow
def test_many_ranks():
    plan = make_plan(600, Coded())
    assert_exact(plan, 50, [random_missing(plan, np.random.default_rng(0))])
