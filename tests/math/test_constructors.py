import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, error, survivors

from jaxcoded import codes
from jaxcoded.codes import _redraw


def rounding(code):
    return 1e-13 * max(10.0, code.amplification)


def assert_every_pattern_decodes(code, s):
    assert code.stragglers == s
    for answered in survivors(code.n, s):
        A = code.decode(answered).coefficients
        assert code.decodable(answered)
        assert not A[:, ~answered].any()
        assert error(A, code.B) < rounding(code)


# Uncoded.


@pytest.mark.parametrize("n", [1, 2, 7])
def test_uncoded(n):
    code = codes.uncoded(n)
    np.testing.assert_array_equal(code.B[:, :, 0], np.eye(n))
    assert_every_pattern_decodes(code, 0)
    np.testing.assert_array_equal(code.decode([True] * n).coefficients, np.ones((1, n)))
    assert code.amplification == 1
    assert not any(code.decodable(np.arange(n) != i) for i in range(n))


# Fractional repetition.

FRC = [(n, s) for n in range(1, 10) for s in range(n) if n % (s + 1) == 0]


@pytest.mark.parametrize(("n", "s"), FRC)
def test_fractional_repetition_of_every_answered_set(n, s):
    code = codes.fractional_repetition(n, s)
    groups = np.arange(n) // (s + 1)
    np.testing.assert_array_equal(code.B[:, :, 0], groups[:, None] == groups)
    assert (code.loads == s + 1).all()
    assert code.stragglers == s
    for answered in map(np.array, itertools.product([False, True], repeat=n)):
        complete = set(groups[answered]) == set(groups)
        assert code.decodable(answered) == complete
        if complete:
            (a,), residual = code.decode(answered)
            assert set(a) <= {0.0, 1.0}  # exactly
            assert residual == 0
            np.testing.assert_array_equal(np.bincount(groups, weights=a), 1)
            assert not a[~answered].any()


@pytest.mark.parametrize(("n", "s"), [*FRC, (64, 3), (256, 1)])
def test_fractional_repetition_amplifies_nothing(n, s):
    assert codes.fractional_repetition(n, s).amplification == 1.0


def test_fractional_repetition_needs_fewer_than_n_minus_s():
    assert codes.fractional_repetition(12, 2).decodable([0, 4, 8, 11])  # 4 of 12, s = 2


# Cyclic repetition.


@pytest.mark.parametrize(
    ("n", "s"), [(n, s) for n in range(1, 8) for s in range(n)] + [(12, 2)]
)
def test_cyclic_repetition(n, s):
    code = codes.cyclic_repetition(n, s)
    held = (np.arange(n)[None, :] - np.arange(n)[:, None]) % n <= s
    np.testing.assert_array_equal(code.support, held)
    np.testing.assert_array_equal(np.diag(code.B[:, :, 0]), 1)
    assert (
        np.linalg.matrix_rank(code.B[:, :, 0], tol=1e-9) == n - s
    )  # rows of a null space
    assert_every_pattern_decodes(code, s)


# Random generators.


@pytest.mark.parametrize(
    ("n", "s", "m"),
    [(n, s, m) for n in range(1, 7) for m in range(1, n + 1) for s in range(n - m + 1)]
    + [(9, 2, 2), (8, 1, 3)],
)
def test_random_generator(n, s, m):
    code = codes.random_generator(n, s, m)
    assert code.B.shape == (n, n, m)
    assert (code.loads == s + m).all()
    assert (code.support.sum(axis=0) == s + m).all()
    assert_every_pattern_decodes(code, s)


@st.composite
def unequal_loads(draw):
    n = draw(st.integers(2, 7))
    m = draw(st.integers(1, min(2, n)))
    s = draw(st.integers(0, n - m))
    k = draw(st.integers(1, 8))
    places = draw(st.permutations([child for child in range(n) for _ in range(k)]))
    return n, s, m, k, np.bincount(places[: (s + m) * k], minlength=n)


@bounded
@given(unequal_loads(), st.integers(0, 99))
def test_unequal_loads(case, seed):
    """Integer loads ℓ_i ≤ k with sum (s+m)·k give every partition s+m distinct holders."""
    n, s, m, k, loads = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this test checks exactness, not the size of κ
        code = codes.random_generator(n, s, m, loads=loads, seed=seed)
    assert code.B.shape == (n, k, m)
    np.testing.assert_array_equal(code.loads, loads)
    assert (code.support.sum(axis=0) == s + m).all()
    assert_every_pattern_decodes(code, s)


@bounded
@given(st.data())
def test_any_support_with_enough_holders(data):
    n = data.draw(st.integers(2, 6))
    s = data.draw(st.integers(0, n - 1))
    m = data.draw(st.integers(1, min(2, n - s)))
    columns = st.lists(st.booleans(), min_size=n, max_size=n).filter(
        lambda c: sum(c) >= s + m
    )
    support = np.array(data.draw(st.lists(columns, min_size=1, max_size=5))).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = codes.random_generator(n, s, m, support=support)
    np.testing.assert_array_equal(code.support, support)
    assert_every_pattern_decodes(code, s)


# Seeds and draws.


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: codes.cyclic_repetition(6, 2, seed=seed),
        lambda seed: codes.random_generator(6, 2, 2, seed=seed),
    ],
)
def test_equal_seeds_give_equal_codes(make):
    assert make(3) == make(3)
    assert make(3) != make(4)


@pytest.fixture
def drawn(monkeypatch):
    """Collect the drawn codes, in order."""
    made = []
    original = _redraw.GradientCode

    def spy(*args, **rest):
        made.append(original(*args, **rest))
        return made[-1]

    monkeypatch.setattr(_redraw, "GradientCode", spy)
    return made


@pytest.mark.parametrize("n, s", [(5, 2), (8, 3), (10, 2)])
def test_the_best_of_64_draws_is_kept(drawn, n, s):
    code = codes.cyclic_repetition(n, s)
    assert len(drawn) == 64
    assert code.amplification == min(other.amplification for other in drawn)


@pytest.mark.slow
def test_a_large_code_is_drawn_less_often(drawn):
    code = codes.cyclic_repetition(200, 8)
    assert 4 <= len(drawn) < 64
    assert code.amplification == min(other.amplification for other in drawn)


def test_a_good_draw_is_taken_at_once(drawn):
    assert codes.cyclic_repetition(6, 0).amplification == 1
    assert len(drawn) == 1


def test_a_large_amplification_warns(monkeypatch):
    monkeypatch.setattr(_redraw, "usual_amplification", lambda n, s, m: 0.1)
    with pytest.warns(
        UserWarning,
        match=r"cyclic_repetition with n = 5, stragglers = 2, slices = 1: the amplification .* "
        r"is far above the usual 1.0e-01; another seed or support may do better",
    ):
        codes.cyclic_repetition(5, 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("n", "s", "m"), [(4, 1, 3), (6, 2, 2), (8, 1, 1), (8, 3, 4), (9, 4, 3)]
)
def test_a_usual_amplification_does_not_warn(n, s, m, seed):
    codes.random_generator(n, s, m, seed=seed)  # warnings are errors here


def test_an_amplification_beyond_float64_is_an_error(monkeypatch):
    monkeypatch.setattr(_redraw, "MAX_ROUNDING", 1e-16)
    with pytest.raises(
        ValueError,
        match=r"cyclic_repetition with n = 5, stragglers = 2, slices = 1 cannot be decoded in float64: the best "
        r"amplification is .* after 64 draws; take fewer stragglers, fewer slices",
    ):
        codes.cyclic_repetition(5, 2)


@pytest.mark.parametrize("epsilon", [0.0, 1e-13, 1e-14])
def test_draws_that_cannot_be_decoded_in_float64_are_an_error(epsilon):
    calls = []

    def draw(rng):  # κ = 2/ε − 1
        calls.append(rng)
        return np.array([[1, 0], [1, epsilon]])

    with pytest.raises(
        ValueError, match="nearly with n = 2, .* no draw could be decoded after 64"
    ):
        _redraw.least_amplified(draw, 2, 0, 1, "nearly", 0)
    assert len(calls) == 64


def test_draws_continue_until_one_can_be_decoded(monkeypatch):
    """Draws continue beyond their time limit until one can be decoded."""
    monkeypatch.setattr(_redraw, "draws", lambda *_: 2)
    given = [np.zeros((2, 2))] * 4 + [np.ones((2, 2))] * 10
    code = _redraw.least_amplified(lambda _: given.pop(0), 2, 1, 1, "late", 0)
    np.testing.assert_array_equal(code.B[..., 0], np.ones((2, 2)))
    assert len(given) == 9


# Misuse.


@pytest.mark.parametrize("make", [codes.fractional_repetition, codes.cyclic_repetition])
@pytest.mark.parametrize(
    ("s", "message"),
    [
        (-1, "stragglers must be an integer from 0 to 3, got -1"),
        (1.0, "stragglers must be an integer from 0 to 3, got 1.0"),
        (4, "stragglers must be an integer from 0 to 3, got 4"),
        (9, "stragglers must be an integer from 0 to 3, got 9"),
    ],
)
def test_stragglers_out_of_range(make, s, message):
    with pytest.raises(ValueError, match=message):
        make(4, s)


@pytest.mark.parametrize("n", [0, -1])
def test_no_children(n):
    with pytest.raises(ValueError, match=f"n must be an integer >= 1, got {n}"):
        codes.uncoded(n)


@pytest.mark.parametrize(("n", "s", "take"), [(5, 1, 4), (7, 2, 6), (3, 1, 2)])
def test_groups_that_do_not_fit(n, s, take):
    with pytest.raises(
        ValueError,
        match=rf"fractional repetition needs s \+ 1 = {s + 1} to divide n = {n}; "
        f"take n = {take} children .the fanout of Coded., or code='cyclic_repetition'",
    ):
        codes.fractional_repetition(n, s)


@pytest.mark.parametrize(
    ("s", "m", "message"),
    [
        (-1, 1, "stragglers must be an integer >= 0, got -1"),
        (1, 0, "slices must be an integer >= 1, got 0"),
        (4, 1, r"stragglers \+ slices = 4 \+ 1 children are needed, but n = 4"),
        (2, 3, r"stragglers \+ slices = 2 \+ 3 children are needed, but n = 4"),
    ],
)
def test_a_random_generator_that_cannot_be(s, m, message):
    with pytest.raises(ValueError, match=message):
        codes.random_generator(4, s, m)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"support": np.ones((4, 4)), "loads": [2, 2, 2, 2]},
            "give load, support or loads, not several of them",
        ),
        (
            {"support": np.ones((3, 4))},
            r"support must have shape \(4, k\) with k >= 1, got \(3, 4\)",
        ),
        (
            {"support": np.ones((4, 0))},
            r"support must have shape \(4, k\) with k >= 1, got \(4, 0\)",
        ),
        (
            {"support": np.eye(4)},
            r"partition 0 has 1 holders; it needs s \+ m = 2, so that any 1",
        ),
        ({"loads": [2, 2, 2]}, r"loads must be 4 integers >= 0, got \[2, 2, 2\]"),
        ({"loads": [2.0, 2, 2, 2]}, "loads must be 4 integers >= 0"),
        ({"loads": [-1, 3, 3, 3]}, "loads must be 4 integers >= 0"),
        (
            {"loads": [1, 2, 2, 2]},
            r"must add up to a multiple k\*\(s \+ m\) of s \+ m = 2",
        ),
        (
            {"loads": [0, 0, 0, 0]},
            r"must add up to a multiple k\*\(s \+ m\) of s \+ m = 2",
        ),
        ({"loads": [0, 0, 1, 3]}, "no load may be above k"),
    ],
)
def test_misuse_of_support_and_loads(options, message):
    with pytest.raises(ValueError, match=message):
        codes.random_generator(4, 1, **options)
