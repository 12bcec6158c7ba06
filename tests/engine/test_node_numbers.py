"""Compare the sums of parents with NumPy, number by number."""

import contextlib
import ctypes
import platform
import random

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import DONE, Call, World

from jaxcoded import Coded, make_plan

HALF = ["float16", "bfloat16"]
EVERY = [*HALF, "float32", "float64"]


@pytest.fixture(autouse=True)
def _quiet():
    """Silence NumPy, which warns about NaN and infinities of bfloat16, a type of
    another package.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        yield


class Given(Call):
    """A call with these vectors, in one list for each rank."""

    def __init__(self, vectors):
        first = vectors[0]
        super().__init__(tuple((str(v.dtype), len(v)) for v in first), 0)
        object.__setattr__(self, "vectors", vectors)

    def __hash__(self):
        return 7

    def own(self, plan, rank):
        return [vector.copy() for vector in self.vectors[rank]]

    def check(self, plan, rank, vectors):
        pass

    def check_message(self, *_):
        return True


def added(*vectors, skipped=False, piece_bytes=1 << 18, plan=None):
    """Return the root's sum in a tree without stragglers; the first vector is the
    root's.
    """
    plan = plan or make_plan(
        len(vectors), Coded(stragglers=0, fanout=max(len(vectors) - 1, 1))
    )
    world = World(
        plan,
        [Given([[vector] for vector in vectors])],
        random.Random(0),
        limits={"piece_bytes": piece_bytes},
        inline=(0,),
    )
    if skipped:
        world.skips.add((plan.root, 1))
    world.settle()
    world.assert_done()
    return np.frombuffer(world.results[1], vectors[0].dtype)


def assert_same(actual, expected):
    """Check that two vectors have the same bits, except for NaN."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    bits = [np.where(np.isnan(x), 0, x.view(unsigned)) for x in (actual, expected)]
    np.testing.assert_array_equal(*bits)


def all_bits(dtype):
    return np.arange(65536, dtype=np.uint16).view(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_every_half_number(dtype):
    """A sum with zero keeps subnormal numbers, infinities and NaN."""
    x = all_bits(dtype)
    zero = np.zeros_like(x)
    expected = np.where(x == 0, zero, x)  # −0 + 0 = 0
    assert_same(added(zero, x), expected)
    assert_same(added(x, zero), expected)
    # without any other vector −0 stays
    assert_same(added(zero, x, skipped=True), x)


@contextlib.contextmanager
def flushing():
    """Let this thread flush subnormal numbers to 0, as XLA's threads do."""
    words = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
    if platform.machine() not in words:
        pytest.skip("no name for the bits of this processor")
    word, bits = words[platform.machine()]
    libm = ctypes.CDLL("libm.so.6")
    before, state = (ctypes.c_uint32 * 16)(), (ctypes.c_uint32 * 16)()
    libm.fegetenv(before)
    libm.fegetenv(state)
    state[word] |= bits
    tiny = np.full(1, 1e-40, np.float32)
    libm.fesetenv(state)
    try:
        assert not (tiny * np.float32(1)).any()
        yield
    finally:
        libm.fesetenv(before)


@pytest.mark.parametrize("dtype", EVERY)
def test_the_same_bits_on_every_thread(dtype):
    """Sums of the smallest numbers are equal, even on a thread that flushes them to
    zero.
    """
    if dtype in HALF:
        x = all_bits(dtype)
        x = x[np.isfinite(x)]
    else:
        smallest = {"float32": 2.0**-149, "float64": 2.0**-1074}[dtype]
        x = (np.arange(1, 40_000, 7) * smallest).astype(dtype)
    y = np.roll(x, 1)
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (x.astype(wide) + y.astype(wide)).astype(x.dtype)
    assert_same(added(x, y), expected)
    with flushing():
        flushed = added(x, y)
    assert_same(flushed, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_rounded(dtype):
    """Products are rounded before they are added, on every processor: a fused
    multiply-add gives other bits.
    """
    plan = make_plan(5, Coded(fanout=4, code="random_generator"))
    rng = np.random.default_rng(0)
    # after the numbers a unit vector of each rank shows its coefficient
    vectors = [
        np.append(rng.standard_normal(1000), unit).astype(dtype) for unit in np.eye(5)
    ]
    actual = added(*vectors, plan=plan)
    weights = actual[1000:]
    assert weights[0] == 1 and (weights != 0).sum() == 4
    total = vectors[0].copy()
    for child in plan.coded_children(0):
        if weights[child]:
            total += weights[child] * vectors[child]
    np.testing.assert_array_equal(actual, total)


@pytest.mark.parametrize("dtype", EVERY)
def test_sums_are_rounded_to_even(dtype):
    """Sums of any two numbers are rounded once, for the narrow types from float32."""
    wide = np.float64 if dtype == "float64" else np.float32
    rng = np.random.default_rng(0)
    if dtype in HALF:
        x, y = (rng.permutation(np.tile(all_bits(dtype), 4)) for _ in range(2))
    else:
        size = 8 if dtype == "float64" else 4
        x, y = (
            np.frombuffer(rng.bytes(size * 100_000), jnp.dtype(dtype)) for _ in "xy"
        )
    # half of them have similar sizes, so that their last digits overlap
    near = y.copy()
    factors = rng.uniform(-2, 2, len(x[::2]))
    near[::2] = (x[::2].astype(wide) * factors).astype(x.dtype)
    expected = (x.astype(wide) + near.astype(wide)).astype(x.dtype)
    assert_same(added(x, near), expected)


def test_halves_between_two_numbers():
    """Ties go to the even neighbour, above and below the smallest normal number."""
    for dtype in HALF:
        x = all_bits(dtype)
        x = x[np.isfinite(x) & (x > 0)]
        below, above = x[:-1].astype(np.float32), x[1:].astype(np.float32)
        middle = ((below.astype(np.float64) + above) / 2).astype(np.float32)
        # two numbers of this type whose exact sum is in the middle
        rest = (middle - below).astype(x.dtype)
        exact = rest.astype(np.float32) + below == middle
        assert exact.sum() > 10_000
        expected = middle.astype(x.dtype)[exact]
        assert_same(added(x[:-1][exact], rest[exact]), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_too_large_for_a_half_is_infinite(dtype):
    most = jnp.finfo(dtype).max
    x = np.array([most, most, -most, most], jnp.dtype(dtype))
    y = np.array([most, -most, -most, 1], jnp.dtype(dtype))
    expected = np.array([np.inf, 0, -np.inf, most], jnp.dtype(dtype))
    assert_same(added(x, y), expected)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("children", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 1500])
def test_coefficients(dtype, children, count):
    """Sums with a code's coefficients, in blocks and pieces of any length."""
    plan = make_plan(
        children + 1, Coded(fanout=children, stragglers=min(1, children - 1))
    )
    rng = np.random.default_rng(count)
    vectors = [
        rng.standard_normal(count).astype(jnp.dtype(dtype)) for _ in range(children + 1)
    ]
    wide = [vector.astype(np.float64) for vector in vectors]
    weights = plan.coefficients(0)
    eps = float(jnp.finfo(dtype).eps)
    for piece_bytes in (1 << 18, 264):
        actual = added(*vectors, plan=plan, piece_bytes=piece_bytes).astype(np.float64)
        # the root took no more children than it needs
        candidates = []
        for left_out in (None, *range(1, children + 1)):
            erased = np.zeros(children + 1, bool)
            if left_out is not None:
                erased[left_out] = True
            if plan.unrecoverable(erased):
                continue
            weights = plan.coefficients(0, erased)[0]
            terms = [wide[0], *(a * v for a, v in zip(weights, wide[1:]))]
            size = np.abs(terms).sum(0)
            bound = eps / 2 * size + 8 * min(eps, 2**-23) * size
            candidates.append(np.all(np.abs(actual - sum(terms)) <= bound))
        assert any(candidates)


def test_one_rank_gets_its_own_vector():
    plan = make_plan(1, Coded())
    for dtype in EVERY:
        x = np.arange(100).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(added(x, plan=plan), x)
    world = World(plan, [Call((("uint8", 9),), 1, "broadcast")], random.Random(0))
    world.settle()
    assert world.ends[0][1].outcome == DONE
