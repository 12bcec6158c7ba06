"""Ranks with different data have another likeness, unless the data differ only in rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded
from mpi4py import MPI

import jaxcoded
from jaxcoded.group.likeness import of_data

# Shared work finds keys that differ by this much in a sum of float32.
FOUND = 7e-4


def unlike(one, other):
    return abs(float(one) - float(other)) > FOUND


@bounded
@given(st.integers(1, 50), st.integers(1, 400), st.integers(-8, 8), st.integers(0, 99))
def test_rounding_and_other_data(examples, features, digits, seed):
    rng = np.random.default_rng(seed)
    x = 10.0**digits * rng.normal(size=(examples, features))
    likeness = of_data(x)[1]
    assert likeness.dtype == np.float32 and abs(likeness) <= 16
    rounded = x * (1 + 1e-6 * rng.uniform(-1, 1, x.shape))
    assert not unlike(of_data(rounded)[1], likeness)
    others = [of_data(each * x)[1] for each in (-1, 2, rng.normal(size=x.shape))]
    assert any(unlike(other, likeness) for other in others)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("seed", range(5))
def test_the_last_bit(dtype, seed):
    """Ranks round differently, and each number may differ in its last bit."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x = rng.normal(size=(20, 300))
    eps = float(jnp.finfo(dtype).eps)
    rounded = x * (1 + eps * rng.choice([-1, 0, 1], x.shape))
    here, there = of_data(x.astype(dtype))[1], of_data(rounded.astype(dtype))[1]
    assert not unlike(here, there)
    assert unlike(here, of_data((x + 1).astype(dtype))[1])


@pytest.mark.parametrize("seed", range(5))
def test_constant_columns_without_their_mean(seed):
    """Only rounding is left of these columns, and ranks round differently."""
    x, other = (
        np.where(
            np.arange(64) % 8, rng.normal(size=64), rng.normal(scale=3e-7, size=64)
        )
        for rng in map(np.random.default_rng, ([seed, 0], [seed, 1]))
    )
    other = np.where(np.arange(64) % 8, x, other)
    assert not unlike(of_data(x[None])[1], of_data(other[None])[1])


def bordered(rng, shape):
    out = np.zeros(shape, np.float32)
    out[:, 4:-4, 4:-4] = rng.random((shape[0], shape[1] - 8, shape[2] - 8))
    return out


DATA = {
    "images with a border": lambda rng: bordered(rng, (12, 256, 256)),
    "bytes": lambda rng: np.eye(256)[rng.integers(256, size=(12, 128))],
    "fill values": lambda rng: np.where(rng.random((12, 36)) < 0.3, 1e20, rng.normal(size=(12, 36))),
    "more fill values": lambda rng: np.where(np.arange(36) % 3, rng.normal(size=(12, 36)), -9999),
    "small numbers": lambda rng: 1e-9 * rng.normal(size=(12, 7)),
    "with NaN": lambda rng: np.where(np.arange(7) % 2, np.nan, rng.normal(size=(12, 7))),
    "one number": lambda rng: rng.normal(size=12),
    "denormal numbers": lambda rng: np.where(np.arange(7) % 2, 1e-310, rng.normal(size=(12, 7))),
}  # fmt: skip


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_each_rank_has_other_data(data):
    its = [of_data(data(np.random.default_rng(seed)))[1] for seed in range(6)]
    assert np.isfinite(its).all()
    different = [unlike(one, other) for one in its for other in its if one is not other]
    assert np.mean(different) > 0.9


def test_integers():
    """Their values count, and not their dtype."""
    x = np.random.default_rng(0).integers(100, size=(9, 200))
    number, likeness = of_data({"x": x})
    for same in (x.astype(np.int32), x.astype(">i4"), jnp.asarray(x), x.astype("u1")):
        assert of_data({"x": same}) == (number, likeness)
    x[0] += 1
    # numbers that differ may have the same key, in every step with one batch
    other, unequal = of_data({"x": x})
    assert other != number and unlike(unequal, likeness)
    assert of_data(x % 2 == 0)[0] != of_data(x % 3 == 0)[0]


def test_keys():
    keys = jax.random.split(jax.random.key(0), 7)
    assert of_data(keys) == of_data(jax.random.key_data(keys)) != of_data(keys[::-1])


@pytest.mark.parametrize("x", [1.7e308, 1e-310])
def test_numbers_at_the_ends_of_the_range(x):
    data = np.where(np.arange(40) % 3, x, -1e300).reshape(4, 10)
    with np.errstate(all="raise"):
        assert np.isfinite(of_data(data)[1])


def test_data_whose_features_are_on_several_devices():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = np.random.default_rng(0).normal(size=(6, 2000)).astype(np.float32)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(None, "d")))
        assert of_data(there) == of_data(x)


def test_numpy_and_jax():
    x = np.random.default_rng(0).normal(size=(7, 30)).astype(np.float32)
    assert of_data(x) == of_data(jnp.asarray(x)) == of_data(np.asfortranarray(x))
    assert of_data(x) == of_data(x.astype(">f4"))


@pytest.mark.parametrize(
    "data",
    [12, np.ones((3, 0)), np.full(3, "text"), np.full(3, None), []],
    ids=["number", "empty", "text", "objects", "nothing"],
)  # fmt: skip
def test_data_without_a_likeness(data):
    assert of_data(data) == (0, 0)


@pytest.mark.parametrize("traced", [False, True])
def test_a_batch_made_in_jit(traced):
    x = jnp.arange(12.0)
    with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        step = jaxcoded.coded_value_and_grad(lambda w, x: (w - x) ** 2, group)

        @jax.jit
        def inside(w, y):
            return step(w, group.batch(y if traced else x))

        np.testing.assert_allclose(inside(0.0, x), (506 / 12, -11), rtol=1e-6)


def test_nan_with_debug_nans():
    x = jnp.array([np.nan, 1.0, 2.0])
    with jax.debug_nans(True):
        assert of_data(x) == of_data(np.asarray(x))


STRATEGIES = pytest.mark.parametrize(
    "strategy", [jaxcoded.Uncoded(), jaxcoded.Shared()], ids=str
)


@STRATEGIES
def test_weights_of_a_batch_under_strict_promotion(strategy):
    def summed(batch):
        own = batch.weights @ jnp.sum(batch.data, 1).astype(batch.weights.dtype)
        return jaxcoded.coded_allreduce(own, group, batch.weights)

    with jaxcoded.CodedGroup(MPI.COMM_SELF, strategy) as group:
        batch = jax.device_put(group.batch(np.ones((4, 2), np.float32)))
        with jax.numpy_dtype_promotion("strict"):
            assert summed(batch) == jax.jit(summed)(batch) == 8


@STRATEGIES
def test_a_batch_whose_numbers_are_all_cast(strategy):
    def cast(leaf):
        floats = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, jnp.float64) if floats else leaf

    with jax.enable_x64(True), jaxcoded.CodedGroup(MPI.COMM_SELF, strategy) as group:
        step = jaxcoded.coded_value_and_grad(lambda w, x: w * x.sum(1), group)
        batch = jax.tree.map(cast, group.batch(np.ones((4, 2), np.float32)))
        assert step(jnp.float64(3), batch) == (6, 2)
