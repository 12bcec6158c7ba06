"""The uncoded all-reduces: every rank's contribution counts once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from reference import assert_same_bits

from jaxcoded import baselines

pytestmark = pytest.mark.ranks(2, 4, exhaustive=(7,))

COMM = MPI.COMM_WORLD
REDUCES = {
    "mpi4jax": baselines.allreduce,
    "ring": baselines.ring_allreduce,
    "master": baselines.master_worker_allreduce,
    "tree": functools.partial(baselines.tree_allreduce, fanout=2),
}
each = pytest.mark.parametrize("reduce", REDUCES.values(), ids=REDUCES)
# 13 ranks show no more than 7 ranks do, and take long
few = pytest.mark.skipif(COMM.size > 7, reason="seen with fewer ranks")


def values(*shape, seed=0):
    """Return every rank's contribution: ``(ranks, *shape)``, the same array on all
    ranks.
    """
    return np.random.default_rng(seed).standard_normal((COMM.size, *shape))


@each
def test_mixed_pytree(reduce):
    every = {
        "wide": values(3, 2),
        "single": values(5, seed=1).astype(np.float32),
        "brain": values(7, seed=2).astype(jnp.bfloat16),
        "half": values(seed=3).astype(np.float16),
        "short": values(1, seed=4).astype(np.float16),  # fewer than ranks
        "empty": values(0),
    }
    total = jax.jit(lambda tree: reduce(tree, COMM))(
        jax.tree.map(lambda leaf: leaf[COMM.rank], every)
    )
    for name, leaf in every.items():
        exact = leaf.astype(np.float64).sum(0)
        size = np.abs(leaf.astype(np.float64)).sum(0)
        assert (total[name].shape, total[name].dtype) == (exact.shape, leaf.dtype)
        error = np.abs(np.asarray(total[name], np.float64) - exact)
        assert np.all(error <= COMM.size * float(jnp.finfo(leaf.dtype).eps) * size)
    assert_same_bits(COMM, total)


@each
@few
def test_vmap(reduce):
    every = values(4, 3)
    total = jax.vmap(lambda x: reduce(x, COMM), in_axes=1)(every[COMM.rank])
    np.testing.assert_allclose(total, every.sum(0).T, rtol=1e-12)


@each
@few
def test_gradient(reduce):
    """``∇ Σ_i (Σ_r x_r)_i²`` is ``2 Σ_r x_r``: the cotangent passes unchanged."""
    every = values(3)
    loss = lambda x: jnp.sum(reduce(x, COMM) ** 2)
    np.testing.assert_allclose(
        jax.grad(loss)(every[COMM.rank]), 2 * every.sum(0), rtol=1e-12
    )


def test_equal_communicators_are_one_to_jit():
    """jit treats them as one, as mpi4py may make a new Python object for the same communicator."""
    again, other = MPI.Intracomm(COMM), COMM.Dup()
    assert again is not COMM
    ring = lambda c: baselines._index(baselines._Ring, baselines._Communicator(c))
    assert ring(COMM) == ring(again) != ring(other)
    other.Free()


@each
@pytest.mark.parametrize("comm", [None, MPI.COMM_NULL], ids=["None", "COMM_NULL"])
def test_no_communicator(reduce, comm):
    with pytest.raises(TypeError, match="comm must be an mpi4py intra-communicator"):
        reduce(1.0, comm)


def test_misuse():
    with pytest.raises(ValueError, match="fanout must be an integer >= 1, got 0"):
        baselines.tree_allreduce(1.0, COMM, fanout=0)
    with pytest.raises(TypeError, match=r"leaf at \['a'\] has dtype int64"):
        baselines.allreduce({"a": 1}, COMM)
