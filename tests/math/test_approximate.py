import collections
import itertools
import math
import pickle

import numpy as np
import pytest
from cases import more
from independent import solvable, survivors

from jaxcoded import GradientCode, codes
from jaxcoded.codes import _expander

APPROXIMATE = {
    "bernoulli": codes.bernoulli(9, 4, 3),
    "stochastic_block": codes.stochastic_block(9, 4, 3, 3, inside=0.7),
    "expander": codes.expander(9, 4, 4),
    "block_design": codes.block_design(7, 4),
    "grouped": codes.grouped(8, 4, 4, 2),
    "grouped 3": codes.grouped(7, 4, 4, 3),
    "repetition": codes.approximate(codes.fractional_repetition(6, 1), 4),
    "cyclic": codes.approximate(codes.cyclic_repetition(6, 2), 4),
    "slices": codes.approximate(codes.random_generator(6, 1, 2), 4),
}
REGULAR = {  # every partition on d children
    "expander 2": (codes.expander(8, 4, 2), 2),
    "expander 3": (codes.expander(10, 6, 3), 3),
    "block_design": (codes.block_design(7, 6), 3),
    "grouped": (codes.grouped(8, 6, 4), 4),
    "cyclic": (codes.approximate(codes.cyclic_repetition(9, 1), 6), 2),
}


def every_set(n):
    return map(np.array, itertools.product([False, True], repeat=n))


def random_sets(n, r, count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        answered = np.zeros(n, bool)
        answered[rng.permutation(n)[:r]] = True
        yield answered


def distance(code, answered):
    """Return the distance from the decoded to the true sum, for orthonormal slices of
    all partition gradients.
    """
    gradients = np.eye(code.k * code.m).reshape(code.k, code.m, -1)
    messages = np.tensordot(code.B, gradients, 2)
    A = code.decode(answered).coefficients
    decoded = A[:, answered] @ messages[answered]
    return np.linalg.norm(decoded - gradients.sum(axis=0))


def least_distance(code, answered):
    """Return the distance of the sums from the span of the answers."""
    rows = code.B.reshape(code.n, -1)[answered]
    sums = np.tile(np.eye(code.m), (1, code.k))
    _, values, right = np.linalg.svd(rows, full_matrices=False)
    span = right[values > 1e-9]
    return np.linalg.norm(sums - sums @ span.T @ span)


def one_step(code):
    return codes.approximate(code, code.stragglers, "one_step")


def mean_error(code, r, count=40):
    sets = random_sets(code.n, r, count)
    return np.mean([code.decode(answered).residual ** 2 for answered in sets])


# All codes.


@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_residual_is_the_distance_and_the_least_one(name):
    code = APPROXIMATE[name]
    for answered in every_set(code.n):
        A, residual = code.decode(answered)
        assert residual == pytest.approx(distance(code, answered), abs=1e-9)
        assert residual == pytest.approx(least_distance(code, answered), abs=1e-7)
        assert not A[:, ~answered].any()


@pytest.mark.parametrize("name", APPROXIMATE)
def test_a_parent_continues_with_any_n_minus_s(name):
    code = APPROXIMATE[name]
    assert code.approximate and code.stragglers == 4
    for answered in every_set(code.n):
        assert code.sufficient(answered) == (answered.sum() >= code.n - 4)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_all_answer(name):
    code = APPROXIMATE[name]
    everyone = np.ones(code.n, bool)
    exact = solvable(code.B, everyone)
    assert exact == (name != "stochastic_block")
    assert (code.decode(everyone).residual < 1e-9) == exact


@pytest.mark.parametrize("name", APPROXIMATE)
def test_no_child_answers(name):
    code = APPROXIMATE[name]
    nothing = code.decode(np.zeros(code.n, bool))
    assert not nothing.coefficients.any()
    assert nothing.residual == pytest.approx(math.sqrt(code.k * code.m))


@pytest.mark.parametrize(
    "name", ["bernoulli", "stochastic_block", "expander", "block_design", "repetition"]
)
def test_least_squares_is_never_worse_than_one_step(name):
    best, quick = APPROXIMATE[name], one_step(APPROXIMATE[name])
    pairs = [
        (best.decode(answered).residual, distance(quick, answered))
        for answered in every_set(best.n)
    ]
    assert all(least <= other + 1e-9 for least, other in pairs)
    assert any(least < other - 0.1 for least, other in pairs)


@pytest.mark.parametrize("name", REGULAR)
def test_the_worst_stragglers_of_a_regular_code(name):
    """The worst stragglers hold all copies of at least s/d partitions."""
    code, d = REGULAR[name]
    assert (code.support.sum(axis=0) == d).all()
    for s in range(d, code.stragglers + 1, d):
        worst = max(
            distance(code, answered)
            for answered in survivors(code.n, s)
            if answered.sum() == code.n - s
        )
        assert worst >= math.sqrt(s / d) - 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: codes.bernoulli(12, 2, 4, seed=seed),
        lambda seed: codes.stochastic_block(12, 2, 4, 3, seed=seed),
        lambda seed: codes.expander(12, 2, 4, seed=seed),
    ],
)
def test_equal_seeds_give_equal_codes(make):
    assert make(3) == make(3) == pickle.loads(pickle.dumps(make(3)))
    assert make(3) != make(4)


@pytest.mark.parametrize(
    "make",
    [
        lambda decoding: codes.bernoulli(8, 2, 3, decoding=decoding),
        lambda decoding: codes.stochastic_block(8, 2, 3, 2, decoding=decoding),
        lambda decoding: codes.expander(8, 2, 3, decoding=decoding),
        lambda decoding: codes.block_design(7, 2, decoding=decoding),
        lambda decoding: codes.grouped(8, 2, 4, decoding=decoding),
    ],
)
def test_the_decoding_is_an_argument(make):
    assert make("one_step").decoding == "one_step"
    assert make("least_squares").decoding == "least_squares"
    with pytest.raises(ValueError, match="decoding must be one of"):
        make("best")


# Exact codes beyond what they tolerate.


@pytest.mark.parametrize(
    ("k", "d", "r"), [(6, 2, 3), (8, 2, 4), (8, 4, 2), (8, 4, 6), (9, 3, 4), (10, 5, 3)]
)
def test_the_expected_error_of_fractional_repetition(k, d, r):
    code = codes.approximate(codes.fractional_repetition(k, d - 1), k - r)
    errors = [
        distance(code, np.isin(np.arange(k), chosen)) ** 2
        for chosen in itertools.combinations(range(k), r)
    ]
    expected = k * math.comb(k - d, r) / math.comb(k, r)
    assert np.mean(errors) == pytest.approx(expected, abs=1e-9)


def test_within_its_tolerance_a_code_stays_exact():
    exact = codes.cyclic_repetition(7, 2)
    code = codes.approximate(exact, 4)
    np.testing.assert_array_equal(code.B, exact.B)
    for answered in survivors(7, 4):
        (ours, residual), theirs = code.decode(answered), exact.decode(answered)
        np.testing.assert_array_equal(ours, theirs.coefficients)
        assert (residual < 1e-9) == (answered.sum() >= 5)


def test_parts_and_sizes_are_kept():
    exact = GradientCode(np.eye(4), 0, parts=2, sizes=(1, 2, 3, 4))
    code = codes.approximate(exact, 1)
    assert (code.parts, code.sizes, code.n) == (2, exact.sizes, 2)
    answered = np.array([[True, False], [True, True]])
    assert code.decode(answered).residual == pytest.approx(1)
    assert code.sufficient(answered)


def test_misuse_of_approximate():
    with pytest.raises(ValueError, match="stragglers must be an integer from 0 to 3"):
        codes.approximate(codes.uncoded(4), 4)
    with pytest.raises(ValueError, match="one-step decoding needs one slice"):
        codes.approximate(codes.random_generator(4, 1, 2), 2, "one_step")


# Bernoulli.


@pytest.mark.parametrize("load", [0.1, 1, 2, 5.5, 20])
@pytest.mark.parametrize("seed", range(5))
def test_bernoulli_leaves_nothing_empty(load, seed):
    B = codes.bernoulli(20, 3, load, seed=seed).B
    assert set(np.unique(B)) <= {0.0, 1.0}
    assert B.any(axis=0).all() and B.any(axis=1).all()


@pytest.mark.parametrize("load", [4, 10.5, 60])
def test_the_load_of_bernoulli(load):
    loads = [codes.bernoulli(100, 3, load, seed=seed).loads for seed in range(10)]
    deviation = math.sqrt(load * (1 - load / 100) / 1000)
    # empty rows and columns each add 1.7 of 100 at load 4
    assert np.mean(loads) == pytest.approx(load, abs=4 * deviation + 0.04)
    assert np.std(loads) == pytest.approx(math.sqrt(1000) * deviation, rel=0.1)


def test_the_expected_error_of_bernoulli_in_one_step():
    """The error is (n − load)·n/(r·load): n coordinates, each n/(r·load) times a
    binomial number.
    """
    n, r, load = 64, 48, 8
    errors = [
        mean_error(codes.bernoulli(n, 16, load, seed=seed, decoding="one_step"), r, 20)
        for seed in range(40)
    ]
    assert np.mean(errors) == pytest.approx((n - load) * n / (r * load), rel=0.05)


def test_the_error_of_bernoulli_decreases_with_the_load():
    for decoding in ("least_squares", "one_step"):
        errors = [
            np.mean(
                [
                    mean_error(
                        codes.bernoulli(40, 10, load, seed=seed, decoding=decoding), 30
                    )
                    for seed in range(5)
                ]
            )
            for load in (2, 4, 8, 16, 32)
        ]
        assert all(b < 0.85 * a for a, b in itertools.pairwise(errors)), errors


@pytest.mark.parametrize("load", [0, -1, 5.1, float("nan")])
def test_loads_of_bernoulli_that_cannot_be(load):
    with pytest.raises(ValueError, match="load must be above 0 and at most n = 5"):
        codes.bernoulli(5, 1, load)


# Stochastic blocks.


def test_the_ends_of_stochastic_blocks():
    repetition = codes.approximate(codes.fractional_repetition(12, 3), 5)
    assert codes.stochastic_block(12, 5, 4, 3, inside=1) == repetition
    # a block of n/3 with a third of the load: one probability everywhere
    assert codes.stochastic_block(12, 5, 5, 3, inside=1 / 3) == codes.bernoulli(
        12, 5, 5
    )


@pytest.mark.parametrize("inside", [0, 0.2, 0.8, 1])
def test_the_shares_of_stochastic_blocks(inside):
    own = np.kron(np.eye(5), np.ones((20, 20))).astype(bool)
    supports = [
        codes.stochastic_block(100, 3, 15, 5, inside=inside, seed=seed).support
        for seed in range(5)
    ]
    shares = [(held & own).sum() / 100 for held in supports]
    assert np.mean(shares) == pytest.approx(15 * inside, abs=0.5)
    assert np.mean([held.sum() / 100 for held in supports]) == pytest.approx(
        15, abs=0.6
    )


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_unequal_size_and_nothing_empty(seed):
    held = codes.stochastic_block(7, 2, 0.5, 3, inside=1, seed=seed).support
    assert held.any(axis=0).all() and held.any(axis=1).all()
    block = np.array([0, 0, 0, 1, 1, 2, 2])
    assert not held[block[:, None] != block].any()


def test_the_more_inside_the_less_random_stragglers_harm():
    errors = [
        np.mean(
            [
                mean_error(
                    codes.stochastic_block(48, 16, 6, 8, inside=inside, seed=seed), 32
                )
                for seed in range(4)
            ]
        )
        for inside in (1 / 8, 0.9, 1)
    ]
    assert errors[2] < 0.5 * errors[1] and errors[1] < 0.9 * errors[0], errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 1}, "blocks must be an integer from 2 to 8, got 1"),
        ({"blocks": 9}, "blocks must be an integer from 2 to 8, got 9"),
        ({"load": 0}, "load must be above 0 and inside from 0 to 1, got 0 and 0.8"),
        ({"inside": 1.1}, "load must be above 0 and inside from 0 to 1, got 4 and 1.1"),
        ({"load": 5, "inside": 1}, "cannot hold 5 partitions of its block of 4"),
        ({"load": 5, "inside": 0}, "4 and 5 of the other blocks; take another load"),
    ],
)
def test_misuse_of_stochastic_blocks(options, message):
    with pytest.raises(ValueError, match=message):
        codes.stochastic_block(8, 2, **{"load": 4, "blocks": 2} | options)


# Expanders.


@pytest.mark.parametrize(
    ("n", "d"),
    [(n, d) for n in range(2, 10) for d in range(1, n) if n * d % 2 == 0] + [(60, 7)],
)
def test_expanders_are_regular_graphs(n, d):
    B = codes.expander(n, 1, d).B[:, :, 0]
    np.testing.assert_array_equal(B, B.T)
    np.testing.assert_array_equal(np.diag(B), 0)
    assert set(np.unique(B)) == {0.0, 1 / d}
    np.testing.assert_array_equal((B > 0).sum(axis=1), d)


def second_eigenvalue(B):
    """Return the second eigenvalue of a symmetric ``B`` with row sums 1."""
    n = len(B)
    return np.linalg.norm(B[:, :, 0] - np.ones((n, n)) / n, 2)


@pytest.mark.parametrize(
    ("n", "d"), [(6, 2), (8, 3), (10, 4), more(11, 4), more(10, 7)]
)
def test_the_bound_of_expanders_for_all_stragglers(n, d):
    best = codes.expander(n, n - 1, d)
    quick = one_step(best)
    second = second_eigenvalue(best.B)
    ratios = []
    for answered in survivors(n, n - 1):
        r = answered.sum()
        np.testing.assert_allclose(
            quick.decode(answered).coefficients[0], answered * n / r
        )
        bound = second * math.sqrt(n * (n - r) / r)
        error = distance(quick, answered)
        assert error <= bound + 1e-9
        assert distance(best, answered) <= error + 1e-9
        ratios.append(error / bound if r < n else 0)
    assert max(ratios) > 0.9  # a smaller bound would not hold


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "s"), [(60, 6, 10), (101, 4, 30), more(256, 8, 32)])
def test_the_bound_of_large_expanders(n, d, s):
    code = codes.expander(n, s, d, decoding="one_step")
    bound = second_eigenvalue(code.B) * math.sqrt(n * s / (n - s))
    assert bound < math.sqrt(n)
    for answered in random_sets(n, n - s, 30):
        np.testing.assert_allclose(
            code.decode(answered).coefficients[0], answered * n / (n - s)
        )
        assert distance(code, answered) <= bound


@pytest.mark.parametrize(("n", "d"), [(40, 3), (60, 6), (101, 4)])
def test_expanders_are_nearly_ramanujan(n, d):
    assert second_eigenvalue(codes.expander(n, 1, d).B) * d < 1.03 * 2 * math.sqrt(
        d - 1
    )


def test_the_graph_with_the_least_eigenvalue_is_kept(monkeypatch):
    seen = []
    original = _expander._second_eigenvalue

    def spy(adjacency):
        seen.append(original(adjacency))
        return seen[-1]

    monkeypatch.setattr(_expander, "_second_eigenvalue", spy)
    code = codes.expander(30, 2, 4)
    assert len(seen) == 64 and len(set(np.round(seen, 6))) > 50
    assert second_eigenvalue(code.B) * 4 == pytest.approx(min(seen))


def test_all_regular_graphs_come_up():
    """There are 70 graphs with 6 vertices of degree 3."""
    rng = np.random.default_rng(0)
    edges = _expander._circulant(6, 3)
    graphs = collections.Counter()
    for _ in range(7000):
        edges = _expander._switched(edges, 6, rng)
        graphs[tuple(sorted(map(tuple, np.sort(edges).tolist())))] += 1
    assert len(graphs) == 70
    assert min(graphs.values()) > 20


@pytest.mark.parametrize(
    ("n", "d", "message"),
    [
        (7, 3, "their product is odd; take degree 2 or 4, or another n"),
        (6, 0, "degree must be an integer from 1 to 5, got 0"),
        (6, 6, "degree must be an integer from 1 to 5, got 6"),
        (1, 1, "n must be an integer >= 2, got 1"),
    ],
)
def test_expanders_that_cannot_be(n, d, message):
    with pytest.raises(ValueError, match=message):
        codes.expander(n, 0, d)


# Block designs.

DESIGNS = [
    (7, 3, 1),
    (11, 5, 2),
    (13, 4, 1),
    (15, 7, 3),
    (19, 9, 4),
    (23, 11, 5),
    (31, 6, 1),
    (31, 15, 7),
    (40, 13, 4),
    (57, 8, 1),
    (63, 31, 15),
    (121, 40, 13),
    (183, 14, 1),
    (255, 127, 63),
]


@pytest.mark.parametrize(("n", "k", "common"), DESIGNS)
def test_designs(n, k, common):
    B = codes.block_design(n, 1, k).B[:, :, 0]
    assert set(np.unique(B)) == {0.0, 1.0}
    wanted = (k - common) * np.eye(n) + common
    np.testing.assert_array_equal(B @ B.T, wanted)
    np.testing.assert_array_equal(B.T @ B, wanted)


def test_the_smallest_load_is_the_default():
    assert (codes.block_design(31, 1).loads == 6).all()
    assert (codes.block_design(31, 1, 15).loads == 15).all()


@pytest.mark.parametrize(
    ("n", "k", "common", "s"),
    [(7, 3, 1, 7), more(11, 5, 2, 11), (13, 4, 1, 4), (15, 7, 3, 3), more(31, 6, 1, 2)],
)
def test_all_stragglers_are_alike_to_a_block_design(n, k, common, s):
    code = codes.block_design(n, min(s, n - 1), k)
    for answered in survivors(n, s):
        r = answered.sum()
        A, residual = code.decode(answered)
        np.testing.assert_allclose(
            A[0], answered * k / (k - common + common * r), atol=1e-9
        )
        squared = n - k**2 * r / (k - common + common * r)
        assert residual**2 == pytest.approx(squared, abs=1e-9)
        assert distance(code, answered) ** 2 == pytest.approx(squared, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "nearest"),
    [(1, "7"), (8, "7 or 11"), (16, "15 or 19"), (21, "19 or 23"), (256, "255 or 263")],
)
def test_the_nearest_designs_are_named(n, nearest):
    with pytest.raises(ValueError, match=f"n = {n}; the nearest are n = {nearest}$"):
        codes.block_design(n, 0)


def test_the_loads_of_designs_are_named():
    with pytest.raises(ValueError, match="n = 31 have load 6 or 15, got 7"):
        codes.block_design(31, 1, 7)


# Groups with slices.


@pytest.mark.parametrize(
    ("n", "load", "m", "sizes"),
    [
        (7, 4, 2, [4, 3]),
        (8, 4, 3, [4, 4]),
        (9, 5, 4, [5, 4]),
        (10, 4, 1, [4, 3, 3]),
        (6, 6, 6, [6]),
    ],
)
def test_the_error_of_groups_of_every_answered_set(n, load, m, sizes):
    code = codes.grouped(n, n - 1, load, m)
    group = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(code.support, group[:, None] == group)
    assert code.B.shape == (n, n, m)
    for answered in every_set(n):
        answers = np.bincount(group[answered], minlength=len(sizes))
        squared = (np.array(sizes) * np.maximum(0, m - answers)).sum()
        assert code.decode(answered).residual ** 2 == pytest.approx(squared, abs=1e-9)


@pytest.mark.parametrize(("n", "s"), [(6, 1), (8, 3), (9, 2)])
def test_groups_with_one_slice_are_fractional_repetition(n, s):
    repetition = codes.fractional_repetition(n, s)
    assert codes.grouped(n, n - 1, s + 1) == codes.approximate(repetition, n - 1)


@pytest.mark.parametrize(("load", "m"), [(4, 2), (4, 3), (6, 4), (8, 3), (8, 8)])
def test_groups_are_exact_while_m_answer(load, m):
    code = codes.grouped(2 * load, load - m, load, m, decoding="exact")
    assert code.amplification < 10 ** (load / 3)
    with pytest.raises(ValueError, match="cannot be decoded from every"):
        codes.grouped(2 * load, load - m + 1, load, m, decoding="exact")


@pytest.mark.parametrize(
    ("n", "load", "m", "message"),
    [
        (7, 4, 4, "4 slices need groups of at least 4 children, but 7 .* groups of 3"),
        (4, 5, 1, "load must be an integer from 1 to 4, got 5"),
        (4, 0, 1, "load must be an integer from 1 to 4, got 0"),
        (4, 2, 0, "slices must be an integer >= 1, got 0"),
    ],
)
def test_groups_that_cannot_be(n, load, m, message):
    with pytest.raises(ValueError, match=message):
        codes.grouped(n, 0, load, m)
