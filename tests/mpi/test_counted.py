"""Sums count their examples: values that are weighted with a batch's weights, and no other values."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import more
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, redundant, several
from reference import assert_same_bits
from together import finish, wait_for_all

import jaxcoded
from jaxcoded import coded_allreduce, coded_allreduce_done, coded_allreduce_start, host

pytestmark = pytest.mark.ranks(4)

EXAMPLES, BATCH = 32, 12
DATA = np.random.default_rng(4).normal(size=(EXAMPLES, 5))

STRATEGIES = {
    "uncoded": jaxcoded.Uncoded(),
    "shared": jaxcoded.Shared(replicas=0, blocks=3),
}
if SIZE > 2:
    STRATEGIES |= {"coded": jaxcoded.Coded(stragglers=1)}
if SIZE > 3:
    STRATEGIES |= {
        "cyclic": jaxcoded.Coded(code="cyclic_repetition", root_computes=True)
    }


def batches(group, seed=0):
    return group.epoch(DATA, BATCH, seed=seed)


def weighted(batch):
    return batch.weights @ batch.data


def at_once(x, group, weights):
    return coded_allreduce(x, group, weights)


def with_a_residual(x, group, weights):
    if group.plan.strategy.by_blocks:
        return coded_allreduce(x, group, weights)
    total, residual, token = coded_allreduce(
        x, group, weights, residual=True, token=jnp.int32(0)
    )
    return jnp.where(residual < 1e-9, total, jnp.nan) + 0 * token


def started(x, group, weights):
    """Start two rounds, both of which count their examples."""
    handle = coded_allreduce_start(
        [x[:2], x[2:]], group, weights, bucket_bytes=x[:2].nbytes
    )
    return jnp.concatenate(coded_allreduce_done(handle))


def on_the_host(x, group, weights):
    return host.allreduce(np.asarray(x), group, weights)


def in_a_chain(x, group, weights):
    tx = optax.chain(jaxcoded.optax.sum_gradients(group), optax.scale(2.0))
    params = jnp.zeros_like(x)
    return tx.update(x, tx.init(params), params, weights=weights)[0] / 2


CALLS = [at_once, with_a_residual, started, on_the_host, in_a_chain]
calls = pytest.mark.parametrize("call", CALLS)


def compiled(call, group):
    def step(batch):
        return call(weighted(batch), group, batch.weights)

    return step if call is on_the_host else jax.jit(step)


@engine_only
@pytest.mark.parametrize(
    ("call", "strategy"),
    [
        # calls over blocks differ from other calls; calls with weights do not
        (call, it) if call is at_once or it in ("shared", "coded") else more(call, it)
        for call in CALLS
        for it in STRATEGIES
    ],
)
def test_a_sum_of_a_batch(comm, transport, strategy, call):
    """A smaller last batch counts too, without another compilation."""
    with jaxcoded.CodedGroup(comm, STRATEGIES[strategy], transport=transport) as group:
        step = compiled(call, group)
        epoch = batches(group)
        for number, batch in enumerate(epoch):
            total = finish(step(batch))
            expected = DATA[epoch.indices(number)].sum(0)
            np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)
            assert_same_bits(comm, total)
        assert call is on_the_host or step._cache_size() == 1


@several
@pytest.mark.parametrize("call", [at_once, started, in_a_chain])
def test_a_sum_of_several_batches(group, call):
    """An evaluation sums several batches in one round."""
    total, weights = jnp.zeros(5), []
    for batch in batches(group):
        total, weights = total + weighted(batch), [*weights, batch.weights]
    total = finish(jax.jit(lambda x, w: call(x, group, w))(total, weights))
    np.testing.assert_allclose(total, DATA.sum(0), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(SIZE < 4, reason="slices need 4 ranks")
@pytest.mark.parametrize(
    "how", [jaxcoded.Coded(slices=2), jaxcoded.Coded(code="progressive")]
)
def test_an_encoded_message_is_counted(comm, transport, how):
    with jaxcoded.CodedGroup(comm, how, transport=transport) as group:
        batch = batches(group)[2]
        parts = group.plan.parts_above[group.rank]
        table = batch.weights.reshape(len(batch.indices), parts, -1).transpose(1, 0, 2)
        message = jaxcoded.kernels.encode(
            batch.data, table, multiple=group.plan.padding_multiple
        )
        for weights, wrong in ((batch.weights, False), (None, True)):
            if wrong:
                with pytest.raises(TypeError, match="needs the batch's weights"):
                    coded_allreduce(message, group, weights)
            else:
                total = finish(coded_allreduce(message, group, weights))
                expected = DATA[batches(group).indices(2)].sum(0)
                np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)


@engine_only
@several
def test_the_host_and_a_program_in_one_round(comm, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        batch = batches(group)[1]
        call = on_the_host if comm.rank % 2 else at_once
        total = finish(call(weighted(batch), group, batch.weights))
        expected = DATA[batches(group).indices(1)].sum(0)
        np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)


@several
@pytest.mark.parametrize(
    ("call", "odd"),
    [
        *((call, "batch") for call in CALLS),
        # a batch's number depends on seed and epoch
        *((it, "seed") if it is at_once else more(it, "seed") for it in CALLS),
    ],
)
@pytest.mark.parametrize(
    "how", [jaxcoded.Coded(stragglers=0), jaxcoded.Shared(replicas=0)]
)
def test_ranks_at_different_batches(comm, transport, call, odd, how):
    """All ranks get an error, or NaN without the engine; the next sum is right."""
    if transport == "mpi4jax" and (call is on_the_host or how.by_blocks):
        pytest.skip("with the engine only")
    with jaxcoded.CodedGroup(comm, how, transport=transport) as group:
        step = compiled(call, group)
        right = batches(group)[0]
        finish(step(right))
        wrong = right
        if comm.rank == SIZE - 1:
            wrong = batches(group)[1] if odd == "batch" else batches(group, seed=1)[0]
        wait_for_all(comm)
        if transport == "mpi4jax":
            assert np.isnan(finish(step(wrong))).all()
        else:
            errors = (JaxRuntimeError, ValueError, jaxcoded.InconsistentMessages)
            with pytest.raises(errors, match="examples were counted, not "):
                finish(step(wrong))
            jaxcoded.effects_barrier()
        wait_for_all(comm)
        expected = DATA[batches(group).indices(0)].sum(0)
        np.testing.assert_allclose(finish(step(right)), expected, rtol=1e-9, atol=1e-9)


@several
def test_integers_of_different_batches(comm, transport):
    """Integers cannot be NaN: a transport without errors of its own refuses weighted
    integers. Without weights nothing can be checked, and the sum is exact.
    """
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        numbers = group.epoch(np.arange(EXAMPLES, dtype=np.int32), BATCH, seed=0)
        right, other = numbers[0], numbers[1]
        expected = numbers.indices(0).sum()
        assert coded_allreduce(right.data.sum(), group) == expected
        if transport == "mpi4jax":
            with pytest.raises(TypeError, match="Without the engine a sum of"):
                coded_allreduce(right.data.sum(), group, right.weights)
            summed = jaxcoded.coded_sum(lambda _, data: data, group)
            with pytest.raises(TypeError, match="Without the engine a sum of"):
                summed(jnp.float32(0), right)
            return
        mine = other if comm.rank == SIZE - 1 else right
        assert coded_allreduce(right.data.sum(), group, right.weights) == expected
        with pytest.raises(JaxRuntimeError, match="examples were counted, not "):
            finish(coded_allreduce(mine.data.sum(), group, mine.weights))
        jaxcoded.effects_barrier()


@redundant
@calls
def test_weights_that_are_missing(group, call):
    """Numbers without weights are not a coded message: the error comes before anything
    is sent.
    """
    if call is on_the_host and not group._session.transport.can_lag:
        pytest.skip("with the engine only")
    batch, before = batches(group)[0], group.rounds
    for step in (
        lambda x: call(x, group, None),
        jax.jit(lambda x: call(x, group, None)),
    ):
        if call is on_the_host and step is not None and hasattr(step, "lower"):
            continue
        with pytest.raises(
            TypeError, match=r"needs the batch's weights.*batch\.weights\)"
        ):
            step(weighted(batch))
    with pytest.raises(TypeError, match="coded_reduce needs the batch's weights"):
        jaxcoded.coded_reduce(weighted(batch), group)
    assert group.rounds == before


@several
@calls
def test_weights_of_something_else(comm, group, call):
    if call is on_the_host and not group._session.transport.can_lag:
        pytest.skip("with the engine only")
    batch = batches(group)[0]
    x = weighted(batch)
    for wrong in (np.asarray(batch.weights), batch, [], [batch], 3):
        with pytest.raises(TypeError, match=r"weights must be batch\.weights"):
            call(x, group, wrong)
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport="mpi4jax") as other:
        weights = batches(other)[0].weights
    with pytest.raises(ValueError, match="this batch belongs to another group's plan"):
        call(x, group, weights)


@engine_only
@several
@pytest.mark.parametrize("call", [at_once, on_the_host])
def test_weights_that_were_changed_after_a_sum(comm, transport, call):
    """The count for the earlier weights no longer holds."""
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        batch = batches(group)[0]
        finish(call(weighted(batch), group, batch.weights))
        with pytest.raises(ValueError, match="read-only"):
            batch.weights.values[:] = 2
        changed = copy.deepcopy(batch.weights)
        if comm.rank == 0:
            changed.values[:] = 2
        wait_for_all(comm)
        errors = JaxRuntimeError, ValueError, jaxcoded.InconsistentMessages
        with pytest.raises(errors, match="examples were counted, not "):
            finish(call(weighted(batch), group, changed))
        jaxcoded.effects_barrier()
        wait_for_all(comm)
        total = finish(call(weighted(batch), group, batch.weights))
        expected = DATA[batches(group).indices(0)].sum(0)
        np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)


@engine_only
@pytest.mark.parametrize("strategy", ["uncoded", "shared"])
def test_plain_sums_need_no_weights(comm, transport, strategy):
    with jaxcoded.CodedGroup(comm, STRATEGIES[strategy], transport=transport) as group:
        total = finish(coded_allreduce(np.ones(3), group))
        np.testing.assert_allclose(total, SIZE)
        np.testing.assert_allclose(host.allreduce(np.ones(3), group), SIZE)
        if strategy == "shared":
            total = np.zeros(5)
            with group.blocks(EXAMPLES) as blocks:
                for block in blocks:
                    total += DATA[block.indices].sum(0)
            total = finish(coded_allreduce(total, group))
            np.testing.assert_allclose(total, DATA.sum(0), rtol=1e-9)


@engine_only
@several
def test_ranks_that_hold_the_same_examples_need_weights(comm, transport):
    """This holds for shared work, too, until the program loops over blocks."""
    with jaxcoded.CodedGroup(comm, transport=transport) as group:
        for call in (coded_allreduce, coded_allreduce_start, host.allreduce):
            with pytest.raises(TypeError, match=r"group\.blocks\(batch_size\)"):
                call(np.ones(3), group)
        total = np.zeros(1)
        with group.blocks(BATCH) as blocks:
            for block in blocks:
                total += block.indices.sum()
        assert host.allreduce(total, group) == sum(range(BATCH))


@engine_only
def test_a_chain_sums_once(comm, transport):
    with jaxcoded.CodedGroup(comm, transport=transport) as group:
        batch = group.batch(DATA)
        link = jaxcoded.optax.sum_gradients(group)
        tx = optax.chain(link, link)
        state = tx.init(jnp.zeros(5))
        update = lambda g: tx.update(g, state, weights=batch.weights)
        for call in (update, jax.jit(update)):
            with pytest.raises(
                ValueError, match="another jaxcoded.optax.sum_gradients"
            ):
                call(jnp.asarray(weighted(batch)))
        if SIZE > 1:
            text = r"call tx\.update\(grads, state, params, weights=batch\.weights\)"
            with pytest.raises(TypeError, match=text):
                link.update(jnp.zeros(5), link.init(jnp.zeros(5)))


@engine_only
def test_blocks_without_a_loop_are_no_sum(comm, transport):
    """Values computed outside a loop still need weights."""
    if SIZE < 2:
        pytest.skip("what one rank holds adds up")
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=1), transport=transport
    ) as group:
        group.blocks(BATCH)
        with pytest.raises(TypeError, match="needs the batch's weights"):
            coded_allreduce(np.ones(3), group)


@engine_only
def test_a_batch_in_an_exact_and_in_an_approximate_group(comm, transport):
    """The two groups have different counts."""
    options = jaxcoded.Options(deadline=30.0, on_deadline="approximate")
    strategy = STRATEGIES["uncoded"]
    with (
        jaxcoded.CodedGroup(comm, strategy, transport=transport) as exact,
        jaxcoded.CodedGroup(
            comm, exact.plan, transport=transport, options=options
        ) as approximate,
    ):
        batch = batches(exact)[0]
        expected = DATA[batches(exact).indices(0)].sum(0)
        for group in (approximate, exact, approximate):
            for call in (on_the_host, at_once):
                total = finish(call(weighted(batch), group, batch.weights))
                np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)
        if SIZE > 1:
            other = batches(exact)[int(comm.rank == 0)]
            wait_for_all(comm)
            errors = JaxRuntimeError, ValueError, jaxcoded.InconsistentMessages
            with pytest.raises(errors, match="examples were counted, not "):
                finish(on_the_host(weighted(other), exact, other.weights))
            jaxcoded.effects_barrier()
            wait_for_all(comm)
