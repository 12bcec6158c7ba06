"""Deadlines: more ranks are late than a parent tolerates."""

import contextlib
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE
from mpi4py import MPI
from reference import assert_sum, contribution, per_example
from together import SLOWNESS, wait_for_all

import jaxcoded
from jaxcoded.plan import atoms
from jaxcoded.transport import engine
from jaxcoded.transport.deadline import Deadline

pytestmark = pytest.mark.skipif(bool(engine.missing()), reason=engine.missing())
several = pytest.mark.skipif(SIZE < 4, reason="no redundancy")
RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(7)
SECONDS = 1.5 * SLOWNESS  # far above the delays of compilation on shared cores
LATE = 2 * SECONDS


@contextlib.contextmanager
def opened(comm, deadline, action, **more):
    stragglers = 1 if SIZE > 2 else 0
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=stragglers, **more),
        transport="engine",
        options=jaxcoded.Options(deadline=deadline, on_deadline=action),
    ) as group:
        yield group


def too_late(group):
    """Return two children of one parent without which the parent cannot continue; leaves if possible."""
    tree = group.plan.tree
    parent = next(
        rank
        for rank in reversed(tree.order)
        if len(group.plan.coded_children(rank)) > 1
    )
    return group.plan.coded_children(parent)[-2:]


def until_decided(group):
    """Make this rank late, however late the other ranks are."""
    end = time.monotonic() + 40 * SECONDS
    while group.lag() == 0:
        assert time.monotonic() < end
        time.sleep(0.01)


@several
@pytest.mark.parametrize("deadline", [SECONDS, "100x"])
def test_raise(comm, deadline):
    """All ranks, even the late ranks, get the same text, and continue together."""
    with opened(comm, deadline, "raise") as group:
        late = too_late(group)
        x = contribution(group, VECTOR)
        call = jax.jit(lambda x: uncounted.coded_allreduce(x, group))
        took = []
        for _ in range(8):
            wait_for_all(comm)
            start = time.monotonic()
            # the deadline of 100 times this round's time is at least SECONDS
            if RANK in late:
                time.sleep(SECONDS / 100)
            assert_sum(group, np.asarray(call(x)), VECTOR)
            took.append(time.monotonic() - start)
        wait_for_all(comm)
        # the deadline depends on the rounds, and these on the machine's speed
        sleeps = max(LATE, 200 * max(comm.allgather(float(np.median(took)))))
        if RANK in late:
            time.sleep(sleeps)
        with pytest.raises(JaxRuntimeError, match="DeadlineExceeded") as raised:
            call(x).block_until_ready()
        jaxcoded.effects_barrier()
        text = str(raised.value).split("DeadlineExceeded")[1]
        texts = comm.allgather(text)
        assert len(set(texts)) == 1
        assert "round 9 was not decided within" in text
        assert all(str(rank) in text for rank in late)
        if RANK in late:
            time.sleep(sleeps)
        with pytest.raises(jaxcoded.DeadlineExceeded, match="round 10 was not decided"):
            uncounted.allreduce(np.asarray(x), group)
        wait_for_all(comm)
        assert_sum(group, np.asarray(call(x)), VECTOR)
        wait_for_all(comm)


@several
def test_compilation_before_the_first_round_is_not_lateness(comm):
    """Ranks compile for longer than the deadline, and then meet."""
    with opened(comm, SECONDS, "raise") as group:
        late = too_late(group)
        x = contribution(group, VECTOR)

        def traced(x):
            if RANK in late:
                time.sleep(LATE)
            return uncounted.coded_allreduce(x, group)

        call = jax.jit(traced)
        call.lower(x).compile()
        wait_for_all(comm)
        assert_sum(group, np.asarray(call(x)), VECTOR)
        wait_for_all(comm)


@several
def test_no_deadline_expires_for_tolerated_ranks(comm):
    with opened(comm, SECONDS, "raise") as group:
        late = too_late(group)[-1]
        x = np.asarray(contribution(group, VECTOR))
        wait_for_all(comm)
        if RANK == late:
            until_decided(group)
        assert_sum(group, uncounted.allreduce(x, group), VECTOR)
        wait_for_all(comm)


@several
@pytest.mark.parametrize("code", ["auto", "cyclic_repetition"])
def test_approximate(comm, code):
    """After the deadline all ranks get the sum that the residual describes; other sums are exact."""
    with opened(comm, SECONDS, "approximate", code=code) as group:
        plan, late = group.plan, too_late(group)
        count = len(atoms.sizes(plan))
        # each rank's coefficients of the atoms: the sum is that of all atoms
        mine = atoms.coefficients(plan, RANK)[:, 0, 0]
        call = jax.jit(lambda x: uncounted.coded_allreduce(x, group, residual=True))
        mine = jnp.asarray(mine)
        jax.block_until_ready(call(mine))
        wait_for_all(comm)
        total, residual, _ = call(mine)
        np.testing.assert_allclose(total, np.ones(count), atol=1e-9)
        assert float(residual) < 1e-6
        wait_for_all(comm)
        if RANK in late:
            until_decided(group)
        total, residual, _ = call(mine)
        found = np.asarray(total)
        expected = np.sqrt(np.sum(atoms.sizes(plan) * (found - 1) ** 2))
        np.testing.assert_allclose(float(residual), expected, rtol=1e-6)
        assert expected > 0.1
        assert len({found.tobytes() for found in comm.allgather(found)}) == 1
        # least squares of the messages at the parent that lacks two
        wait_for_all(comm)
        total, residual, _ = call(mine)
        np.testing.assert_allclose(total, np.ones(count), atol=1e-9)
        assert float(residual) < 1e-6
        wait_for_all(comm)
        seen = group.telemetry()
        lacks = plan.parents[late[0]] == RANK
        assert seen.approximate.tolist()[1:] == [False, lacks, False]


def not_enough_without(group):
    """Return two children of the root without which it has no exact sum. Without two other children, it may have an
    exact sum by luck.
    """
    plan = group.plan
    children = plan.coded_children(plan.root)
    for late in itertools.combinations(children, min(2, len(children))):
        answered = ~np.isin(children, late)
        if not plan.codings[plan.root].code.sufficient(answered):
            return late
    raise AssertionError("any two may be missing")


@several
@pytest.mark.parametrize("code", ["auto", "adaptive"])
def test_an_approximate_loss_does_not_get_into_gradients(comm, code):
    """The loss is 10,000 and gradients are 1, in a code with slices."""
    slices = 2 if code == "auto" else 1
    with opened(comm, SECONDS, "approximate", code=code, slices=slices) as group:
        late = not_enough_without(group)
        part = group.batch(60)
        batch = jnp.ones(60)[part.indices]
        step = jax.jit(
            jaxcoded.coded_value_and_grad(
                lambda w, x: jnp.stack([w @ jnp.ones(7) + 1e4] * len(x)),
                group,
                mean=False,
                residual=True,
            )
        )
        w = jnp.zeros(7)
        jax.block_until_ready(step(w, part.of(batch)))
        wait_for_all(comm)
        (value, grad), residual, _ = step(w, part.of(batch))
        rounding = 1e-6 * group.plan.amplification
        np.testing.assert_allclose(value, 60e4, rtol=rounding)
        np.testing.assert_allclose(grad, np.full(7, 60.0), rtol=rounding)
        wait_for_all(comm)
        if RANK in late:
            until_decided(group)
        (_, grad), residual, _ = step(w, part.of(batch))
        assert float(residual) > 0.1
        assert np.abs(np.asarray(grad) - 60).max() < 60 * 7
        wait_for_all(comm)


@several
def test_approximate_training_counts_what_came(comm):
    """With ``mean`` the loss is that of the examples whose gradients arrived."""
    with opened(comm, SECONDS, "approximate") as group:
        late = too_late(group)
        batch = jnp.arange(60.0)
        part = group.batch(60)
        step = jax.jit(
            jaxcoded.coded_value_and_grad(lambda w, x: w + 0 * x, group, residual=True)
        )
        jax.block_until_ready(step(2.0, part.of(batch[part.indices])))
        wait_for_all(comm)
        (value, grad), residual, _ = step(2.0, part.of(batch[part.indices]))
        assert (float(value), float(grad), float(residual) < 1e-6) == (2.0, 1.0, True)
        wait_for_all(comm)
        if RANK in late:
            until_decided(group)
        (value, grad), residual, _ = step(2.0, part.of(batch[part.indices]))
        np.testing.assert_allclose([float(value), float(grad)], [2.0, 1.0], rtol=1e-6)
        assert float(residual) > 0.1
        wait_for_all(comm)


@several
def test_the_mean_of_nothing_is_zero(comm):
    """No rank with data has come: no NaN gets into the parameters."""
    with opened(comm, SECONDS, "approximate") as group:
        root = group.plan.root
        batch = jnp.arange(60.0)
        part = group.batch(60)
        step = jax.jit(
            jaxcoded.coded_value_and_grad(lambda w, x: w * x, group, residual=True)
        )
        jax.block_until_ready(step(2.0, part.of(batch[part.indices])))
        wait_for_all(comm)
        if RANK != root:
            until_decided(group)
        (value, grad), residual, _ = step(2.0, part.of(batch[part.indices]))
        assert (float(value), float(grad)) == (0.0, 0.0)
        np.testing.assert_allclose(float(residual), 1.0, rtol=1e-6)
        wait_for_all(comm)


def test_numbers_of_numpy():
    asked = Deadline.parsed(3, "wait")
    for kind in (np.float16, np.float32, np.float64, np.int64, np.uint8):
        assert Deadline.parsed(kind(3), "wait") == asked
    for wrong in (np.bool_(True), np.float32("nan"), np.inf, np.float32(-1)):
        with pytest.raises(ValueError, match="deadline must be a number of seconds"):
            Deadline.parsed(wrong, "wait")


@pytest.mark.parametrize(
    ("deadline", "action"),
    [(0, "wait"), ("fast", "wait"), ("0.5x", "raise"), (True, "wait"), (None, "raise")],
)
def test_misuse(comm, deadline, action):
    with pytest.raises(ValueError, match="deadline"):
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0),
            options=jaxcoded.Options(deadline=deadline, on_deadline=action),
        )
    with pytest.raises(ValueError, match="on_deadline must be one of"):
        Deadline.parsed(1.0, "hope")
    with pytest.raises(ValueError, match="needs the engine"):
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0),
            transport="mpi4jax",
            options=jaxcoded.Options(deadline=1.0, on_deadline="raise"),
        )
