"""Messages beyond 2³¹ bytes and 2³¹ elements, checked number by number;
`tests/test_large.py` runs it. The argument names the case. Print seconds and the peak
memory of a rank.
"""

import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

comm = MPI.COMM_WORLD
PERIOD = 1021  # a prime, so that misplaced numbers are wrong
MORE = 12_345
BLOCK = PERIOD << 10


def numbers(size, dtype, factor, shift):
    """Return ``factor · (i mod PERIOD) + shift`` for every index ``i``."""
    out = np.empty(size, dtype)
    period = (factor * np.arange(PERIOD) + shift).astype(dtype)
    whole = size // PERIOD
    out[: whole * PERIOD].reshape(whole, PERIOD)[:] = period
    out[whole * PERIOD :] = period[: size % PERIOD]
    return out


def check(actual, factor, shift):
    """Check every number."""
    block = numbers(BLOCK, actual.dtype, factor, shift)
    for start in range(0, len(actual), BLOCK):
        part = actual[start : start + BLOCK]
        np.testing.assert_array_equal(part, block[: len(part)])


def timed(call):
    comm.Barrier()
    start = time.perf_counter()
    out = jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    return out, seconds


def group(transport="engine"):
    # the weights are all 1
    return jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport=transport)


def numpy_in_place():
    """Sum more than 2³¹ elements of float16."""
    with group() as each:
        x = numbers(2**31 + MORE, np.float16, 1, comm.rank)
        out, seconds = timed(lambda: jaxcoded.host.allreduce(x, each, out=x))
        assert out is x
        check(x, comm.size, sum(range(comm.size)))
        comm.Barrier()
    return seconds


def jitted(wire_dtype=None):
    """Sum more than 2³¹ bytes of float32, donated."""
    call = lambda x: jaxcoded.coded_allreduce(x, each, wire_dtype=wire_dtype)
    modulus = 1 if wire_dtype is None else 0  # numbers that bfloat16 holds exactly
    with group() as each:
        size = 2**29 + MORE
        x = jnp.asarray(numbers(size, np.float32, modulus, 1 + comm.rank))
        total, seconds = timed(lambda: jax.jit(call, donate_argnums=0)(x))
        check(np.asarray(total), comm.size * modulus, sum(range(comm.size + 1)))
        comm.Barrier()
    return seconds


def jitted_in_bfloat16():
    """Sum as in `jitted`, in messages of half the size."""
    return jitted("bfloat16")


def offsets(transport="engine"):
    """Sum two leaves in a vector of more than 2³¹ elements."""
    with group(transport) as each:
        first = numbers(2**31 + MORE, np.uint8, 1, comm.rank)
        tree = {"a": jnp.asarray(first), "b": jnp.uint8([comm.rank + 1, 2, 3])}
        del first
        call = jax.jit(lambda t: jaxcoded.tree_bcast(t, each), donate_argnums=0)
        out, seconds = timed(lambda: call(tree))
        check(np.asarray(out["a"]), 1, 0)
        assert out["b"].tolist() == [1, 2, 3]
        comm.Barrier()
    return seconds


def mpi4jax_offsets():
    """Sum as in `offsets` with mpi4jax, in messages of at most 2³¹ − 1 elements."""
    return offsets("mpi4jax")


def gradient():
    """Compute a gradient of more than 2³¹ bytes on one rank."""
    with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded()) as each:
        size = 2**29 + MORE
        part = each.batch(1)
        places = jnp.array([0, size // 2, size - 1])
        losses = lambda w, batch: jnp.sum(w[places] ** 2)[None] * batch
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, each, mean=False))
        w = jnp.full(size, 2.0, jnp.float32)
        (loss, grad), seconds = timed(lambda: step(w, part.of(jnp.ones(1))))
        assert loss == 12
        expected = np.zeros(3, np.float32) + 4
        np.testing.assert_array_equal(grad[places], expected)
        assert jnp.count_nonzero(grad) == 3
    return seconds


def snapshot():
    """Let the other rank fetch a snapshot of more than 2³¹ bytes."""
    with group() as each:
        state = {"x": numbers(2**29 + MORE, np.float32, 1, 0), "step": 3}
        like = {"x": jax.ShapeDtypeStruct(state["x"].shape, np.float32), "step": 0}
        if comm.rank == each.plan.root:
            each.snapshot(state)
            del state
            comm.Barrier()
            seconds = 0.0
        else:
            del state
            comm.Barrier()
            start = time.perf_counter()
            back = each.resync(like)
            seconds = time.perf_counter() - start
            assert back["step"] == 3
            check(np.asarray(back["x"]), 1, 0)
        comm.Barrier()
    return comm.allreduce(seconds, op=MPI.MAX)


def leaves():
    """Sum 10,000 leaves in one jitted call."""
    with group() as each:
        tree = [numbers(10, np.float32, 7, i + comm.rank) for i in range(10_000)]
        total, seconds = timed(
            lambda: jax.jit(lambda t: jaxcoded.coded_allreduce(t, each))(tree)
        )
        mine = np.array(tree)
        np.testing.assert_array_equal(np.array(total), comm.allreduce(mine))
    return seconds


name = sys.argv[1]
seconds = comm.allreduce(globals()[name](), op=MPI.MAX)
peak = comm.allreduce(
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, op=MPI.MAX
)
if comm.rank == 0:
    print(f"{name}: {seconds:.1f} s, a rank's peak {peak:.1f} GiB")
