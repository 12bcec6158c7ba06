import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, error, solvable, survivors

from jaxcoded import GradientCode, codes

TANDON = np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])

SMALL_CODES = {
    "uncoded": codes.uncoded(4),
    "fractional 6, 1": codes.fractional_repetition(6, 1),
    "fractional 6, 2": codes.fractional_repetition(6, 2),
    "cyclic 5, 1": codes.cyclic_repetition(5, 1),
    "cyclic 7, 3": codes.cyclic_repetition(7, 3),
    "random 5, 2": codes.random_generator(5, 2),
    "random 6, 1, 2": codes.random_generator(6, 1, 2),
    "random 6, 2, 2": codes.random_generator(6, 2, 2),
    "random 5, 0, 3": codes.random_generator(5, 0, 3),
    "unequal": codes.random_generator(4, 1, loads=[1, 2, 2, 3]),
    "idle child": codes.random_generator(4, 1, loads=[0, 3, 2, 3]),
    "one partition": GradientCode(np.ones((3, 1)), 2),
    "one child": codes.uncoded(1),
}
each_code = pytest.mark.parametrize("code", SMALL_CODES.values(), ids=SMALL_CODES)


# Tandon et al. 2017, figure 2.


def test_example_of_tandon():
    code = GradientCode(TANDON)
    assert (code.n, code.k, code.m, code.stragglers) == (3, 3, 1, 1)
    assert code.loads.tolist() == [2, 2, 2]
    np.testing.assert_array_equal(code.support, TANDON != 0)
    A = np.array([[0, 1, 2], [1, 0, 1], [2, -1, 0]])
    np.testing.assert_array_equal(A @ TANDON, np.ones((3, 3)))
    for missing, row in enumerate(A):
        answered = np.arange(3) != missing
        np.testing.assert_allclose(
            code.decode(answered).coefficients, [row], atol=1e-12
        )


def test_amplification_of_tandon():
    # without child 0: |0|·|B_0| + |1|·|B_1| + |2|·|B_2| = (1, 1, 3)
    assert GradientCode(TANDON).amplification == pytest.approx(3)


# Every answered set.


@each_code
def test_every_answered_set(code):
    for answered in map(np.array, itertools.product([False, True], repeat=code.n)):
        A = code.decode(answered).coefficients
        possible = solvable(code.B, answered)
        assert code.decodable(answered) == possible
        assert (error(A, code.B) < 1e-9) == possible
        assert not A[:, ~answered].any()
        if not answered.all() and answered.sum() >= code.n - code.stragglers:
            assert possible


@pytest.mark.parametrize("seed", range(10))
def test_surplus_answers_of_one_group_do_not_stand_in_for_another(seed):
    """Rounding must not let the surplus child of the first group replace a child of the
    second.
    """
    rng = np.random.default_rng(seed)
    B = np.zeros((5, 4, 1))
    B[:3, :2, 0] = rng.standard_normal((3, 1)) @ np.ones((1, 2))
    B[3:, 2:, 0] = rng.standard_normal((2, 2))
    code = GradientCode(B)
    assert code.stragglers == 0
    for answered in map(np.array, itertools.product([False, True], repeat=5)):
        assert code.decodable(answered) == solvable(B, answered)


def test_an_idle_child_replaces_no_other():
    B = np.array([[0, 0], [-1.16299016, -0.18708582], [-0.3394646, -0.22767632]])[
        :, None, :
    ]
    code = GradientCode(B, 0)  # m = 2, so both other children are needed
    assert code.decodable([1, 2])
    assert not code.decodable([0, 1]) and not code.decodable([0, 2])


@each_code
def test_residual_is_the_least_squares_distance(code):
    target = np.tile(np.eye(code.m), (1, code.k))
    rows = code.B.reshape(code.n, -1)
    for answered in map(np.array, itertools.product([False, True], repeat=code.n)):
        left = target - target @ np.linalg.pinv(rows[answered]) @ rows[answered]
        assert code.decode(answered).residual == pytest.approx(
            np.linalg.norm(left), abs=1e-9
        )


@pytest.mark.parametrize("missing", range(5))
def test_residual_of_an_uncoded_sum(missing):
    A, residual = codes.uncoded(4).decode([True] * (4 - missing) + [False] * missing)
    assert residual == pytest.approx(np.sqrt(missing))
    np.testing.assert_allclose(A, [[1] * (4 - missing) + [0] * missing], atol=1e-12)


def test_answered_as_mask_and_as_numbers():
    code = codes.cyclic_repetition(5, 2)
    mask = code.decode([True, False, True, False, True]).coefficients
    np.testing.assert_array_equal(code.decode([0, 2, 4]).coefficients, mask)
    np.testing.assert_array_equal(code.decode(np.array([4, 0, 2])).coefficients, mask)
    assert (
        code.decodable([0, 2, 4])
        and not code.decodable([0, 4])
        and not code.decodable([])
    )


def test_replicas_give_the_first_that_answered():
    B = np.array([[1.0, 0], [0, 2], [1, 0], [0, 2]])
    A = GradientCode(B).decode([False, True, True, True]).coefficients
    np.testing.assert_array_equal(A, [[0, 0.5, 1, 0]])


# Tolerance.


@each_code
def test_tolerance_found_by_enumeration(code):
    largest = max(
        s
        for s in range(code.n)
        if all(solvable(code.B, answered) for answered in survivors(code.n, s))
    )
    assert GradientCode(code.B).stragglers == largest >= code.stragglers


@bounded
@given(st.data())
def test_every_partition_needs_stragglers_plus_slices_holders(data):
    """d ≥ s + m holds for any B."""
    n, k, m = (data.draw(st.integers(1, largest)) for largest in (6, 4, 2))
    seed = data.draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((n, k, m)) * (rng.random((n, k, 1)) < 0.8)
    try:
        code = GradientCode(B)
    except ValueError:
        assert not solvable(B, np.ones(n, bool))
    else:
        assert code.support.sum(axis=0).min() >= code.stragglers + m
        for answered in survivors(n, code.stragglers):
            assert error(code.decode(answered).coefficients, B) < 1e-6


def test_a_tolerance_beyond_the_code():
    with pytest.raises(
        ValueError, match="cannot be decoded from every 2 of its 4 children"
    ):
        GradientCode(codes.cyclic_repetition(4, 1).B, 2)


# Amplification.


@each_code
def test_amplification_is_the_largest_over_all_answered_sets(code):
    rows = code.B.reshape(code.n, -1)
    target = np.tile(np.eye(code.m), (1, code.k))
    kappa = 0.0
    for answered in survivors(code.n, code.stragglers):
        used = answered.copy()
        for i, j in itertools.combinations(np.flatnonzero(answered), 2):
            used[j] &= not np.array_equal(rows[i], rows[j])  # copies count once
        A = target @ np.linalg.pinv(rows[used])
        kappa = max(kappa, (np.abs(A) @ np.abs(code.B[used]).sum(axis=2)).max())
    assert code.amplification == pytest.approx(kappa)


@pytest.mark.parametrize("scale", [1e-100, 1e-12, 1e-9, 3.0, 1e9, 1e12, 1e100])
def test_scale_does_not_matter(scale):
    code = GradientCode(TANDON * scale)
    assert code.stragglers == 1
    assert code.amplification == pytest.approx(3)
    assert error(code.decode([1, 2]).coefficients * scale, TANDON[:, :, None]) < 1e-9


def test_at_most_256_sets_are_tried(monkeypatch):
    tried = []
    solve = GradientCode._solve

    def spy(self, missing):
        tried.append(len(missing))
        return solve(self, missing)

    monkeypatch.setattr(GradientCode, "_solve", spy)
    code = GradientCode(codes.cyclic_repetition(12, 4).B, 4)  # 794 patterns
    assert code.amplification > 1
    assert 100 < max(tried) <= 256  # sampled sets may coincide


def test_large_sets_decode_although_only_some_were_tried():
    code = codes.cyclic_repetition(40, 6)
    rng = np.random.default_rng(1)
    for _ in range(300):
        answered = rng.permutation(40)[: 40 - 6]
        assert error(code.decode(answered).coefficients, code.B) < 1e-6


def test_many_partitions_do_not_need_a_square_matrix_of_them():
    B = np.tile(np.eye(4), (1, 50_000))
    A = GradientCode(B, 0).decode([0, 1, 2, 3]).coefficients
    np.testing.assert_allclose(A, np.ones((1, 4)), atol=1e-12)


# Values.


def test_equality_and_hash_are_by_value():
    code = GradientCode(TANDON, 1)
    assert code == GradientCode(TANDON.tolist(), 1, "another name")
    assert hash(code) == hash(GradientCode(TANDON.tolist(), 1, "another name"))
    assert (
        code != GradientCode(TANDON, 0)
        and code != GradientCode(TANDON * 2, 1)
        and code != 1
    )


def test_equal_codes_have_equal_hashes_whatever_the_sign_of_zero():
    one, other = GradientCode(np.eye(2)), GradientCode([[1.0, -0.0], [-0.0, 1.0]])
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_are_equal(clone):
    code = codes.random_generator(5, 1, 2)
    other = clone(code)
    assert other == code and hash(other) == hash(code) and other.name == code.name
    np.testing.assert_array_equal(
        other.decode([0, 1, 2, 3]).coefficients, code.decode([0, 1, 2, 3]).coefficients
    )


def test_arrays_cannot_be_changed():
    given = TANDON.copy()
    code = GradientCode(given)
    given[0] = 7
    np.testing.assert_array_equal(code.B[:, :, 0], TANDON)
    for array in (code.B, code.decode([0, 1]).coefficients):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# Misuse.


@pytest.mark.parametrize(
    ("B", "message"),
    [
        (np.full((2, 2), np.nan), "B has entries that are not finite"),
        ([[1, np.inf], [0, 1]], "B has entries that are not finite"),
        (np.ones(3), r"B must have shape \(n, k, m\) with no axis empty, got \(3,\)"),
        (np.ones((0, 3)), r"no axis empty, got \(0, 3\)"),
        (np.ones((2, 2, 2, 2)), r"got \(2, 2, 2, 2\)"),
        (np.zeros((2, 2)), "this B cannot be decoded even when every child answers"),
        ([[1, 0], [1, 0]], "this B cannot be decoded even when every child answers"),
    ],
)
def test_misuse_of_the_tensor(B, message):
    with pytest.raises(ValueError, match=message):
        GradientCode(B)


@pytest.mark.parametrize(
    ("stragglers", "message"),
    [
        (-1, "stragglers must be an integer from 0 to 2, got -1"),
        (True, "stragglers must be an integer from 0 to 2, got True"),
        (3, "stragglers must be an integer from 0 to 2, got 3"),
    ],
)
def test_misuse_of_stragglers(stragglers, message):
    with pytest.raises(ValueError, match=message):
        GradientCode(TANDON, stragglers)


def test_a_tolerance_too_long_to_find():
    with pytest.raises(
        ValueError, match="n = 40 needs more than 20,000 patterns; pass stragglers="
    ):
        GradientCode(np.ones((40, 1)))


@pytest.mark.parametrize(
    ("answered", "kind", "message"),
    [
        ([True, False], ValueError, r"answered must have shape \(3,\), got \(2,\)"),
        ([0, 3], ValueError, "distinct children from 0 to 2"),
        ([-1], ValueError, "distinct children from 0 to 2"),
        ([1, 0, 1], ValueError, "distinct children from 0 to 2"),
        ([0.5], TypeError, "answered must be a bool array or a list of child indices"),
        (
            [[0, 1]],
            TypeError,
            "answered must be a bool array or a list of child indices",
        ),
        (None, TypeError, "answered must be a bool array or a list of child indices"),
    ],
)
@pytest.mark.parametrize("method", ["decode", "decodable"])
def test_misuse_of_answered(method, answered, kind, message):
    with pytest.raises(kind, match=message):
        getattr(GradientCode(TANDON), method)(answered)
