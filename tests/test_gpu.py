"""Kernels and collectives on a GPU. Without a GPU these tests are skipped.

tests/mpi/test_staging.py tests the engine's use of a GPU's memory without a GPU.
"""

import ctypes

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from launch import mpirun
from mpi4py import MPI

import jaxcoded
from jaxcoded import codes, kernels
from jaxcoded.transport import engine


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


pytestmark = pytest.mark.skipif(not gpus(), reason="no GPU that JAX can use")
needs_engine = pytest.mark.skipif(
    bool(engine.missing()), reason=engine.missing() or "-"
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(("n", "s", "m"), [(3, 1, 1), (4, 1, 2), (5, 2, 3)])
def test_kernels_on_a_gpu(n, s, m, dtype):
    code = codes.random_generator(n, s, m)
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((code.k, 1000))
    gradients = jax.device_put(jnp.asarray(exact, dtype), gpus()[0])
    messages = jax.vmap(lambda row: kernels.encode(gradients, row))(
        jnp.asarray(code.B, jnp.float32)
    )
    A = code.decode(range(n - s)).coefficients
    total = kernels.decode(messages, A)
    assert total.devices() == {gpus()[0]}
    reference = np.asarray(gradients, np.float64).sum(axis=0)
    bound = 4 * code.amplification * code.k * float(jnp.finfo(dtype).eps)
    scale = np.abs(exact).max()
    np.testing.assert_allclose(
        np.asarray(total, np.float64), reference, rtol=0, atol=bound * scale
    )


# One rank in this process: data that is copied to the host and back does not change.


@needs_engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 1000, 2**19, 3 * 2**19 + 77])
@pytest.mark.parametrize("form", ["effect", "token", "donated"])
def test_there_and_back(dtype, size, form):
    with jax.enable_x64(True), jax.default_device(gpus()[0]):
        values = np.random.default_rng(1).standard_normal(size)
        x = jnp.asarray(values, dtype)
        expected = np.asarray(x)
        with jaxcoded.CodedGroup(
            MPI.COMM_SELF, jaxcoded.Coded(), transport="engine"
        ) as group:

            def step(x, token):
                if form == "effect":
                    return jaxcoded.coded_allreduce(x, group), token
                return jaxcoded.coded_allreduce(x, group, token=token)

            jitted = jax.jit(step, donate_argnums=0 if form == "donated" else ())
            token = jnp.int32(0)
            for _ in range(3):
                x, *_, token = jitted(x, token)
                assert x.devices() == {gpus()[0]}
            np.testing.assert_array_equal(np.asarray(x), expected)


@needs_engine
@pytest.mark.parametrize("tokened", [False, True])
def test_slices_of_arrays(tokened):
    """XLA fuses aligned slices with the call that takes them, unless a barrier prevents it."""
    with (
        jax.default_device(gpus()[0]),
        jaxcoded.CodedGroup(
            MPI.COMM_SELF, jaxcoded.Coded(), transport="engine"
        ) as group,
    ):

        def step(x, token):
            for part in jnp.split(x, 4):
                if tokened:
                    total, *_, token = jaxcoded.coded_allreduce(
                        part, group, token=token
                    )
                else:
                    total = jaxcoded.coded_allreduce(part, group)
                x = jnp.concatenate([total, x[: -len(total)]])
            return x, token

        x = np.arange(4 * 4096, dtype=np.float32)
        out, _ = jax.jit(step)(x, jnp.int32(0))
        np.testing.assert_array_equal(
            out, np.concatenate(np.split(x, 4)[::-1]), strict=True
        )


@needs_engine
def test_lag_and_erasures():
    with jaxcoded.CodedGroup(
        MPI.COMM_SELF, jaxcoded.Coded(), transport="engine"
    ) as group:
        assert int(jax.jit(lambda: group.lag())()) == 0
        mask = jnp.zeros(1, bool)
        reduce = jax.jit(
            lambda x, gone: jaxcoded.coded_allreduce(x, group, erasures=gone)
        )
        np.testing.assert_array_equal(reduce(jnp.ones(5), mask), np.ones(5))


@needs_engine
def test_copies_of_a_call():
    """Copies without a round reuse pinned memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    own = jnp.arange(5 << 20, dtype=jnp.float32).block_until_ready()
    out = jnp.zeros_like(own).block_until_ready()
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    pinned = set()
    for _ in range(4):
        engine._engine.device_copies(
            stream.value,
            own.unsafe_buffer_pointer(),
            out.unsafe_buffer_pointer(),
            own.nbytes,
        )
        pinned.add(sum(engine._engine.pinned_bytes()))
    assert len(pinned) <= 2


# Several ranks on one GPU.


def run_on_gpu(ranks, *places, limit=600):
    words = ("-k", "engine") if not mpi4jax.has_cuda_support() else ()
    job = mpirun(
        ranks,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *words),
        *places,
        limit=limit,
        JAX_PLATFORMS="cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        MPI4JAX_USE_CUDA_MPI="0",
    )
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]


@pytest.mark.mpi
@pytest.mark.timeout(700)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "place",
    [
        "test_collectives.py",
        "test_blocks.py",
        "test_engine.py",
        "test_erasures.py",
        "test_gradients.py",
        "test_schemes.py",
        "test_shared.py",
        "test_tokens.py",
        "test_value_and_grad.py",
    ],
)
def test_collectives_on_a_gpu_shared_by_several_ranks(ranks, place):
    run_on_gpu(ranks, f"tests/mpi/{place}")
