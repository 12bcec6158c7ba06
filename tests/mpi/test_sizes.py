"""Messages of many numbers and trees of many leaves. The tests lower MPI's limit of 2³¹
− 1 elements; `tests/test_large.py` uses the real one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import more
from marks import mpi4jax_only, not_alone
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from uncounted import coded_allreduce

import jaxcoded
from jaxcoded import baselines, tree_bcast
from jaxcoded.transport import messages

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]


@pytest.fixture
def messages_of_7(monkeypatch):
    monkeypatch.setattr(messages, "MAX_ELEMENTS", 7)


@mpi4jax_only
@pytest.mark.parametrize("size", [more(7), 8, 14, more(30)])
def test_more_elements_than_mpi_counts(comm, transport, messages_of_7, size):
    gradients = {
        "wide": per_example(size),
        "half": per_example(size, 2, dtype="float16"),
    }
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        own = contribution(group, gradients)
        total = jax.jit(lambda x: coded_allreduce(x, group))(own)
        assert_sum(group, total, gradients)
        assert_same_bits(comm, total)
        rows = jax.vmap(lambda x: coded_allreduce(x, group))(own["half"].T)
        assert_sum(group, rows.T, gradients["half"])
        received = tree_bcast(jnp.arange(size, dtype=np.int8) + comm.rank, group)
        np.testing.assert_array_equal(received, np.arange(size) + group.plan.root)
    # every rank's contribution counts once
    mine = np.arange(2 * size, dtype=np.float64).reshape(2, size) + comm.rank
    expected = sum(mine - comm.rank + rank for rank in range(comm.size))
    for each in (
        *(baselines.allreduce, baselines.ring_allreduce),
        *(baselines.master_worker_allreduce, baselines.tree_allreduce),
    ):
        np.testing.assert_array_equal(each(mine, comm), expected)


@not_alone
@pytest.mark.parametrize(
    ("wire_dtype", "count", "jitted"),
    [(None, 2000, False), ("bfloat16", 1000, False), (None, 1000, True)],
)
def test_many_leaves(group, wire_dtype, count, jitted):
    """There are more leaves than descriptions or headers could list."""
    gradients = per_example(count, 2, dtype="float32")
    own = contribution(group, gradients)
    leaves = {f"{i}": own[i] for i in range(count)}

    def call(leaves):
        return coded_allreduce(leaves, group, wire_dtype=wire_dtype)

    total = (jax.jit(call) if jitted else call)(leaves)
    tolerance = 1e-5 if wire_dtype is None else 0.02
    np.testing.assert_allclose(
        np.stack([total[f"{i}"] for i in range(count)]),
        gradients.astype(np.float64).sum(0),
        atol=tolerance * group.plan.amplification * BATCH,
    )
