"""The telemetry of ranks, and functions that use it."""

import ctypes
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from marks import SIZE, engine_only, mpi4jax_only, redundant, several
from mpi4py import MPI
from reference import BATCH, assert_sum, contribution, per_example
from together import SLOWNESS, assert_odd_one_out, wait_for_all, wait_until

import jaxcoded
from jaxcoded.group.telemetry import SLOWEST, Telemetry

RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(4096)
LATE = 0.1


@pytest.fixture
def fresh(comm, transport):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(
            stragglers=1 if SIZE > 2 else 0, fanout=3 if SIZE == 13 else None
        ),
        transport=transport,
    ) as group:
        yield group


def leaf(group):
    """Return the last leaf among the root's children, or below them."""
    return [r for r in range(group.size) if not group.plan.coded_children(r)][-1]


@engine_only
@redundant
def test_which_ranks_were_late_and_by_how_much(comm, fresh):
    group, late = fresh, leaf(fresh)
    parent = group.plan.parents[late]
    x = np.asarray(contribution(group, VECTOR))
    for number in range(6):
        wait_for_all(comm)
        if RANK == late and number % 2:
            time.sleep(LATE)
        assert_sum(group, uncounted.allreduce(x, group), VECTOR)
    wait_for_all(comm)
    seen = group.telemetry()
    assert seen.rounds.tolist() == [1, 2, 3, 4, 5, 6]
    assert not (seen.failed | seen.skipped | seen.approximate).any()
    assert (seen.ended >= seen.started).all()
    assert (seen.payload == x.nbytes).all()
    assert np.isnan(seen.work[0])
    np.testing.assert_allclose(seen.work[1:], (seen.started[1:] - seen.ended[:-1]))
    if RANK == parent:
        column = seen.children.tolist().index(late)
        odd = seen.lateness[1::2, column]
        assert (odd > LATE / 2).all()
        assert not seen.used[1::2, column].any()
        assert f"child {late} was too late in" in seen.summary()
    if seen.children.size:
        assert (seen.decided >= seen.started).all()
        assert (seen.used.sum(axis=1) <= len(seen.children)).all()
        assert all(by in {RANK, *seen.children} for by in seen.decided_by)
        # the deciding rank was in time
        assert ((seen.lateness <= 0) | ~seen.used).all()
    else:
        assert np.isnan(seen.decided).all()


NAP = 2e-3  # seconds in a block


@engine_only
@several
@pytest.mark.parametrize("in_jit", [True, False])
def test_which_rank_computed_which_blocks(comm, transport, in_jit):
    steps, batch = 4, 24
    x = np.arange(float(batch))

    def losses(w, x):
        def nap(x):
            time.sleep(NAP)
            return x

        x = jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return w * x

    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Shared(replicas=min(2, comm.size - 1), blocks=3),
        transport=transport,
    ) as group:
        placement = group.plan.placement
        part = group.batch(batch)
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=False))
        mine = []
        for _ in range(steps):
            if in_jit:
                jax.block_until_ready(step(1.0, part.of(x[part.indices])))
                continue
            total, count = np.zeros(1), 0
            with group.blocks(batch) as blocks:
                for block in blocks:
                    time.sleep(NAP)
                    total += x[block.indices].sum()
                    count += 1
            uncounted.allreduce(total, group)
            mine.append(count)
        wait_for_all(comm)
        seen = group.telemetry()
    shared = seen.shared
    assert shared.sum() == steps
    assert seen.loop.tolist() == (shared & (not in_jit)).tolist()
    assert not seen.blocks[~shared].any() and not seen.busy[~shared].any()
    assert (seen.busy >= seen.blocks * NAP).all()
    if not in_jit:
        assert seen.blocks[shared].tolist() == mine
    own = len(placement.owned(RANK))
    # the work before the first call is unknown
    if own and seen.blocks[seen.work >= 0].any():
        assert seen.step_times[RANK] >= NAP * own
    assert (seen.divided == (shared & (group.plan.root == RANK))).all()
    computed = comm.bcast(seen.computed, group.plan.root)[shared]
    assert (computed[..., :2].sum(axis=(1, 2)) == len(placement.holders)).all()
    assert (computed[:, RANK, 0] <= own).all()
    assert (computed[:, RANK, :2].sum(axis=1) <= seen.blocks[shared]).all()


@engine_only
@several
def test_links_count_what_comes(comm, fresh):
    x = np.asarray(contribution(fresh, VECTOR))
    rounds = 10
    for _ in range(rounds):
        uncounted.allreduce(x, fresh)
    wait_for_all(comm)
    seen = fresh.telemetry()
    size = dict(zip(seen.peers.tolist(), seen.link_bytes.tolist()))
    if RANK != fresh.plan.root:  # the result, from one rank above or another
        assert sum(size.values()) >= rounds * x.nbytes
        assert (seen.link_seconds > 0).any()
    used = int(seen.used.sum())
    below = sum(size.get(child, 0) for child in fresh.plan.coded_children(RANK))
    assert used * x.nbytes <= below <= (used + rounds) * x.nbytes + 2**16


@engine_only
@redundant
def test_sums_in_sections(comm, transport):
    """All messages are used, but the root receives only some of them: other ranks form parts of the sum."""
    rounds, gradients = 5, per_example(1 << 16)
    wanted = jaxcoded.Options(sections_from=1, piece_bytes=16 << 10)
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(fanout=SIZE - 1, stragglers=0),
        transport=transport,
        options=wanted,
    ) as group:
        x = np.asarray(contribution(group, gradients))
        for _ in range(rounds):
            assert_sum(group, uncounted.allreduce(x, group), gradients)
        wait_for_all(comm)
        seen = group.telemetry()
        assert seen.rounds.tolist() == [*range(1, rounds + 1)]
        assert (seen.payload == x.nbytes).all() and not seen.failed.any()
        assert seen.used.all()
        came = seen.link_bytes.sum()
        if RANK == group.plan.root:
            assert rounds * x.nbytes / 2 < came < (SIZE - 1) * rounds * x.nbytes
            assert (seen.decided >= seen.started).all()
        else:
            siblings = [peer not in (RANK, group.plan.root) for peer in seen.peers]
            assert seen.link_bytes[siblings].any()


@engine_only
@redundant
def test_speeds_and_replan(comm, fresh, tmp_path):
    """All ranks detect a slow rank and give it less data."""
    group, slow = fresh, leaf(fresh)
    for _ in range(30):
        time.sleep((0.3 if RANK == slow else 0.03) * SLOWNESS)
        uncounted.allreduce(
            np.asarray(contribution(group, VECTOR)), group, skip=group.lag() > 0
        )
    wait_for_all(comm)
    time.sleep(1.1)  # ranks report step times once a second
    wait_for_all(comm)
    for _ in range(group.plan.tree.depth + 1):
        uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
        wait_for_all(comm)
        time.sleep(1.1)
        wait_for_all(comm)
    seen = group.telemetry()
    if RANK == group.plan.root:
        workers = [r for r in range(SIZE) if r not in (slow, RANK)]
        assert SLOWEST <= seen.speeds[slow] < 0.6
        assert np.median(seen.speeds[workers]) > 0.6
        assert f"rank {slow} is slow" in seen.summary()
    # the other ranks' estimates do not count
    other = group.replan(seen.speeds if RANK == group.plan.root else np.ones(SIZE))
    assert group.closed
    assert not other.closed
    assert len(set(comm.allgather(other.plan.to_json()))) == 1
    assert 0 < other.plan.load_of(slow) < group.plan.load_of(slow)
    assert_sum(
        other,
        uncounted.allreduce(np.asarray(contribution(other, VECTOR)), other),
        VECTOR,
    )
    call = jax.jit(lambda x: uncounted.coded_allreduce(x, other, residual=True))
    total, residual, _ = call(contribution(other, VECTOR))
    assert_sum(other, np.asarray(total), VECTOR)
    assert float(residual) < 1e-6
    with pytest.raises(jaxcoded.GroupClosed):
        uncounted.allreduce(VECTOR[0], group)
    # the telemetry can be saved
    seen.save(tmp_path / "seen.npz")
    back = Telemetry.load(tmp_path / "seen.npz")
    assert back.summary() == seen.summary()
    np.testing.assert_array_equal(back.lateness, seen.lateness)
    wait_for_all(comm)
    other.close()


@redundant
def test_replan_with_a_late_rank(comm, transport):
    """A rank that is rounds behind replans when it reaches that call, and its old data
    never enters the new codes.
    """
    group = jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=1, fanout=3 if SIZE == 13 else None),
        transport=transport,
    )
    late = leaf(group)
    speeds = np.where(np.arange(SIZE) == late, 0.25, 1.0)
    wait_for_all(comm)
    if RANK == late:
        time.sleep(0.5)
    for _ in range(3):
        for _ in range(3):
            total = uncounted.coded_allreduce(contribution(group, VECTOR), group)
            assert_sum(group, np.asarray(total), VECTOR)
        group = group.replan(speeds)
        speeds = speeds[::-1].copy()
    part = group.batch(BATCH)
    step = jax.jit(
        jaxcoded.coded_value_and_grad(
            lambda w, x: w * x, group, residual=True, mean=False
        )
    )
    (value, grad), residual, _ = step(
        2.0, part.of(jnp.arange(float(BATCH))[part.indices])
    )
    exact = BATCH * (BATCH - 1) / 2
    np.testing.assert_allclose([value, grad], [2 * exact, exact], rtol=1e-6)
    assert float(residual) < 1e-6
    wait_for_all(comm)
    group.close()


def test_a_block_closes_the_replanned_group(comm, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        first = group
        for _ in range(2):
            group = group.replan(np.ones(SIZE))
    assert first.closed
    assert group.closed


def test_a_block_of_a_replanned_group_hands_on_errors(comm, transport):
    with pytest.raises(KeyError, match="mine"):  # noqa: SIM117
        with jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=0), transport=transport
        ) as group:
            group = group.replan(np.ones(SIZE))
            raise KeyError("mine")
    assert group.closed
    with pytest.raises(KeyError, match="mine"):  # noqa: SIM117
        with jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=0), transport=transport
        ) as group:
            group.close()
            raise KeyError("mine")


def test_replan_misuse(comm, transport):
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        for wrong in (np.ones(SIZE + 1), 1.0):
            with pytest.raises(
                ValueError, match=f"speeds must have shape \\({SIZE},\\)"
            ):
                group.replan(wrong)
        for wrong in (np.zeros(SIZE), np.full(SIZE, np.nan)):
            with pytest.raises(ValueError, match="speeds must be positive and finite"):
                group.replan(wrong)
        total = uncounted.coded_allreduce(contribution(group, VECTOR), group)
        assert_sum(group, np.asarray(total), VECTOR)


@several
def test_replan_meets_another_call(comm, fresh, transport):
    """If one rank replans while the other ranks make another call, all ranks get an
    error, and the group does not change. If the sum is decided before that rank calls,
    the other ranks get the error in the next round.
    """

    def summed():
        return uncounted.coded_allreduce(contribution(fresh, VECTOR), fresh)

    def first():
        return fresh.replan(np.ones(SIZE)) if RANK == SIZE - 1 else summed()

    def check(total):
        assert_sum(fresh, total, VECTOR)

    if transport == "engine":
        words = "coded_allreduce of float64[4096]", "replan"
        assert_odd_one_out(comm, [first, summed, summed], SIZE - 1, *words, check)
        return
    words = "called different things in the same round"
    with pytest.raises(
        (jaxcoded.GroupMismatch, jax.errors.JaxRuntimeError), match=words
    ):
        jax.block_until_ready(first())
    jaxcoded.effects_barrier()
    wait_for_all(comm)
    check(np.asarray(summed()))


@engine_only
@redundant
def test_a_rank_that_missed_a_replan_cannot_spoil_a_sum(comm, fresh):
    """The rank's data belong to the old plan. All ranks continue once they have the same plan."""
    group, odd = fresh, leaf(fresh)
    speeds = np.where(np.arange(SIZE) == odd, 0.25, 1.0)
    if RANK == odd:
        with pytest.raises(ValueError, match="speeds must have shape"):
            group.replan(1.0)
        with pytest.raises(
            jaxcoded.GroupMismatch, match="after a ValueError in replan"
        ):
            uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
    else:
        group = group.replan(speeds)
    for _ in range(4):
        wait_for_all(comm)
        time.sleep(0.05)
        try:
            total = uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
        except jaxcoded.GroupMismatch:
            pass
        else:
            assert RANK != odd
            assert_sum(group, total, VECTOR)
    wait_for_all(comm)
    time.sleep(0.05)
    while True:
        try:
            group = group.replan(speeds)
            break
        except jaxcoded.GroupMismatch:  # the error of the previous sum
            wait_for_all(comm)
    wait_for_all(comm)
    assert len(set(comm.allgather(group.plan.to_json()))) == 1
    for _ in range(3):
        total = uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
        assert_sum(group, total, VECTOR)
    wait_for_all(comm)
    group.close()


@engine_only
def test_hook(comm, fresh):
    """A hook sees every round once, on a separate thread, and may raise or call the
    group.
    """
    seen, threads = [], set()

    def look(record):
        threads.add(threading.current_thread())
        seen.append(record)
        fresh.lag()
        if record.number == 2:
            raise ValueError("not of interest")
        if record.number == 3:
            raise SystemExit

    fresh.on_round(look)
    for _ in range(5):
        uncounted.allreduce(np.asarray(contribution(fresh, VECTOR)), fresh)
    wait_until(lambda: len(seen) == 5)
    assert [each.number for each in seen] == [1, 2, 3, 4, 5]
    assert not any(each.failed or each.skipped for each in seen)
    assert all(each.ended >= each.started for each in seen)
    assert threads.isdisjoint({threading.main_thread()})
    wait_for_all(comm)


@engine_only
def test_hooks_end(comm, transport):
    """Hooks end with the group, or when another hook replaces them, and no thread is
    left.
    """

    def threads():
        return sum(thread.name == "jaxcoded rounds" for thread in threading.enumerate())

    wait_until(lambda: threads() == 0)
    seen, others = [], []
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        x = np.ones(3)
        group.on_round(seen.append)
        uncounted.allreduce(x, group)
        group.on_round(others.append)
        wait_until(lambda: threads() == 1)
        uncounted.allreduce(x, group)
        group = group.replan(np.ones(SIZE))
        uncounted.allreduce(x, group)
        wait_for_all(comm)
    wait_until(lambda: threads() == 0)
    assert [record.number for record in seen] == [1]
    assert [record.number for record in others] == [2, 3, 4]


@engine_only
@several
def test_a_hook_holds_up_no_round(comm, transport, tmp_path):
    """A hook delays no round, even while it holds Python's lock: the engine must not wait for this lock."""
    path = comm.bcast(str(tmp_path / "over"))
    x = jnp.ones(3)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        holds = group.plan.root == RANK
        group.on_round(lambda record: None)
        uncounted.coded_allreduce(x, group).block_until_ready()
        if holds:
            os.mkfifo(path)
        wait_for_all(comm)
        handles = [uncounted.coded_allreduce_start(x, group) for _ in range(3)]
        jax.block_until_ready(handles)
        if holds:  # until another rank has all results
            fifo = os.open(path, os.O_RDWR)
            assert ctypes.PyDLL(None).read(fifo, ctypes.create_string_buffer(1), 1) == 1
            os.close(fifo)
        for handle in handles:
            jaxcoded.coded_allreduce_done(handle).block_until_ready()
        if comm.rank == (group.plan.root + 1) % SIZE:
            with open(path, "wb") as fifo:
                fifo.write(b"1")
        wait_for_all(comm)


@mpi4jax_only
def test_without_the_engine(fresh):
    with pytest.raises(NotImplementedError, match="engine"):
        fresh.telemetry()
    with pytest.raises(NotImplementedError, match="engine"):
        fresh.on_round(print)


@engine_only
@redundant
@pytest.mark.parametrize("kept", [1, 3])
def test_few_rounds_are_remembered(comm, transport, kept):
    """Children that are rounds ahead of a late parent displace no other entries."""
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=1, fanout=3 if SIZE == 13 else None),
        transport=transport,
        options=jaxcoded.Options(telemetry_rounds=kept),
    ) as group:
        late = max(r for r in range(1, SIZE) if group.plan.parents[r] == 0)
        x = np.asarray(contribution(group, VECTOR))
        for rounds in (10, 20):
            wait_for_all(comm)
            if RANK == late:
                wait_until(lambda: group.lag() == 10)
            for _ in range(10):
                assert_sum(group, uncounted.allreduce(x, group), VECTOR)
            wait_for_all(comm)
            seen = group.telemetry()
            assert seen.rounds.tolist() == list(range(rounds - kept + 1, rounds + 1))
            assert (seen.ended >= seen.started).all()
            assert not np.isnan(seen.arrived[seen.used]).any()


@engine_only
def test_turned_off(comm, transport):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0),
        transport=transport,
        options=jaxcoded.Options(telemetry_rounds=0),
    ) as group:
        uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
        seen = group.telemetry()
        assert len(seen.rounds) == 0
        assert seen.speeds.tolist() == [1.0] * SIZE
        assert "has not called" in seen.summary()
