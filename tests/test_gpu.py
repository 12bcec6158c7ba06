"""Kernels and collectives on a GPU. Skipped where there is none."""

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from launch import mpirun

from jaxcoded import codes, kernels


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


pytestmark = pytest.mark.skipif(not gpus(), reason="no GPU that JAX can use")


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


@pytest.mark.mpi
@pytest.mark.skipif(
    not mpi4jax.has_cuda_support(), reason="mpi4jax is built without CUDA"
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_on_a_gpu_shared_by_several_ranks(ranks):
    job = mpirun(
        ranks,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
        "tests/mpi/test_collectives.py",
        JAX_PLATFORMS="cuda,cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        MPI4JAX_USE_CUDA_MPI="0",
    )
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
