"""A rank closes its group before its last round is over. Ranks that call the round later get an error;
`tests/test_hosts.py` runs this on several hosts.
"""

import jax
import jax.numpy as jnp
from mpi4py import MPI

import jaxcoded

comm = MPI.COMM_WORLD
group = jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0))
x = jnp.ones(100_000, jnp.float32)  # longer than messages that carry their vectors
total = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group))
total(x).block_until_ready()
if comm.rank == comm.size - 1:
    jax.block_until_ready(
        jax.jit(lambda x: jaxcoded.coded_allreduce_start(x, group))(x)
    )
    group.close(timeout=1)
    comm.Barrier()
else:
    comm.Barrier()
    try:
        total(x).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert f"rank {comm.size - 1} closed the group" in str(error), error
    else:
        raise AssertionError("a sum without the rank that has left")
    jaxcoded.effects_barrier()
