"""Codes with several messages per child, in turn; the tree with them; atoms and probes."""

import functools
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import (
    bounded,
    error,
    gradients_for,
    own_messages,
    random_missing,
    solvable,
    tree_sum,
)

from jaxcoded import Coded, GradientCode, codes, make_plan
from jaxcoded.plan import atoms


@pytest.mark.parametrize(("n", "s"), [(3, 1), (4, 1), (5, 2), (6, 3), (4, 0)])
@pytest.mark.parametrize("alpha", [2, 5, Fraction(3, 2)])
def test_load_of_partial_stragglers(n, s, alpha):
    """facts.md §3: n1 = (s+1)/(α−1), load α(s+1)/(n(s+α)), α/(s+α) of full coding."""
    code = codes.partial_stragglers(n, s, slowdown=alpha)
    load = alpha * Fraction(s + 1) / (n * (s + alpha))
    assert set(code.shares) == {load}
    assert load / Fraction(s + 1, n) == Fraction(alpha) / (s + alpha)
    naive, coded = code.sizes[0], code.sizes[n]
    assert naive / coded == Fraction(s + 1) / (alpha - 1)


@pytest.mark.parametrize(("n", "s"), [(3, 1), (4, 1), (5, 2)])
def test_every_set_of_parts_of_partial_stragglers(n, s):
    """All naive messages and any n−s coded messages suffice; no naive message may be missing."""
    code = codes.partial_stragglers(n, s, slowdown=3)
    for bits in itertools.product([False, True], repeat=2 * n):
        answered = np.array(bits).reshape(n, 2)
        decodable = code.decodable(answered)
        assert decodable == solvable(code.B, answered.reshape(-1))
        if answered[:, 0].all() and answered[:, 1].sum() >= n - s:
            assert decodable
        if not answered[:, 0].all():
            assert not decodable


def first_parts(code):
    """Return every set of first parts, bool ``(n, parts)``."""
    for counts in itertools.product(range(code.parts + 1), repeat=code.n):
        yield np.arange(code.parts) < np.array(counts)[:, None]


def any_parts(code):
    """Return every set of parts, bool ``(n, parts)``."""
    for bits in itertools.product([False, True], repeat=len(code.B)):
        yield np.array(bits).reshape(code.n, code.parts)


def amplification(A, B):
    return (np.abs(A) @ np.abs(B).sum(axis=2)).max()


def promised(code, s):
    """Return the sets that suffice by the constructors' promise, bool ``(n, parts)``:
    at most ``s`` children are late.
    """
    n, parts = code.n, code.parts
    for late in range(s + 1):
        for those in itertools.combinations(range(n), late):
            answered = np.ones((n, parts), bool)
            if code.name == "partial_stragglers":
                answered[list(those), 1] = False
            else:
                if code.name == "adaptive":
                    d = s + code.m // parts
                    answered[:, code.m // (d - late) :] = False
                answered[list(those)] = False
            yield answered


# codes, each with s and a function that returns its sets of answers
SETS = {
    "adaptive 4, 2, seed 2": (codes.adaptive(4, 2, seed=2), 2, first_parts),
    "adaptive 4, 2, seed 1": (codes.adaptive(4, 2, seed=1), 2, first_parts),
    "adaptive 3, 2": (codes.adaptive(3, 2), 2, first_parts),
    "adaptive 3, 1, 2": (codes.adaptive(3, 1, 2), 1, any_parts),
    "adaptive 4, 1": (codes.adaptive(4, 1), 1, any_parts),
    "adaptive 4, 1, 2": (codes.adaptive(4, 1, 2), 1, any_parts),
    "partial 5, 2": (codes.partial_stragglers(5, 2, slowdown=3), 2, any_parts),
    "partial 4, 1": (codes.partial_stragglers(4, 1, slowdown=3), 1, any_parts),
    "partial 3, 1": (codes.partial_stragglers(3, 1, slowdown=3), 1, any_parts),
    "progressive 4, 2": (codes.progressive(4, 2), 2, any_parts),
}
each_set = pytest.mark.parametrize(
    ("code", "s", "sets"), list(SETS.values()), ids=list(SETS)
)


@pytest.mark.parametrize(
    ("n", "s", "kappa"), [(5, 2, 6.022), (5, 3, 6.221), (3, 1, 3.034), (4, 1, 1)]
)
def test_amplification_of_partial_stragglers(n, s, kappa):
    """With all second parts κ is far less than without ``s`` of them. Copies count once."""
    code = codes.partial_stragglers(n, s, slowdown=3)
    assert code.amplification == pytest.approx(kappa, abs=1e-3)
    found = 0.0
    for answered in promised(code, s):
        rows = np.flatnonzero(answered)
        _, first = np.unique(code.B[rows, :, 0], axis=0, return_index=True)
        used = code.B[rows[first]]
        # least norm, with each message in units of the power of 2 near its largest
        # entry
        units = np.exp2(np.floor(np.log2(np.abs(used).max(axis=(1, 2)))))
        A = np.ones(code.k) @ np.linalg.pinv(used[:, :, 0] / units[:, None]) / units
        assert error(A[None], used) < 1e-9
        found = max(found, amplification(A[None], used))
    assert code.amplification == pytest.approx(found)


@pytest.mark.slow
@each_set
def test_no_set_of_parts_amplifies_beyond_kappa(code, s, sets):
    """No set amplifies beyond κ. A set that suffices is exact, and suffices with more
    messages.
    """
    sufficient, all_sets = set(), set()
    for answered in sets(code):
        all_sets.add(answered.tobytes())
        A = code.decode(answered).coefficients
        assert amplification(A, code.B) <= 1.001 * code.amplification * (1 + 1e-9)
        assert not A[:, ~answered.ravel()].any()
        if code.sufficient(answered):
            sufficient.add(answered.tobytes())
            assert error(A, code.B) < 1e-9
            assert amplification(A, code.B) <= code.amplification * (1 + 1e-9)
    assert sufficient
    for each in sufficient:
        answered = np.frombuffer(each, bool)
        for row in np.flatnonzero(~answered):
            more = answered.copy()
            more[row] = True
            assert more.tobytes() in sufficient or more.tobytes() not in all_sets


@pytest.mark.slow
@each_set
def test_promised_sets_suffice(code, s, sets):
    found = {answered.tobytes() for answered in sets(code) if code.sufficient(answered)}
    for answered in promised(code, s):
        assert answered.tobytes() in found
        A = code.decode(answered).coefficients
        assert amplification(A, code.B) <= code.amplification * (1 + 1e-9)


@functools.cache
def larger(kind, n, s):
    """Return a larger code, and its promise."""
    if kind == "adaptive":
        code = codes.adaptive(n, s)
    else:
        code = codes.partial_stragglers(n, s, slowdown=3)
    return code, np.array(list(promised(code, s)))


@given(st.integers(0, 2**32))
@bounded
def test_messages_of_larger_codes_in_any_order(seed):
    """A sufficient set is exact within κ, suffices with later messages, and is complete
    no later than promised.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(["adaptive", "partial_stragglers"])
    code, promises = larger(kind, *map(int, rng.choice([[5, 2], [6, 1], [7, 2]])))
    answered = np.zeros((code.n, code.parts), bool)
    before = False
    for child in rng.permutation(np.repeat(np.arange(code.n), code.parts)):
        answered[child, answered[child].sum()] = True
        now = code.sufficient(answered)
        assert now >= before
        assert now >= (answered >= promises).all(axis=(1, 2)).any()
        if now:
            A = code.decode(answered).coefficients
            assert error(A, code.B) < 1e-6
            assert amplification(A, code.B) <= code.amplification * (1 + 1e-9)
        before = now
    assert before


EPS32 = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", ["adaptive 4, 2, seed 2", "partial 5, 2"])
def test_float32_sums_of_sets_of_parts_lose_at_most_kappa_times_the_rounding(name):
    """Relative to κ · Σ|g|, every message loses at most (k·m + 2) · eps, and the parent's sum loses as much for each of
    its terms. The reference is in float64.
    """
    code, _, sets = SETS[name]
    rng = np.random.default_rng(2)
    gradients = rng.standard_normal((code.k, code.m, 4))
    exact = gradients.sum(axis=0)
    largest = np.abs(gradients).sum(axis=0).max()
    messages = np.zeros((len(code.B), 4), np.float32)
    for j, u in np.ndindex(code.k, code.m):
        weights = code.B[:, j, u, None].astype(np.float32)
        messages += weights * gradients[j, u].astype(np.float32)
    terms = code.k * code.m + len(code.B) + 4
    bound = terms * EPS32 * code.amplification * largest
    for answered in sets(code):
        if code.sufficient(answered):
            A = code.decode(answered).coefficients.astype(np.float32)
            total = np.zeros((code.m, 4), np.float32)
            for row in np.flatnonzero(answered):
                total += A[:, row, None] * messages[row]
            assert np.abs(total - exact).max() <= bound


@pytest.mark.parametrize(("n", "s"), [(3, 1), (4, 2), (5, 1)])
def test_every_set_of_parts_of_progressive(n, s):
    """A set suffices if it holds each partition."""
    code = codes.progressive(n, s)
    for counts in itertools.product(range(s + 2), repeat=n):
        answered = np.arange(s + 1) < np.array(counts)[:, None]
        seen = {(i + p) % n for i, p in zip(*np.nonzero(answered))}
        assert code.decodable(answered) == (len(seen) == n)
        if len(seen) == n:
            assert set(np.unique(code.decode(answered).coefficients)) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("n", "s", "m"), [(3, 1, 1), (4, 1, 1), (5, 2, 1), (4, 1, 2), (6, 2, 2), (4, 0, 2)]
)
def test_traffic_of_adaptive_follows_the_stragglers(n, s, m):
    """With δ children missing, 1/(s+m−δ) of a gradient from each of the other children
    suffices; one part less from each does not.
    """
    code = codes.adaptive(n, s, m)
    assert (code.loads == s + m).all()
    assert Fraction(code.parts, code.m) == Fraction(1, m)
    for missing in range(s + 1):
        parts = Fraction(code.m, s + m - missing)
        assert parts.denominator == 1
        for lost in itertools.combinations(range(n), missing):
            answered = np.zeros((n, code.parts), bool)
            answered[:, : int(parts)] = True
            answered[list(lost)] = False
            assert code.decodable(answered)
            A = code.decode(answered).coefficients
            wrong = np.einsum("ui,ijv->ujv", A, code.B) - np.eye(code.m)[:, None, :]
            assert np.abs(wrong).max() < 1e-13 * code.m * code.amplification * 10
            answered[:, int(parts) - 1] = False
            assert not code.decodable(answered)


def test_misuse():
    with pytest.raises(ValueError, match=r"slowdown, .* > 1, got 1$"):
        codes.partial_stragglers(3, 1, slowdown=1)
    with pytest.raises(ValueError, match=r"shape \(n \* 2, k, m\)"):
        GradientCode(np.ones((3, 2)), 0, parts=2)
    with pytest.raises(ValueError, match=r"shape \(3,\) or \(3, 2\), got \(2,\)"):
        codes.progressive(3, 1).decodable([True, False])
    with pytest.raises(ValueError, match="sizes must be 2 numbers >= 0"):
        GradientCode(np.eye(2), 0, sizes=(1, -1))
    with pytest.raises(ValueError, match=r"parts <= 2, got \(1, 3, 0\)"):
        GradientCode(np.eye(4), 0, parts=2, promises=((1, 3, 0),))
    with pytest.raises(
        ValueError, match=r"or from every set of its promises, \[\(1, 2, 1\)\]"
    ):
        GradientCode(np.eye(4), 0, parts=2, promises=((1, 2, 1),))


PLANS = {
    "partial": make_plan(
        13, Coded(fanout=3, stragglers=0, code="partial_stragglers(late=1, slowdown=4)")
    ),
    "progressive": make_plan(13, Coded(fanout=3, code="progressive")),
    "adaptive": make_plan(13, Coded(fanout=3, code="adaptive")),
    "adaptive with slices": make_plan(21, Coded(fanout=4, code="adaptive", slices=2)),
    "one for each layer": make_plan(
        13, Coded(fanout=3, code=["progressive", "cyclic_repetition"])
    ),
    "one for each parent": make_plan(
        13,
        Coded(
            fanout=3,
            slices=2,
            code={0: "gaussian_mds", 1: "adaptive", 2: "single_parity_check"},
        ),
    ),
    "unequal": make_plan(
        13,
        Coded(
            parents=[-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 4, 2, 2],
            code={0: "progressive", 1: "adaptive", 4: "progressive", 2: "auto"},
            speeds=[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1],
        ),
    ),
    "slices": make_plan(13, Coded(fanout=3, slices=2)),
    "speeds": make_plan(13, Coded(fanout=3, speeds=range(1, 14))),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@each_plan
def test_tree(plan):
    """The root's sum is exact, with all ranks and with the tolerated number missing."""
    rng = np.random.default_rng(1)
    for batch in (1, 29):
        gradients = gradients_for(plan, batch)
        own = own_messages(plan, gradients)
        atol = 1e-14 * batch * plan.size * max(10.0, plan.amplification)
        assert atol < 1e-3
        for missing in [set(), *(random_missing(plan, rng) for _ in range(5))]:
            total = tree_sum(plan, own, missing)
            np.testing.assert_allclose(total, gradients.sum(0), rtol=0, atol=atol)


def test_tree_with_parts_that_did_not_come():
    plan = PLANS["partial"]
    gradients = gradients_for(plan, 40)
    own = own_messages(plan, gradients)
    for slow in ([1, 4, 7, 10], [3, 6, 9, 12]):  # one child of every parent
        total = tree_sum(plan, own, came=dict.fromkeys(slow, 1))
        np.testing.assert_allclose(total, gradients.sum(0), atol=1e-9)
    total = tree_sum(plan, own, came={1: 1, 2: 1})
    assert np.abs(total - gradients.sum(0)).max() > 1e-2


@each_plan
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_stages(plan, batch):
    """After p + 1 of P equal runs of chunks a rank has all of part p."""
    for rank in range(plan.size):
        indices, weights = plan.strategy.assignment(plan, rank, batch)
        if not plan.encoded:
            continue
        parts = plan.parts_above[rank]
        chunks = len(weights)
        assert chunks % parts == 0
        held = weights.reshape(chunks, -1, parts, plan.slices_above[rank])
        for part in range(parts):
            later = held[(part + 1) * chunks // parts :, :, part]
            assert not later.any()
        own, coefficients = plan.strategy.shares(plan, rank, batch)
        np.testing.assert_allclose(
            held.sum((0, 1)), coefficients.sum(0), atol=1e-9 * plan.amplification
        )
        assert set(own) <= set(indices)


@each_plan
def test_atoms(plan):
    """Atoms cover the batch once, and agree with `shares` for a batch that divides
    evenly.
    """
    sizes = atoms.sizes(plan)
    assert sizes.min() > 0 and sizes.sum() == pytest.approx(1)
    batch = 20_160
    ends = np.cumsum(sizes)
    for rank in range(plan.size):
        indices, coefficients = plan.strategy.shares(plan, rank, batch)
        dense = np.zeros((batch, *coefficients.shape[1:]))
        dense[indices] = coefficients
        atom = np.searchsorted(ends, (np.arange(batch) + 0.5) / batch)
        expected = atoms.coefficients(plan, rank)[np.minimum(atom, len(sizes) - 1)]
        # examples are not cut
        wrong = (np.abs(dense - expected) > 1e-12).any(axis=(1, 2)).mean()
        assert wrong <= 2 * plan.size * len(sizes) / batch


@each_plan
def test_probes(plan):
    """With all ranks the sum of probes is exact; without some it shows the coefficients
    of the least-squares sum.
    """
    own = [
        atoms.probe(plan, rank).reshape(plan.parts_above[rank], -1)
        for rank in range(plan.size)
    ]
    exact, weights = atoms.deviation(plan)
    assert weights.sum() == pytest.approx(plan.padding_multiple)
    np.testing.assert_allclose(tree_sum(plan, own), exact, atol=1e-9)
    lost = {plan.coded_children(plan.root)[0], plan.coded_children(plan.root)[1]}
    found = tree_sum(plan, own, lost)
    assert np.sqrt((weights * (found - exact) ** 2).sum()) > 1e-3


@pytest.mark.parametrize("batch", [23, 1000])
@pytest.mark.parametrize("speeds", [None, [1, 1, 4, 2, 1, 3]])
def test_residual_of_a_batch(batch, speeds):
    """Atoms count by their size, in a batch that can be cut anywhere. The difference
    comes from examples outside their atom.
    """
    plan = make_plan(6, Coded(stragglers=1, speeds=speeds, fanout=5))
    lost = set(plan.coded_children(plan.root)[1:4])
    sizes = atoms.sizes(plan)
    ideal = tree_sum(
        plan, [atoms.probe(plan, rank)[None] for rank in range(plan.size)], lost
    )
    exact, weights = atoms.deviation(plan)
    np.testing.assert_allclose(weights, sizes)
    residual = np.sqrt((weights * (ideal - exact) ** 2).sum())
    unweighted = np.sqrt(np.mean((ideal - exact) ** 2))
    assert (abs(residual - unweighted) > 1e-3) == (speeds is not None)

    atom = np.searchsorted(np.cumsum(sizes)[:-1], (np.arange(batch) + 0.5) / batch)
    own, moved = [], np.zeros(batch, bool)
    for rank in range(plan.size):
        indices, coefficients = plan.strategy.shares(plan, rank, batch)
        own.append(np.zeros((1, batch)))
        own[-1][0, indices] = coefficients[:, 0, 0]
        moved |= own[-1][0] != atoms.coefficients(plan, rank)[atom, 0, 0]
    wrong = (tree_sum(plan, own, lost) - 1) ** 2
    worst = max(wrong.max(), ((ideal - exact) ** 2).max())
    bound = (moved.mean() + len(sizes) / batch) * worst
    off = abs(residual**2 - wrong.mean())
    divides = speeds is None and batch == 1000
    assert off < 1e-12 if divides else 1e-4 < off <= bound


# A number of the sum depends on the same number of the gradients alone: it is 0 if they
# are.
KEEP_ZEROS = [
    "uncoded",
    "fractional_repetition",
    "cyclic_repetition",
    "random_generator",
    "polynomial",
    "linear(generator=[[1, 2]])",
    "gaussian_mds",
    "single_parity_check",
    "reed_solomon",
    "hamming(r=2)",
    "partial_stragglers(late=1, slowdown=3)",
    "progressive",
    "ignore_stragglers",
    "bernoulli(load=3)",
    "stochastic_block(load=3, blocks=2)",
    "expander(degree=3)",
    "block_design(load=3)",
    "grouped(load=3)",
]
# With slices a number also depends on other slices, which cancel up to rounding.
LOSE_ZEROS = {
    "adaptive": 1,
    "random_generator": 2,
    "polynomial": 2,
    "linear(generator=[[1, 0, 2], [0, 1, 3]])": 2,
    "gaussian_mds": 2,
    "single_parity_check": 3,
    "reed_solomon": 2,
    "hamming(r=3)": 4,
    "grouped(load=3)": 2,
}


def test_every_code_states_what_it_does_with_zeros():
    texts = [*KEEP_ZEROS, *LOSE_ZEROS]
    assert {text.partition("(")[0] for text in texts} == set(codes.NAMES)


@pytest.mark.parametrize(
    ("text", "slices", "keeps"),
    [
        *((text, 1, True) for text in KEEP_ZEROS),
        *((text, slices, False) for text, slices in LOSE_ZEROS.items()),
    ],
)
def test_zeros(text, slices, keeps):
    """Numbers that are 0 in all gradients, with any missing ranks."""
    n = 7 if text in ("block_design(load=3)", "hamming(r=3)") else 12
    alone = text == "uncoded" or text.startswith("partial")
    plan = make_plan(
        n + 1, Coded(fanout=n, stragglers=1 - alone, slices=slices, code=text)
    )
    gradients = np.tile(gradients_for(plan, 30), 50)
    rng = np.random.default_rng(0)
    zero = rng.random(gradients.shape[1]) < 0.5
    gradients[:, zero] = 0
    own = own_messages(plan, gradients)
    kept = []
    for missing in [set(), *(random_missing(plan, rng) for _ in range(5))]:
        total = tree_sum(plan, own, missing)
        assert total[~zero].all()
        np.testing.assert_allclose(total[zero], 0, atol=1e-9)
        kept.append(not total[zero].any())
    assert all(kept) == keeps


speeds = st.lists(st.integers(1, 9), min_size=5, max_size=14)


@bounded
@given(speeds=speeds, stragglers=st.integers(0, 2), slices=st.integers(1, 2))
def test_loads_follow_speeds(speeds, stragglers, slices):
    """Loads are in proportion unless a child would hold more than its parent's whole
    set, and never above proportion.
    """
    plan = make_plan(
        len(speeds), Coded(speeds=speeds, stragglers=stragglers, slices=slices)
    )
    batch = 50_000
    own = plan.strategy.loads(plan, batch)
    fastest = max(speeds[1:])
    per_speed = [load / (speed / fastest) for load, speed in zip(own[1:], speeds[1:])]
    most = batch / float(plan.capacities[plan.root])
    assert abs(own.max() - float(plan.load) * batch) <= 20
    assert max(per_speed) <= most * 1.01 + 20
    bites = any(
        plan.capacities[child] > coding.capacity
        for rank, coding in enumerate(plan.codings)
        if coding
        for child in plan.tree.children[rank]
    )
    fits = all(
        coding is None or coding.code.name in ("random_generator", "uncoded")
        for coding in plan.codings
    )
    if fits and not bites:
        assert min(per_speed) >= most * 0.99 - 20
    assert ("times the whole set of its parent" in plan.describe()) == (
        bites and len(set(speeds[1:])) > 1
    )


def test_speeds_are_ratios():
    plan = make_plan(7, Coded(speeds=[2.0, 4, 4, 4, 4, 4, 4]))
    assert plan == make_plan(7, Coded(speeds=[1, 2, 2, 2, 2, 2, 2]))
    assert plan.from_json(plan.to_json()) == plan
    assert make_plan(7, Coded(speeds=[3] * 7)) == make_plan(7, Coded())
    # a root without data does not count
    assert make_plan(7, Coded(speeds=[9, *[3] * 6])) == make_plan(7, Coded())
    assert make_plan(4, Coded(speeds=[1, 10, 1, 1])).load == 1
    for wrong, message in [
        ([1, 2], "speeds has 2 entries for 3 ranks"),
        ([1, 0, 1], "positive and finite, got 0 for rank 1"),
        ([1, 1e9, 1], "at least 1/1000 of the fastest"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(3, Coded(speeds=wrong))


def test_codes_by_name():
    plan = make_plan(13, Coded(fanout=3, code="bernoulli(load=2)"))
    assert plan.approximate and "bernoulli" in plan.describe()
    assert plan.from_json(plan.to_json()) == plan
    mixed = PLANS["one for each parent"]
    assert mixed.from_json(mixed.to_json()) == mixed
    assert [coding.code.name for coding in mixed.codings if coding] == [
        *("gaussian_mds", "adaptive", "single_parity_check", "random_generator")
    ]
    for wrong, message in [
        ("bernoulli(3)", r"arguments need their names, as in bernoulli\(name=value\)"),
        ("nobody(3)", "code must be 'auto' or one of"),
        ("bernoulli(weight=2)", "has no argument 'weight'; it has n, stragglers, load"),
        ("hamming(r=3)", "rank .* with its 3 children"),
        ("os.system('true')", "code must be"),
        ("bernoulli(load=__import__('os'))", "load is not a Python literal"),
        ("bernoulli", "code='bernoulli': bernoulli needs 'load', as in 'b"),
        ("bernoulli(load=2, load=3)", "gives load twice"),
        ("cyclic_repetition(n=3)", "n is the same for all codes of a plan"),
        ("linear(generator={[]: 2})", "generator is not a Python literal"),
        ("-" * 30_000, "code must be"),
        ({99: "auto"}, "code names rank 99, but there are 13 ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(13, Coded(fanout=3, code=wrong))
