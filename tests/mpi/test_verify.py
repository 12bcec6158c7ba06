"""Groups that verify their sums name and leave out a rank with faulty memory."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from cases import more
from jax.errors import JaxRuntimeError
from marks import SIZE
from mpi4py import MPI
from reference import assert_same_bits, assert_sum, contribution, exact, per_example
from together import wait_until
from uncounted import coded_allreduce

import jaxcoded
from jaxcoded import GroupMismatch, InconsistentMessages
from jaxcoded.transport import engine

pytestmark = [
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
    pytest.mark.skipif(SIZE < 4, reason="no redundancy"),
    pytest.mark.ranks(4),
]
RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(50, dtype="float32")
LIAR = 2


def opened(comm, action, wait=True, **options):
    how = {"deadline": None}
    how |= {k: options.pop(k) for k in list(options) if hasattr(jaxcoded.Options, k)}
    transport = options.pop("transport", "engine")
    strategy = options.pop("strategy", None) or jaxcoded.Coded(
        **{"fanout": SIZE - 1, "stragglers": 2} | options
    )
    how = jaxcoded.Options(check=jaxcoded.Check(action, wait), **how)
    return jaxcoded.CodedGroup(comm, strategy, transport=transport, options=how)


def flipped(vector, element=7, bit=29):
    """Return the vector with one exponent bit flipped."""
    out = np.array(vector)
    out.view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert np.isfinite(out).all()
    return out


def logged(caplog, some=False):
    """Return the log; with ``some`` wait for an entry, as a separate thread writes it."""
    jaxcoded.effects_barrier()

    def messages():
        return [r.getMessage() for r in list(caplog.records) if r.name == "jaxcoded"]

    if some:
        wait_until(messages)
    return messages()


@pytest.mark.parametrize("action", ["warn", "drop", "raise"])
def test_a_rank_that_flips_a_bit_of_its_gradient(comm, caplog, action):
    caplog.set_level(logging.WARNING, "jaxcoded")
    with opened(comm, action) as group:
        reduce = jax.jit(lambda x: coded_allreduce(x, group))
        own = contribution(group, VECTOR)
        assert_sum(group, reduce(own), VECTOR)
        lie = flipped(own) if RANK == LIAR else own
        if action == "raise":
            with pytest.raises(JaxRuntimeError) as error:
                jax.block_until_ready(reduce(lie))
            texts = comm.allgather(str(error.value))
            assert len(set(texts)) == 1
            assert "InconsistentMessages: round 2, coded_allreduce of " in texts[0]
        else:
            total = reduce(lie)
            assert_same_bits(comm, total)
            if action == "drop":
                assert_sum(group, total, VECTOR)
        # all ranks are in step again
        assert_sum(group, reduce(own), VECTOR)
        compared = group.statistics()["compared_rounds"]
    texts = texts if action == "raise" else logged(caplog, some=RANK == 0)
    if RANK == 0:
        assert compared == 3
        (text,) = set(texts)
        assert f"what rank {LIAR} has sent to rank 0 does not fit with what the" in text
        assert action != "drop" or "; the sum does without it. So do later" in text
    elif action != "raise":
        assert not texts


def test_with_one_more_than_needed_several_may_be_wrong(comm):
    with opened(comm, "drop", stragglers=1, code="cyclic_repetition") as group:
        own = contribution(group, VECTOR)
        words = "does not fit together .which of them is wrong, more redundancy would"
        with pytest.raises(InconsistentMessages, match=words):
            uncounted.allreduce(flipped(own) if RANK == LIAR else own, group)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)


def test_training_without_a_rank_that_computes_nan(comm, caplog):
    """Gradient, loss and count cover the whole batch."""
    caplog.set_level(logging.WARNING, "jaxcoded")

    def losses(params, batch):
        return batch @ params

    rows = VECTOR.astype(np.float32)
    with opened(comm, "drop") as group:
        part = group.batch(len(rows))
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        batch = jnp.asarray(rows[part.indices])
        if RANK == LIAR:
            batch = batch.at[0, 3].set(jnp.nan)
        loss, gradient = step(jnp.ones(rows.shape[1], np.float32), part.of(batch))
        mean = exact(VECTOR) / len(rows)
        np.testing.assert_allclose(gradient, mean, atol=1e-5)
        np.testing.assert_allclose(loss, mean.sum(), atol=1e-5)
        assert_same_bits(comm, gradient)
    texts = logged(caplog, some=RANK == 0)
    text = f"what rank {LIAR} has sent to rank 0 has NaN or infinities; the sum does"
    assert RANK or text in texts[0]


def sharing(comm, **options):
    return jaxcoded.CodedGroup(
        comm,
        jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=3),
        transport="engine",
        options=jaxcoded.Options(deadline=None, **options),
    )


def step_of(group, rows, losses):
    """Return the gradient function of a mean loss over the batch, and its arguments."""
    part = group.batch(len(rows))
    step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
    return lambda: step(
        jnp.ones(rows.shape[1], np.float32), part.of(jnp.asarray(rows[part.indices]))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("check", "rounds"),
    [
        (jaxcoded.Check("warn"), 50),
        (jaxcoded.Check("raise"), 50),
        (jaxcoded.DEBUG, 50),
        more(jaxcoded.Check("raise"), 10_000),
    ],
)
def test_shared_work_of_honest_ranks(comm, caplog, check, rounds, dtype):
    """The sum contains the whole batch, blocks are compared, and there is no alarm."""
    caplog.set_level(logging.WARNING, "jaxcoded")
    rows = VECTOR.astype(np.float32)

    def losses(params, batch):
        narrow = (batch * params).astype(dtype)
        return jnp.sum(jnp.tanh(narrow), axis=-1).astype(jnp.float32)

    reference = jax.jit(jax.grad(lambda w: losses(w, rows).mean()))
    with sharing(comm, check=check) as group:
        step = step_of(group, rows, losses)
        for _ in range(rounds):
            _, gradient = step()
            assert_same_bits(comm, gradient)
            expected = reference(jnp.ones(rows.shape[1], np.float32))
            np.testing.assert_allclose(
                gradient, expected, atol=1e-6 if dtype == "float32" else 0.02
            )
        if RANK == 0:
            compared = group.statistics()["compared_rounds"]
            assert compared == rounds if check == jaxcoded.DEBUG else compared
    assert not logged(caplog)


@pytest.mark.parametrize("action", ["warn", "drop", "raise"])
def test_shared_work_of_a_rank_that_flips_a_bit(comm, caplog, action):
    """The log names the rank, and one of the ranks that also computed its block."""
    caplog.set_level(logging.WARNING, "jaxcoded")
    rows = VECTOR.astype(np.float32)

    @jax.custom_vjp
    def lies(params):
        return params

    lies.defvjp(lambda params: (params, None), lambda _, g: (g.at[7].mul(2.0**64),))

    def losses(params, batch):
        return batch @ (lies(params) if RANK == LIAR else params)

    with sharing(comm, check=jaxcoded.Check(action)) as group:
        step = step_of(group, rows, losses)
        texts = []
        for number in range(1000):  # blocks of late ranks are not compared
            try:
                jax.block_until_ready(step())
            except JaxRuntimeError as error:
                assert action != "warn"
                texts.append(str(error))
                break
            if number % 20 == 19 and comm.bcast(bool(logged(caplog))):
                break
        rounds = comm.allgather(group.rounds)
        assert len(set(rounds)) == 1
    if action == "warn":
        texts = logged(caplog, some=RANK == 0)
        assert (RANK == 0) == bool(texts)
    else:
        assert texts
    for text in texts:
        one, other = re.search(r"what ranks (\d+), (\d+) have computed", text).groups()
        assert str(LIAR) in (one, other) and one != other


def test_shared_work_of_tiny_numbers_that_each_rank_rounds_in_its_own_way(comm):
    """Near 0 rounding is as large in small numbers of float16 as in large ones."""
    rows = np.full((48, 1000), 1e-6, np.float32)
    up = np.random.default_rng(RANK).random(rows.shape[1]) < 0.5

    @jax.custom_vjp
    def rounded(params):
        return params

    rounded.defvjp(
        lambda params: (params, None),
        lambda _, g: (g + jnp.where(up, 2.0**-24, 0).astype(g.dtype),),
    )

    def losses(params, batch):
        return (batch * rounded(params)).sum(-1)

    with sharing(comm, check=jaxcoded.DEBUG) as group:
        part = group.batch(len(rows))
        batch = part.of(jnp.asarray(rows[part.indices]))
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        for _ in range(4):
            jax.block_until_ready(step(jnp.ones(rows.shape[1], np.float16), batch))
        if RANK == 0:
            assert group.statistics()["compared_rounds"] == 4


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e34])
def test_shared_work_of_numbers_of_any_size(comm, scale):
    """Correct numbers of any size raise no alarm, and wrong ones are detected."""
    rows = np.full((48, 1000), scale, np.float32)

    def losses(params, batch):
        wrong = jnp.float32(2 if RANK == LIAR and lies else 1)
        return batch @ params * wrong + (wrong - 1)

    with sharing(comm, check=jaxcoded.DEBUG) as group:
        lies = False
        for _ in range(4):
            jax.block_until_ready(step_of(group, rows, losses)())
        lies = True
        step = step_of(group, rows, losses)
        with pytest.raises(JaxRuntimeError, match="InconsistentMessages"):
            for _ in range(100):
                jax.block_until_ready(step())


def test_shared_work_of_a_rank_that_computes_nan(comm):
    def losses(params, batch):
        return batch @ params * (jnp.nan if RANK == LIAR else 1)

    with sharing(comm, check=jaxcoded.Check("raise")) as group:
        step = step_of(group, VECTOR.astype(np.float32), losses)
        words = f"what rank {LIAR} has computed has NaN or infinities"
        with pytest.raises(JaxRuntimeError, match=words):
            # other ranks may have computed all blocks of this rank
            for _ in range(1000):
                jax.block_until_ready(step())


def test_blocks_on_the_host_cannot_be_verified(comm):
    with (
        sharing(comm, check=jaxcoded.Check("raise")) as group,
        pytest.raises(ValueError, match="sees only what coded_value_and_grad"),
    ):
        group.blocks(12)


def test_without_waiting_the_ranks_that_have_come_are_compared(comm):
    """The sum is right in any case, and a stopped rank delays no round."""
    with opened(comm, "raise", wait=False, code="cyclic_repetition") as group:
        own = contribution(group, VECTOR)
        for _ in range(20):
            assert_sum(group, uncounted.allreduce(own, group), VECTOR)
        gone = np.arange(SIZE) == LIAR
        total = uncounted.allreduce(own, group, erasures=gone)
        assert_sum(group, total, VECTOR)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"action": "detect"},
            r"action must be one of 'warn' \(a line in the log\), .*, got 'detect'",
        ),
        ({"wait": 1}, "wait must be True, False or 'all', got 1"),
        (
            {"wait": "all"},
            "fails the round if messages differ: leave out action='warn'",
        ),
        (
            {"transport": "mpi4jax"},
            r"check=Check\(action='warn', wait=True\) needs the engine",
        ),
        ({"stragglers": 0}, "has nothing to compare: messages of the children"),
        (
            {"deadline": 1, "on_deadline": "approximate"},
            "compares exact sums",
        ),
        (
            {"strategy": jaxcoded.Shared(replicas=0), "wait": False},
            "each block is on one rank only; take replicas=1 or more",
        ),
        (
            {"strategy": jaxcoded.Shared(replicas=min(2, SIZE - 1))},
            "waits for surplus messages, but shared work has none",
        ),
    ],
)
def test_unsupported_groups(comm, options, words):
    with pytest.raises(ValueError, match=words):
        opened(comm, **({"action": "warn"} | options))


def test_ranks_that_differ(comm):
    with pytest.raises(
        GroupMismatch, match=r"check=Check\(action='(drop|warn)', wait=True\) at rank"
    ):
        opened(comm, "drop" if RANK else "warn")


def test_a_model_that_fits_its_data_after_replan(comm):
    """Messages of such a model consist of rounding. Earlier rounds tell how large it may be."""
    rng = np.random.default_rng(0)
    x = (30 * rng.standard_normal((240, 20))).astype(np.float32)
    fit = rng.standard_normal(20).astype(np.float32)
    data = x, (x.astype(np.float64) @ fit).astype(np.float32)
    group = opened(comm, "raise", stragglers=1)

    def losses(w, batch):
        return (batch[0] @ w - batch[1]) ** 2

    with group:
        for speeds, some in [
            (None, (0 * fit, fit)),
            (1 + 0.3 * np.arange(SIZE), (fit,)),
        ]:
            if speeds is not None:
                group = group.replan(speeds)
            step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
            for w in some:
                np.asarray(step(jnp.asarray(w), group.batch(data))[1])
        if RANK == group.plan.root:
            assert group.statistics()["compared_rounds"] == 3
