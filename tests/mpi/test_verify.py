"""Groups that verify their sums: a rank whose memory is at fault is named, and left out."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from marks import SIZE
from mpi4py import MPI
from reference import assert_same_bits, assert_sum, contribution, exact, per_example

import jaxcoded
from jaxcoded import GroupMismatch, InconsistentMessages, coded_allreduce, host
from jaxcoded.transport import engine

pytestmark = [
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
    pytest.mark.skipif(SIZE < 4, reason="no redundancy"),
]
RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(50, dtype="float32")
LIAR = 2


def opened(comm, verify, **options):
    how = {"verify_wait": True, "deadline": None}
    how |= {k: options.pop(k) for k in list(options) if hasattr(jaxcoded.Options, k)}
    options = {"fanout": SIZE - 1, "stragglers": 2, "transport": "engine"} | options
    how = jaxcoded.Options(verify=verify, **how)
    return jaxcoded.CodedGroup(comm, **options, options=how)


def flipped(vector, element=7, bit=29):
    """The vector with another exponent at one element."""
    out = np.array(vector)
    out.view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert np.isfinite(out).all()
    return out


def logged(caplog):
    jaxcoded.effects_barrier()
    return [r.getMessage() for r in caplog.records if r.name == "jaxcoded"]


@pytest.mark.parametrize("verify", ["warn", "drop", "raise"])
def test_a_rank_that_flips_a_bit_of_its_gradient(comm, caplog, verify):
    caplog.set_level(logging.WARNING, "jaxcoded")
    with opened(comm, verify) as group:
        reduce = jax.jit(lambda x: coded_allreduce(x, group))
        own = contribution(group, VECTOR)
        assert_sum(group, reduce(own), VECTOR)
        lie = flipped(own) if RANK == LIAR else own
        if verify == "raise":
            with pytest.raises(JaxRuntimeError) as error:
                jax.block_until_ready(reduce(lie))
            texts = comm.allgather(str(error.value))
            assert len(set(texts)) == 1
            assert "InconsistentMessages: round 2, coded_allreduce of " in texts[0]
        else:
            total = reduce(lie)
            assert_same_bits(comm, total)
            if verify == "drop":
                assert_sum(group, total, VECTOR)
        # all are in step again
        assert_sum(group, reduce(own), VECTOR)
        compared = group.transport.statistics()["compared_rounds"]
    texts = texts if verify == "raise" else logged(caplog)
    if RANK == 0:
        assert compared == 3
        (text,) = set(texts)
        assert f"what rank {LIAR} has sent to rank 0 does not fit with what its" in text
        assert verify != "drop" or text.endswith("; the sum does without it")
    elif verify != "raise":
        assert not texts


def test_with_one_more_than_needed_several_may_be_wrong(comm):
    with opened(comm, "drop", stragglers=1, code="cyclic_repetition") as group:
        own = contribution(group, VECTOR)
        words = "does not fit together .which of them is wrong, more redundancy would"
        with pytest.raises(InconsistentMessages, match=words):
            host.coded_allreduce(flipped(own) if RANK == LIAR else own, group)
        assert_sum(group, host.coded_allreduce(own, group), VECTOR)


def test_training_without_a_rank_that_computes_nan(comm, caplog):
    """The gradient, the loss and the count are those of the whole batch."""
    caplog.set_level(logging.WARNING, "jaxcoded")

    def losses(params, batch):
        return batch @ params

    rows = VECTOR.astype(np.float32)
    with opened(comm, "drop") as group:
        indices, weights = group.assignment(len(rows))
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=True))
        batch = jnp.asarray(rows[indices])
        if RANK == LIAR:
            batch = batch.at[0, 3].set(jnp.nan)
        loss, gradient = step(jnp.ones(rows.shape[1], np.float32), batch, weights)
        mean = exact(VECTOR) / len(rows)
        np.testing.assert_allclose(gradient, mean, atol=1e-5)
        np.testing.assert_allclose(loss, mean.sum(), atol=1e-5)
        assert_same_bits(comm, gradient)
    texts = logged(caplog)
    said = f"what rank {LIAR} has sent to rank 0 has NaN or infinities; the sum does"
    assert RANK or said in texts[0]


def test_without_waiting_whoever_has_come_is_compared(comm):
    """The right sum in any case, and with a stopped rank no wait."""
    with opened(comm, "raise", verify_wait=False, code="cyclic_repetition") as group:
        own = contribution(group, VECTOR)
        for _ in range(20):
            assert_sum(group, host.coded_allreduce(own, group), VECTOR)
        gone = np.arange(SIZE) == LIAR
        total = host.coded_allreduce(own, group, erasures=gone)
        assert_sum(group, total, VECTOR)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verify": "detect"}, "verify must be one of warn, drop, raise or None"),
        ({"verify_wait": 1}, "verify_wait must be True or False, got 1"),
        ({"verify": None}, "verify_wait=True means nothing without verify"),
        ({"transport": "mpi4jax"}, 'verify="warn" needs the engine'),
        ({"stragglers": 0}, 'verify="warn" has nothing to compare: what the children'),
        (
            {"deadline": 1, "on_deadline": "approximate"},
            'verify="warn" compares exact sums',
        ),
        (
            {"code": "shared(replicas=2)", "stragglers": 0},
            "each block of shared work is computed once",
        ),
    ],
)
def test_where_it_cannot_be(comm, options, words):
    with pytest.raises(ValueError, match=words):
        opened(comm, **({"verify": "warn"} | options))


def test_ranks_that_differ(comm):
    with pytest.raises(GroupMismatch, match=r"verify=(drop|warn) at rank"):
        opened(comm, "drop" if RANK else "warn")


def test_options_say_whether_messages_are_compared():
    options = jaxcoded.Options()
    assert not options.complete().compares
    assert dataclasses.replace(options, verify="warn").compares
    assert dataclasses.replace(options, debug=True).compares
