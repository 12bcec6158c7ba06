"""Blocks on the host: a program loops over its rank's blocks, and then sums."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted

import jaxcoded
from jaxcoded.errors import CodedError, GroupMismatch

BATCH, D = 45, 20
GRADIENTS = np.random.default_rng(3).standard_normal((BATCH, D))
TOTAL = GRADIENTS.sum(0)


@pytest.fixture(scope="module")
def group(comm):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Shared(replicas=min(2, comm.size - 1), blocks=3),
        transport="engine",
    ) as opened:
        yield opened


def added_up(group, nap=0.0, first=lambda: None, costs=None):
    """Return this rank's part of the sum and its blocks; call ``first`` in its first
    block.
    """
    total, numbers = np.zeros(D), []
    with group.blocks(BATCH, costs=costs) as blocks:
        for block in blocks:
            if not numbers:
                first()
            time.sleep(nap)
            total += GRADIENTS[block.indices].sum(0)
            numbers.append(block.number)
    return total, numbers


def same_on_all(comm, array):
    assert len(set(comm.allgather(np.asarray(array).tobytes()))) == 1


def test_every_block_once(comm, group):
    """Some ranks are late in some blocks; every sum contains the whole batch."""
    rng = random.Random(comm.rank)
    for step in range(6):
        nap = rng.choice([0, 0, 0.02])
        own, numbers = added_up(group, nap)
        total = uncounted.allreduce(own, group)
        np.testing.assert_allclose(total, TOTAL, rtol=1e-12, atol=1e-12)
        same_on_all(comm, total)
        computed = comm.allgather(numbers)
        if not step:  # each rank holds the blocks that it has computed
            for rank, counts in enumerate(computed):
                held = group.plan.placement.held(rank)
                assert set(counts) <= set(held), (rank, counts, held)


@pytest.mark.parametrize("costs", ["pareto", "one is most of it", "nothing"])
def test_unequal_costs(comm, group, costs):
    """Sums are exact also with late ranks and empty blocks."""
    rng = random.Random(comm.rank)
    example_costs = np.random.default_rng(4).pareto(1.1, BATCH)
    if costs == "one is most of it":
        example_costs[7] = 1000 * example_costs.sum()
    elif costs == "nothing":
        example_costs[:] = 0
    for _ in range(3):
        own, _ = added_up(group, rng.choice([0, 0, 0.02]), costs=example_costs)
        total = uncounted.allreduce(own, group)
        np.testing.assert_allclose(total, TOTAL, rtol=1e-12, atol=1e-12)
        same_on_all(comm, total)


@pytest.mark.parametrize("wrong", ["others", "not a number"])
def test_costs_of_one_rank(comm, wrong):
    """All ranks get an error."""
    costs = np.ones(BATCH)
    if comm.rank == comm.size - 1:
        costs[3] = 2.0 if wrong == "others" else np.nan
    errors = (CodedError, ValueError)
    if wrong == "others" and comm.size == 1:
        pytest.skip("no other rank")
    with (
        pytest.raises(errors) as caught,
        jaxcoded.CodedGroup(comm, jaxcoded.Shared(replicas=0, blocks=3)) as group,
    ):
        own, _ = added_up(group, costs=costs)
        uncounted.allreduce(own, group)
    texts = comm.allgather(str(caught.value))
    if wrong == "others":
        # the other ranks may first detect that this rank has left
        assert any("costs" in text for text in texts), texts
    else:
        last = comm.rank == comm.size - 1
        assert isinstance(caught.value, ValueError if last else CodedError)
        assert "costs must be finite and >= 0, got nan for example 3" in texts[-1]


def test_under_jit(comm, group):
    """A donated sum, a mean, and a compiled step at the end work under jit."""
    gradients = jnp.asarray(GRADIENTS, jnp.float32)

    @jax.jit
    def finish(total):
        return uncounted.coded_allreduce(total, group, divisor=BATCH)

    def add(total, indices):
        return total + gradients[indices].sum(0)

    add = jax.jit(add, donate_argnums=0)
    for _ in range(3):
        total = jnp.zeros(D, jnp.float32)
        with group.blocks(BATCH) as blocks:
            for block in blocks:
                total = add(total, block.indices)
                block.done(total)
        mean = finish(total)
        np.testing.assert_allclose(mean, TOTAL / BATCH, rtol=1e-4, atol=1e-5)
        same_on_all(comm, mean)


def test_together_with_other_sums(comm):
    """Other sums may come before the first blocks. Later sums would be ambiguous."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=min(2, comm.size - 1), blocks=3)
    ) as group:
        plain = uncounted.allreduce(np.ones(3), group)
        np.testing.assert_array_equal(plain, comm.size)
        for _ in range(2):
            own, _ = added_up(group)
            total = uncounted.allreduce(own, group)
            np.testing.assert_allclose(total, TOTAL, rtol=1e-12, atol=1e-12)
            with pytest.raises(GroupMismatch, match="all of it in one call"):
                uncounted.allreduce(np.ones(3), group)


def test_fewer_examples_than_blocks(comm, group):
    seen = np.zeros(2)
    with group.blocks(2) as blocks:
        for block in blocks:
            assert block.indices.dtype == np.int64
            seen[block.indices] += 1
    np.testing.assert_array_equal(uncounted.allreduce(seen, group), 1)


def test_leaving_the_loop_early(comm):
    """The rank that leaves gets an error. The other ranks' step ends, and their next
    call reports the error.
    """
    if comm.size < 3:
        pytest.skip("nobody else holds the blocks")
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=min(2, comm.size - 1))
    ) as group:
        leaves = comm.rank == comm.size - 1
        if leaves:
            with (
                pytest.raises(CodedError, match="left before its end"),
                group.blocks(BATCH) as blocks,
            ):
                for _ in blocks:
                    comm.Barrier()  # until all have blocks
                    break
            own = np.zeros(D)
        else:
            own, _ = added_up(group, first=comm.Barrier)
        try:
            total = uncounted.allreduce(own, group)
        except GroupMismatch as error:
            assert "leaving the loop early in group.blocks" in str(error)
        else:  # the round was decided before the rank that had left called it
            np.testing.assert_allclose(total, TOTAL, rtol=1e-12, atol=1e-12)
            with pytest.raises(GroupMismatch, match="leaving the loop early"):
                added_up(group)


def test_an_exception_in_the_loop(comm):
    """The rank raises its exception, or the exception of a rank that was faster."""
    with jaxcoded.CodedGroup(comm, jaxcoded.Shared(replicas=0)) as group:
        with (
            pytest.raises((ZeroDivisionError, CodedError)),
            group.blocks(BATCH) as blocks,
        ):
            for _ in blocks:
                raise ZeroDivisionError
        with pytest.raises(CodedError):
            uncounted.allreduce(np.zeros(D), group)


@pytest.mark.parametrize("loop", ["after a break", "side by side"])
def test_two_loops(comm, loop):
    """All ranks get the same error, because a second loop would be another round with other blocks."""
    with (
        jaxcoded.CodedGroup(
            comm, jaxcoded.Shared(replicas=min(2, comm.size - 1), blocks=3)
        ) as group,
        # or too many ranks have already left their loops
        pytest.raises(CodedError, match="loop over the blocks once|nobody who is left"),
        group.blocks(BATCH) as blocks,
    ):
        if loop == "after a break":
            for _ in blocks:
                break
            list(blocks)
        else:
            list(zip(blocks, blocks))


@pytest.mark.parametrize("inner", ["blocks", "coded_value_and_grad"])
def test_within_a_loop(comm, inner):
    """All ranks get an error that says what to do."""

    def loss(w, v):
        return v @ w

    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=min(2, comm.size - 1), blocks=3)
    ) as group:
        part = group.batch(BATCH)
        with (
            # or too many ranks have already left their loops
            pytest.raises(
                (CodedError, jax.errors.JaxRuntimeError),
                match="let the first one end before the next|nobody who is left",
            ) as caught,
            group.blocks(BATCH) as blocks,
        ):
            for _ in blocks:
                if inner == "blocks":
                    added_up(group)
                else:
                    step = jaxcoded.coded_value_and_grad(loss, group, mean=False)
                    jax.block_until_ready(
                        step(np.ones(D), part.of(GRADIENTS[part.indices]))
                    )
        jaxcoded.effects_barrier()
        texts = comm.allgather(str(caught.value))
        assert any("let the first one end" in text for text in texts)


def test_calls_between_blocks_and_their_sum(comm, group):
    """The sum must follow its blocks directly."""
    added_up(group)
    with pytest.raises((CodedError, jax.errors.JaxRuntimeError), match="group.blocks"):
        jax.block_until_ready(jaxcoded.tree_bcast(jnp.zeros(2), group))
    jaxcoded.effects_barrier()


def test_mistakes(comm, group):
    for wrong in (0, 2**63, 2**70):
        with pytest.raises(ValueError, match=f"batch_size must be .*, got {wrong}"):
            group.blocks(wrong)
    for costs, text in (
        ([1.0, 2.0], r"shape \(3,\)"),
        ([1.0, -2.0, 3.0], "got -2 for example 1"),
        ([1.0, 2.0, np.nan], "got nan for example 2"),
    ):
        with pytest.raises(ValueError, match=text):
            group.blocks(3, costs=costs)
    for costs in (
        ["short", "long"],
        ["1", "2"],
        b"12",
        np.array([1, 2j]),
        np.array([1, 2], "m8[s]"),
        np.array([1, 2], "M8[s]"),
        np.array([1, None]),
        [True, False],
        np.ma.masked_array([1.0, 2.0], [False, True]),
        {1: 2, 3: 4},
    ):
        for call in (
            lambda costs=costs: group.blocks(2, costs=costs),
            lambda costs=costs: group.epoch(np.ones(2), 2, costs=costs),
        ):
            with pytest.raises(TypeError, match="costs must have one number .*, got "):
                call()
    group.blocks(2, costs=jnp.ones(2, jnp.bfloat16))
    with (
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as coded,
        pytest.raises(ValueError, match="blocks needs a group that shares its work"),
    ):
        coded.blocks(4)
    blocks = group.blocks(4)
    with pytest.raises(CodedError, match="inside their with statement"):
        next(iter(blocks))
