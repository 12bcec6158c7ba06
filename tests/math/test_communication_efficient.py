"""Codes with messages of 1/m: polynomial codes, and linear codes in groups."""

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, error, identity, solvable, survivors

from jaxcoded import GradientCode, codes

EPS32 = np.finfo(np.float32).eps

SMALL = {
    "polynomial 4, 1, 2": codes.polynomial(4, 1, 2),
    "polynomial 5, 2, 2": codes.polynomial(5, 2, 2),
    "polynomial 6, 3": codes.polynomial(6, 3),
    "polynomial 7, 1, 3": codes.polynomial(7, 1, 3),
    "polynomial 8, 2, 3": codes.polynomial(8, 2, 3),
    "polynomial 6, 1, 2 with load 5": codes.polynomial(6, 1, 2, load=5),
    "polynomial 5, 0, 5": codes.polynomial(5, 0, 5),
    "polynomial 5, 4": codes.polynomial(5, 4),
    "gaussian 8, 2, 2": codes.gaussian_mds(8, 2, 2),
    "gaussian 6, 0, 3": codes.gaussian_mds(6, 0, 3),
    "gaussian 6, 3, 3": codes.gaussian_mds(6, 3, 3),
    "parity check 8, 3": codes.single_parity_check(8, 3),
    "parity check 9, 2": codes.single_parity_check(9, 2),
    "repetition 9, 2": codes.linear(9, np.ones((1, 3))),
    "reed_solomon 8, 2, 2": codes.reed_solomon(8, 2, 2),
    "reed_solomon 10, 3, 2": codes.reed_solomon(10, 3, 2),
    "hamming 3, 2": codes.hamming(3, 2),
    "hamming 7, 3": codes.hamming(7, 3),
    "linear with an idle child": codes.linear(6, [[1, 0, 1], [0, 0, 1]]),
    "linear with copies": codes.linear(8, [[1, 0, 1, 0], [0, 1, 0, 1]]),
    "random with load 4": codes.random_generator(6, 1, 2, load=4),
}
LARGE = {
    "polynomial 20, 2, 2": lambda: codes.polynomial(20, 2, 2),
    "polynomial 40, 1, 2": lambda: codes.polynomial(40, 1, 2),
    "polynomial 16, 6": lambda: codes.polynomial(16, 6),
    "gaussian 64, 4, 4": lambda: codes.gaussian_mds(64, 4, 4),
    "gaussian 256, 2, 2": lambda: codes.gaussian_mds(256, 2, 2),
    "parity check 64, 7": lambda: codes.single_parity_check(64, 7),
    "reed_solomon 64, 4, 4": lambda: codes.reed_solomon(64, 4, 4),
    "hamming 60, 4": lambda: codes.hamming(60, 4),
    "hamming 62, 5": lambda: codes.hamming(62, 5),
}
each_small = pytest.mark.parametrize("code", SMALL.values(), ids=SMALL)
each_large = pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)


def decoded(code, answered, gradients, dtype=np.float64):
    """Return the sum from messages and coefficients of one dtype; ``gradients`` is
    ``(k, q)``.
    """
    slices = gradients.astype(dtype).reshape(code.k, code.m, -1)
    messages = np.einsum("iju,juq->iq", code.B.astype(dtype), slices)
    messages[np.setdiff1d(np.arange(code.n), np.flatnonzero(answered))] = np.nan
    A = code.decode(answered).coefficients.astype(dtype)
    return (A[:, answered] @ messages[answered]).reshape(-1)


def by_least_squares(code, answered, gradients):
    """Return the sum by B alone: lstsq gives A for all children that answered."""
    rows = code.B.reshape(code.n, -1)[answered]
    target = identity(code.B).reshape(code.m, -1)
    A = np.linalg.lstsq(rows.T, target.T, rcond=None)[0].T
    slices = gradients.reshape(code.k, code.m, -1)
    return (A @ np.einsum("iju,juq->iq", code.B[answered], slices)).reshape(-1)


def random_survivors(code, rng):
    answered = np.ones(code.n, bool)
    answered[rng.permutation(code.n)[: code.stragglers]] = False
    return answered


# Every scheme.


@each_small
def test_every_answered_set(code):
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((code.k, 3 * code.m))
    total = gradients.sum(axis=0)
    for answered in map(np.array, itertools.product([False, True], repeat=code.n)):
        possible = solvable(code.B, answered)
        assert code.decodable(answered) == possible
        if code.n - answered.sum() <= code.stragglers:
            assert possible
        if possible:
            tolerance = 1e-12 * max(10, code.amplification)
            got = decoded(code, answered, gradients)
            np.testing.assert_allclose(got, total, atol=tolerance)
            expected = by_least_squares(code, answered, gradients)
            np.testing.assert_allclose(got, expected, atol=100 * tolerance)


@each_large
def test_random_answered_sets_of_large_codes(make):
    code = make()
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((code.k, 2 * code.m))
    scale = np.abs(gradients).sum(axis=0).max()
    for _ in range(30):
        answered = random_survivors(code, rng)
        assert code.decodable(answered)
        off = np.abs(decoded(code, answered, gradients) - gradients.sum(axis=0)).max()
        assert off <= 1e-13 * max(10, code.amplification) * scale


@pytest.mark.parametrize(
    "code",
    [*SMALL.values(), codes.polynomial(12, 2, 2), codes.gaussian_mds(64, 4, 4)],
    ids=[*SMALL, "polynomial 12, 2, 2", "gaussian 64, 4, 4"],
)
def test_rounding_of_float32_sums_is_bounded_by_the_amplification(code):
    """Relative to κ · Σ|g|, every message loses at most (k·m + 2) · eps, and the parent's sum loses as much for each of
    its n terms.
    """
    rng = np.random.default_rng(2)
    patterns = list(survivors(code.n, code.stragglers)) if code.n < 9 else []
    patterns += [random_survivors(code, rng) for _ in range(20)]
    gradients = rng.standard_normal((code.k, 4 * code.m))
    largest = np.abs(gradients).sum(axis=0).max()
    for answered in patterns:
        off = decoded(code, answered, gradients, np.float32) - gradients.sum(axis=0)
        terms = code.k * code.m + code.n + 4
        assert np.abs(off).max() <= terms * EPS32 * code.amplification * largest


@each_small
def test_messages_and_loads(code):
    assert (code.support.sum(axis=0) >= code.stragglers + code.m).all()  # d ≥ s + m


@bounded
@given(st.data())
def test_the_load_is_at_least_stragglers_plus_slices(data):
    """d ≥ s + m is tight: these codes have d = s + m, and none tolerates one more
    straggler.
    """
    m = data.draw(st.integers(1, 3))
    s = data.draw(st.integers(0, 3))
    made = [
        codes.polynomial(s + m + data.draw(st.integers(0, 3)), s, m),
        codes.gaussian_mds((s + m) * data.draw(st.integers(1, 2)), s, m),
        codes.reed_solomon((s + m) * data.draw(st.integers(1, 2)), s, m),
    ]
    for code in made:
        assert (code.loads == s + m).all() and code.stragglers == s and code.m == m
        assert all(code.decodable(answered) for answered in survivors(code.n, s))
        lost = np.ones(code.n, bool)
        lost[np.flatnonzero(code.support[:, 0])[: s + 1]] = False
        assert not code.decodable(lost)


# Polynomial codes.


@pytest.mark.parametrize(
    ("n", "s", "m", "load"),
    [(4, 1, 2, None), (5, 2, 1, None), (7, 2, 2, 5), (8, 1, 3, None), (6, 1, 2, 6)],
)
def test_polynomials_of_ye_and_abbe(n, s, m, load):
    """Partition j has polynomials with roots at the children without it, whose top m
    coefficients are an identity."""
    code = codes.polynomial(n, s, m, load=load)
    d = load or s + m
    held = (np.arange(n)[None, :] - np.arange(n)[:, None]) % n < d
    np.testing.assert_array_equal(code.support, held)
    points = sorted([*(1 + i / 2 for i in range(n // 2))] * 2)
    points = np.array([0.0] * (n % 2) + points) * np.resize(
        [1, -1] if n % 2 == 0 else [-1, 1], n
    )
    for j in range(n):
        for u in range(m):
            degree = n - d + m - 1
            p, *_ = np.linalg.lstsq(
                np.vander(points, degree + 1), code.B[:, j, u], rcond=None
            )
            np.testing.assert_allclose(
                np.polyval(p, points), code.B[:, j, u], atol=1e-9
            )
            np.testing.assert_allclose(p[:m], np.eye(m)[m - 1 - u], atol=1e-7)


def test_a_polynomial_code_with_a_larger_load_loses_up_to_load_minus_slices():
    code = codes.polynomial(7, 1, 2, load=5)
    assert code.stragglers == 1 and (code.loads == 5).all()
    assert all(code.decodable(answered) for answered in survivors(7, 3))
    assert GradientCode(code.B).stragglers == 3


def test_a_larger_load_lowers_the_amplification():
    kappa = [codes.polynomial(8, 2, 2, load=d).amplification for d in (4, 6, 8)]
    assert kappa[0] > 2 * kappa[1] > 4 * kappa[2]


@pytest.mark.parametrize("make", [codes.polynomial, codes.random_generator])
def test_the_least_load_is_the_default(make):
    assert make(8, 2, 2, load=4) == make(8, 2, 2)


def error_of_the_paper(code, rng, sets=10):
    """Return the worst relative error of the sum after inverting the Vandermonde
    matrix.
    """
    n, m, d = code.n, code.m, code.loads[0]
    # recompute the points, as the code has only B
    sizes = [0.0] * (n % 2) + sorted([1 + i / 2 for i in range(n // 2)] * 2)
    points = np.array(sizes) * np.resize([1, -1] if n % 2 == 0 else [-1, 1], n)
    V = np.vander(points, n - d + m, increasing=True).T
    slices = rng.standard_normal((n, m))
    messages = np.einsum("iju,ju->i", code.B, slices)
    total = slices.sum(axis=0)
    worst = 0.0
    for _ in range(sets):
        heard = rng.permutation(n)[: n - d + m]
        got = np.linalg.solve(V[:, heard].T, messages[heard])[n - d :]
        worst = max(worst, np.abs(got - total).max() / np.abs(total).max())
    return worst


@pytest.mark.parametrize(("n", "paper"), [(8, 2e-12), (12, 2e-9)])
def test_inverting_the_vandermonde_matrix_loses_digits(n, paper):
    """Worst relative errors over all loads and slices: the orders of magnitude of the
    paper's. These codes need all ``n − s`` answers, so each set has one ``A``. The
    paper's method and this decoder differ by rounding alone. Which of them is nearer to the exact sum depends on chance
    and LAPACK; the bound on rounding does not.

    Relative to ``Σ_i |A_ui| Σ_jv |B_ijv g_jv|``, ``terms`` consecutive additions lose
    at most ``terms · eps / 2``. A loses as much, as its computation takes as many additions. Errors of either sign
    mostly add up to ``√terms · eps / 2`` (Higham and Mary 2019, SISC 41 A2815).
    """
    rng = np.random.default_rng(0)
    eps = np.finfo(float).eps
    of_paper, usual = 0.0, []
    for d in range(2, n):
        for m in range(1, d):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = codes.polynomial(n, d - m, m)
            of_paper = max(of_paper, error_of_the_paper(code, rng))
            gradients = rng.standard_normal((n, m))
            answered = random_survivors(code, rng)
            off = np.abs(decoded(code, answered, gradients) - gradients.sum(axis=0))
            added = np.einsum("iju,ju->i", np.abs(code.B), np.abs(gradients))
            added = np.abs(code.decode(answered).coefficients) @ added
            terms = n * m + n + 4
            assert (off <= terms * eps * added).all()
            usual.append((off / added).max() / (terms**0.5 * eps / 2))
    assert paper / 100 < of_paper < paper * 100
    assert np.median(usual) < 1


@pytest.mark.parametrize(
    ("n", "s", "m"), [(20, 5, 5), (18, 1, 9), (22, 1, 11), (64, 4, 4), (256, 1, 2)]
)
def test_polynomial_codes_beyond_float64_are_refused(n, s, m):
    with pytest.raises(
        ValueError,
        match=f"polynomial with n = {n}, stragglers = {s}, slices = {m} cannot be decoded "
        "in float64: .*; use random_generator .the same loads, and stable.",
    ):
        codes.polynomial(n, s, m)
    if n < 64:
        codes.random_generator(n, s, m)  # the remedy that the error names works


def test_a_polynomial_code_that_amplifies_far_more_than_random_ones_warns():
    with pytest.warns(
        UserWarning, match=r"n = 16, .* far above the amplification of random codes"
    ):
        codes.polynomial(16, 1, 8 - 2)


def test_the_hardest_sets_of_a_polynomial_code_are_neighbouring_points(monkeypatch):
    """Sampling misses these sets, but κ covers them: κ of the samples alone is acceptable, κ of these sets is not."""
    code = codes.polynomial(16, 3, 2)
    missing = [11, 13, 15]  # −3.5, −4, −4.5
    answered = np.isin(np.arange(16), missing, invert=True)
    A = np.abs(code.decode(answered).coefficients)
    kappa = (A @ np.abs(code.B).sum(axis=2)).max()
    assert code.amplification == pytest.approx(kappa)
    sampled = GradientCode(code.B, 3).amplification
    assert kappa > 1.2 * sampled
    limit = np.sqrt(kappa * sampled) * np.finfo(float).eps
    monkeypatch.setattr("jaxcoded.codes._redraw.MAX_ROUNDING", limit)
    with pytest.raises(ValueError, match="cannot be decoded in float64"):
        codes.polynomial(16, 3, 2)


@pytest.mark.parametrize("make", [codes.polynomial, codes.random_generator])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "n must be an integer >= 1, got 0"),
        ((4, -1), "stragglers must be an integer >= 0, got -1"),
        ((4, 1, 0), "slices must be an integer >= 1, got 0"),
        ((4, 2, 3), r"stragglers \+ slices = 2 \+ 3 children are needed, but n = 4"),
        ((6, 2, 2, 3), "load must be an integer from 4 to 6, got 3"),
        ((6, 2, 2, 7), "load must be an integer from 4 to 6, got 7"),
    ],
)
def test_codes_that_cannot_be(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments[:3], load=arguments[3] if len(arguments) > 3 else None)


@bounded
@given(st.data())
def test_random_generators_of_any_load(data):
    n = data.draw(st.integers(1, 7))
    m = data.draw(st.integers(1, min(3, n)))
    s = data.draw(st.integers(0, n - m))
    d = data.draw(st.integers(s + m, n))
    code = codes.random_generator(n, s, m, load=d)
    assert (code.loads == d).all() and (code.support.sum(axis=0) == d).all()
    for answered in survivors(n, s):
        A = code.decode(answered).coefficients
        assert error(A, code.B) < 1e-13 * max(10, code.amplification)


# Linear codes in groups.


def rank_distance(G):
    """Return the minimum distance: the size of the smallest set of columns without
    which the rank decreases.
    """
    m, d = G.shape
    for e in range(1, d + 1):
        for lost in itertools.combinations(range(d), e):
            left = np.delete(G, lost, axis=1)
            if e == d or np.linalg.matrix_rank(left) < m:
                return e


@bounded
@given(st.data())
def test_any_generator(data):
    m = data.draw(st.integers(1, 3))
    d = data.draw(st.integers(1, 6))
    entry = st.integers(-2, 2)
    G = np.array(
        data.draw(
            st.lists(st.lists(entry, min_size=d, max_size=d), min_size=m, max_size=m)
        )
    )
    if np.linalg.matrix_rank(G) < m:
        with pytest.raises(
            ValueError, match=f"the {m} rows of the generator have rank"
        ):
            codes.linear(d, G)
        return
    distance = rank_distance(G)
    assert codes.minimum_distance(G) == distance
    code = codes.linear(2 * d, G)
    assert (code.m, code.stragglers) == (m, distance - 1)
    busy = G.any(axis=0)
    np.testing.assert_array_equal(code.loads, np.tile(np.where(busy, d, 0), 2))
    for _ in range(10):
        answered = np.array(
            data.draw(st.lists(st.booleans(), min_size=2 * d, max_size=2 * d))
        )
        ranks = [
            np.linalg.matrix_rank(G[:, group]) if group.any() else 0
            for group in answered.reshape(2, d)
        ]
        assert code.decodable(answered) == (ranks == [m, m])


@pytest.mark.parametrize(
    ("make", "block"),
    [
        (lambda: codes.gaussian_mds(8, 2, 2), (4, 2, 3)),
        (lambda: codes.gaussian_mds(6, 3, 3), (6, 3, 4)),
        (lambda: codes.single_parity_check(8, 3), (4, 3, 2)),
        (lambda: codes.linear(9, np.ones((1, 3))), (3, 1, 3)),
        (lambda: codes.reed_solomon(10, 3, 2), (5, 2, 4)),
        (lambda: codes.reed_solomon(18, 5, 4), (9, 4, 6)),
        (lambda: codes.hamming(3, 2), (3, 1, 3)),
        (lambda: codes.hamming(14, 3), (7, 4, 3)),
        (lambda: codes.hamming(15, 4), (15, 11, 3)),
        (lambda: codes.hamming(31, 5), (31, 26, 3)),
    ],
)
def test_length_is_load_dimension_is_slices_and_distance_is_tolerance(make, block):
    code = make()
    G = code.B[: block[0], 0].T
    np.testing.assert_array_equal(
        code.B,
        np.kron(np.eye(code.n // block[0]), np.ones([block[0]] * 2))[..., None]
        * np.tile(G.T, (code.n // block[0], 1))[:, None],
    )
    assert (code.loads == block[0]).all()
    assert (code.loads[0], code.m, code.stragglers + 1) == block
    assert codes.minimum_distance(G) == block[2]


def test_hamming_decodes_from_any_5_of_7_and_not_from_every_4():
    code = codes.hamming(7, 3)
    four, five = (
        [code.decodable(heard) for heard in itertools.combinations(range(7), size)]
        for size in (4, 5)
    )
    assert all(five) and any(four) and not all(four)
    assert GradientCode(code.B).stragglers == 2


@pytest.mark.parametrize(("n", "s"), [(6, 1), (6, 2), (8, 3), (4, 0), (5, 4)])
def test_repetition_is_fractional_repetition(n, s):
    code = codes.linear(n, np.ones((1, s + 1)))
    assert code == codes.fractional_repetition(n, s)
    for answered in map(np.array, itertools.product([False, True], repeat=n)):
        groups = answered.reshape(-1, s + 1).any(axis=1)
        assert code.decodable(answered) == groups.all()
    assert code.amplification == 1


def test_a_parity_check_decodes_by_signs():
    code = codes.single_parity_check(12, 3)
    assert code.amplification == pytest.approx(
        5
    )  # 2·1 + 3: one slice is the difference of 3 others
    for missing in range(12):
        A = code.decode(np.arange(12) != missing).coefficients
        others = np.r_[0 : missing // 4 * 4, missing // 4 * 4 + 4 : 12]
        group = A[:, missing // 4 * 4 : missing // 4 * 4 + 4]
        assert set(group.round(9).reshape(-1) + 0.0) <= {-1.0, 0.0, 1.0}
        assert np.abs(A[:, others]).max() <= 1


def test_bases_of_one_code_decode_alike():
    rng = np.random.default_rng(0)
    G = rng.standard_normal((3, 6))
    change = rng.standard_normal((3, 3))
    one, other = codes.linear(6, G, stragglers=1), codes.linear(6, change @ G * 1e9)
    for answered in map(np.array, itertools.product([False, True], repeat=6)):
        assert one.decodable(answered) == other.decodable(answered)


def worst_condition(code, d):
    G = code.B[:d, 0].T
    sets = itertools.combinations(range(d), code.m)
    return max(np.linalg.cond(G[:, columns]) for columns in map(list, sets))


@pytest.mark.parametrize(
    ("d", "m", "median"), [(4, 2, 18), (6, 3, 91), (8, 4, 532), (10, 5, 2.2e3)]
)
def test_conditions_of_gaussian_generators(d, m, median):
    """With the median as bound about every second draw passes, and the best draw is below the bound."""
    best = worst_condition(codes.gaussian_mds(d, d - m, m), d)
    first = [
        codes.gaussian_mds(d, d - m, m, seed=seed, max_condition=1e300)
        for seed in range(41)
    ]
    assert best < median / 2
    assert (
        median / 2
        < np.median([worst_condition(code, d) for code in first])
        < median * 2
    )
    for seed in range(5):
        code = codes.gaussian_mds(d, d - m, m, seed=seed, max_condition=median)
        assert worst_condition(code, d) <= median


def test_a_condition_that_no_draw_has():
    with pytest.raises(
        ValueError,
        match=r"gaussian_mds with stragglers = 2, slices = 2: the least condition number of "
        r"64 draws is [\d.]+, not 1.5; take a larger max_condition",
    ):
        codes.gaussian_mds(4, 2, 2, max_condition=1.5)


def test_equal_seeds_give_equal_gaussian_codes():
    assert codes.gaussian_mds(4, 2, 2, seed=3) == codes.gaussian_mds(4, 2, 2, seed=3)
    assert codes.gaussian_mds(4, 2, 2, seed=3) != codes.gaussian_mds(4, 2, 2, seed=4)


@pytest.mark.parametrize(("s", "m"), [(2, 2), (4, 4), (5, 4), (8, 8), (1, 15)])
def test_points_on_the_circle_amplify_less_than_points_on_a_line(s, m):
    code = codes.reed_solomon(s + m, s, m)
    G = code.B[:, 0].T
    gram = G @ G.T
    np.testing.assert_allclose(gram, gram[0, 0] * np.eye(m), atol=1e-12)
    for points in (
        np.linspace(-1, 1, s + m),
        np.cos((np.arange(s + m) + 0.5) * np.pi / (s + m)),  # Chebyshev
    ):
        generator = np.polynomial.chebyshev.chebvander(points, m - 1).T
        line = codes.linear(s + m, generator, stragglers=s)
        assert 1.3 * code.amplification < line.amplification


def test_identical_groups_are_tried_where_they_are_hardest():
    """A random sample of 3 among 256 children hardly ever hits one group three times."""
    B = codes.gaussian_mds(256, 2, 2).B
    with pytest.raises(ValueError, match="cannot be decoded from every 253 of its 256"):
        GradientCode(B, 3)
    small, large = codes.gaussian_mds(4, 2, 2), codes.gaussian_mds(256, 2, 2)
    assert large.amplification == pytest.approx(small.amplification)


def test_blocks_that_differ_are_each_tried():
    B = np.zeros((256, 256))
    for group in range(64):
        B[4 * group : 4 * group + 4, 4 * group : 4 * group + 4] = group + 1
    assert GradientCode(B, 3).amplification == pytest.approx(1)
    B[100, 100] = 0
    with pytest.raises(ValueError, match="cannot be decoded from every 253 of its 256"):
        GradientCode(B, 3)


def test_block_lengths_up_to_20_are_enumerated():
    assert max(math.comb(20, e) for e in range(21)) <= 200_000
    assert codes.minimum_distance(np.vander(np.arange(1, 13), 6).T / 1.0) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: codes.gaussian_mds(30, 15, 15),
        lambda: codes.reed_solomon(20, 8, 12),
        lambda: codes.minimum_distance(
            np.random.default_rng(0).standard_normal((20, 40))
        ),
    ],
)
def test_a_block_too_long_to_enumerate(make, monkeypatch):
    monkeypatch.setattr("jaxcoded.codes._distance.MAX_SUBSETS", 2000)
    with pytest.raises(
        ValueError,
        match=r"a linear code with block length d = \d+ has more than 2,000 sets of "
        r"\d+ columns to try; take shorter blocks or fewer stragglers",
    ):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: codes.linear(10, np.eye(4)),
            "which must divide n = 10; take n = 8 or 12 children, or random_generator",
        ),
        (lambda: codes.hamming(3, 3), "must divide n = 3; take n = 7 children"),
        (lambda: codes.gaussian_mds(7, 2, 2), "must divide n = 7; take n = 4 or 8"),
        (
            lambda: codes.linear(4, [[1, 1], [2, 2]]),
            "2 rows of the generator have rank 1",
        ),
        (
            lambda: codes.linear(3, np.zeros((1, 3))),
            "1 rows of the generator have rank 0",
        ),
        (
            lambda: codes.linear(4, np.ones((3, 2))),
            "3 rows of the generator have rank 1",
        ),
        (lambda: codes.linear(4, [[1.0, np.nan]]), "entries that are not finite"),
        (
            lambda: codes.linear(4, [1.0, 2.0]),
            r"real matrix \(m, d\), got float64 of shape",
        ),
        (lambda: codes.linear(4, [[1j, 2]]), r"real matrix \(m, d\), got complex128"),
        (lambda: codes.linear(4, np.ones((1, 0))), r"of shape \(1, 0\)"),
        (lambda: codes.linear(0, [[1]]), "n must be an integer >= 1, got 0"),
        (
            lambda: codes.linear(4, [[1, 0, 1, 0], [0, 1, 0, 1]], stragglers=2),
            "linear: in float64 some 2 of the 4 children of a group cannot be missing",
        ),
        (
            lambda: codes.linear(3, np.ones((1, 3)), stragglers=3),
            "stragglers must be an integer from 0 to 2, got 3",
        ),
        (
            lambda: codes.linear(16, np.vander(np.linspace(1, 2, 16), 8).T),
            "linear with n = 16, stragglers = 8, slices = 8 cannot be decoded in float64",
        ),
        (lambda: codes.hamming(7, 1), "r must be an integer from 2 to 6, got 1"),
        (
            lambda: codes.single_parity_check(4, 0),
            "slices must be an integer >= 1, got 0",
        ),
        (lambda: codes.gaussian_mds(4, -1, 2), "stragglers must be an integer >= 0"),
        (lambda: codes.reed_solomon(4, 2, 0), "slices must be an integer >= 1, got 0"),
    ],
)
def test_misuse_of_linear_codes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_fewer_stragglers_than_the_distance_allows():
    code = codes.linear(5, np.ones((1, 5)), stragglers=1)
    assert code.stragglers == 1 and code.decodable([4])
