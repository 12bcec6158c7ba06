"""Rounds with shared work fail on some ranks alone, or ranks do not come. The sum holds the blocks that the root has
granted, and waiting ranks learn which ranks they wait for.
"""

import random

import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

import test_node_sharing
from simulation import ASK, DESYNCHRONIZED, DONE, FAILED, Call
from test_node_deadline import SECONDS, limits
from test_node_sharing import HERE, PartialSum, Sum
from test_node_silent import TICK, ended, pass_time

from jaxcoded import Shared, make_plan

SEGMENTS = (("float64", 5),)


class World(test_node_sharing.World):
    """Ranks that keep a snapshot before each step: at the start, and after each call
    whose sum is not in the next call.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.keep_state(range(self.plan.size), 1)

    def keep_state(self, ranks, number):
        for rank in ranks:
            self.nodes[rank].keep_state(number, self.state(number))

    def check_end(self, rank):
        running = self.running[rank]
        super().check_end(rank)
        if running is None or self.running[rank] is not None:
            return
        followed = running.round in self.shared and not running.call.segments
        if not followed and self.ends[rank][running.round].outcome != DESYNCHRONIZED:
            self.keep_state([rank], running.round + 1)


def handed_over():
    """Return four ranks with a block each, whose sum follows."""
    plan = make_plan(4, Shared(replicas=1, blocks=1))
    script = [Call((), 0) if r % 2 else Sum(SEGMENTS, r) for r in range(1, 7)]
    return World(
        plan,
        script,
        random.Random(0),
        shared={1, 3, 5},
        inline=(1 << 20,),
        limits=limits("raise"),
    )


def computed_by_others(world):
    """Let all ranks compute their blocks; the reports of the other ranks are on their
    way to the root.
    """
    world.open = 1
    for rank in range(world.plan.size):
        world.submit(rank)
    while world.may_extend(0):
        world.extend(0)
    world.advance(0)
    world.frozen.add(0)
    world.sweep_all()


def all_fail_alone(world):
    """Stop the root; all other ranks fail the round of blocks and are in the next
    one."""
    world.frozen.add(0)
    pass_time(world, ended(world, {1, 2, 3}, 1))
    world.open = 2
    world.sweep_all()
    world.frozen.clear()


def assert_goes_on(world):
    world.open = 6
    world.settle()
    for ends in world.ends:
        assert [ends[r].outcome for r in range(3, 7)] == [DONE] * 4


def test_a_rank_in_the_next_round_is_absent():
    """The rank has failed the round alone. If the root decided the round, the rank
    would lack its blocks.
    """
    world = handed_over()
    computed_by_others(world)
    all_fail_alone(world)
    world.settle()
    for ends in world.ends:
        assert ends[1].outcome == FAILED
        assert ends[1].error.startswith("DeadlineExceeded: round 1 ")
    assert not any(world.restored.values())
    assert_goes_on(world)


def test_blocks_lost_by_a_snapshot_are_not_summed_as_zero():
    """All ranks have reported that they are present. The root decides the round of
    blocks, and the other ranks return to this round without their blocks.
    """
    world = handed_over()
    computed_by_others(world)
    world.frozen.clear()
    asked = [(0, rank) for rank in (1, 2, 3)]
    while not all(ASK in [m[0] for m in world.queues[link]] for link in asked):
        for link in [link for link in world.queues if link[1] == 0]:
            while world.queues[link]:
                world.deliver(link)
        world.advance(0)
    world.frozen.add(0)
    world.sweep_all()
    for rank in (1, 2, 3):
        assert HERE in [message[0] for message in world.queues[rank, 0]]
    all_fail_alone(world)
    world.settle()
    assert world.restored == {rank: [1] for rank in (1, 2, 3)}
    assert world.nodes[0].division() == [[0], [1], [2], [3]]
    for ends in world.ends:
        assert ends[1].outcome == DONE
        assert ends[2].error.startswith("TooManyErasures: round 2: rank 0 cannot")
        assert ends[2].error.endswith(": repeat the step")
        assert "skip=True" not in ends[2].error
    assert_goes_on(world)


@pytest.mark.parametrize("deadline", [{"deadline_rounds": 3.0}, {}])
def test_a_rank_that_leaves_with_its_blocks(deadline):
    """The other ranks continue without these blocks, even if there is no deadline
    yet."""
    plan = make_plan(3, Shared(replicas=1, blocks=1))
    script = [Call((), 0), PartialSum(SEGMENTS, 1)]
    its = limits("approximate")
    if deadline:
        its = its | deadline | {"deadline_seconds": 0}
    world = World(plan, script, random.Random(0), shared={1}, limits=its)
    world.open = 1
    world.settle()
    world.open = 2
    world.leave(1)
    for _ in range(4):
        world.settle()
        world.clock += SECONDS
    for rank in (0, 2):
        assert world.ends[rank][2].outcome == DONE


def shared(size, action, **more):
    plan = make_plan(size, Shared(replicas=1, blocks=2))
    script = [Call(SEGMENTS, seed) for seed in range(3)]
    return World(
        plan, script, random.Random(0), shared={1, 2, 3}, limits=limits(action), **more
    )


def test_blocks_of_programs_that_stay_away_are_waited_for_by_name():
    world = shared(4, "wait")
    world.idle = {1, 2}
    assert any(set(ranks) == world.idle for ranks in world.plan.placement.holders)
    for _ in range(300):
        world.sweep_all()
        world.clock += TICK
    root = world.nodes[0]
    assert root.overdue()
    assert "rank 0 waits for ranks 1, 2, which have 1 block to" in root.waiting_for()
    world.idle.clear()
    world.settle()
    world.assert_done()


def test_blocks_of_programs_that_stay_away_are_missing_at_the_deadline():
    world = shared(4, "raise")
    world.open = 1
    world.idle = {1, 2}
    pass_time(world, ended(world, {0, 3}, 1))
    world.idle.clear()
    world.open = 3
    world.settle()
    for ends in world.ends:
        text = "DeadlineExceeded: round 1 was not decided within 5 s: rank 0 waits for ranks 1, 2, "
        assert ends[1].error.startswith(text)
        assert (ends[2].outcome, ends[3].outcome) == (DONE, DONE)


def test_blocks_of_ranks_that_failed_alone_are_missing_at_the_deadline():
    world = shared(3, "raise")
    world.open = 1
    world.frozen = {0}
    pass_time(world, ended(world, {1, 2}, 1))
    world.open = 3
    world.sweep_all()
    world.frozen.clear()
    world.settle()
    for ends in world.ends:
        assert ends[1].error.startswith("DeadlineExceeded: round 1 was not decided")
        assert (ends[2].outcome, ends[3].outcome) == (DONE, DONE)


def drawn(rng, size, rounds):
    plan = make_plan(
        size, Shared(replicas=rng.randint(1, size - 1), blocks=rng.randint(1, 3))
    )
    if rng.random() < 0.5:
        blocks = set(range(1, rounds, 2))
        script = [
            Call((), 0) if r in blocks else Sum(SEGMENTS, r)
            for r in range(1, rounds + 1)
        ]
    else:
        blocks = {r for r in range(1, rounds + 1) if rng.random() < 0.8}
        script = [Call(SEGMENTS, seed) for seed in range(rounds)]
    return World(
        plan,
        script,
        rng,
        shared=blocks,
        hosts=[rng.randint(0, 1) for _ in range(size)],
        inline=rng.choice([(0,), (0, 1 << 20), (1 << 20,)]),
        unreadable=rng.choice([0, 0.3]),
        in_place=rng.choice([0, 0.5, 1]),
        limits=limits("raise", piece_bytes=rng.choice([16, 1 << 18]))
        | test_node_sharing.in_sections(rng),
    )


@many
@given(seeds)
def test_a_rank_that_fails_alone_never_spoils_shared_work(seed):
    """Any ranks stop and continue, even the root, and programs stay away."""
    rng = random.Random(seed)
    rounds = 8
    size = rng.randint(2, 5)
    world = drawn(rng, size, rounds)
    world.open = 0
    while world.open < rounds - 2:
        world.open = min(world.open + rng.randint(1, 2), rounds - 2)
        for ranks in (world.frozen, world.idle):
            ranks.clear()
            if rng.random() < 0.5:
                ranks.update(rng.sample(range(size), rng.randint(0, size)))
        if rng.random() < 0.5:
            world.frozen.add(world.plan.root)
        for _ in range(rng.randint(1, 200)):
            world.step()
        for _ in range(rng.choice([0, 3, 20])):
            for _ in range(
                10
            ):  # ranks whose programs stay away may pass blocks back and forth
                world.sweep()
            world.clock += rng.choice([TICK, 1, SECONDS])
        if rng.random() < 0.3:
            world.frozen.clear()
            world.idle.clear()
            world.settle()
    world.frozen.clear()
    world.idle.clear()
    for world.open in (rounds - 2, rounds):
        world.settle()
    for rank in range(size):
        for number, end in world.ends[rank].items():
            assert end.outcome in (DONE, DESYNCHRONIZED) or (
                end.error.startswith(("DeadlineExceeded: ", "TooManyErasures: "))
                or "after group.blocks failed" in end.error
            ), (rank, number, end)
        assert world.nodes[rank].next_round() == rounds + 1, world.describe(rank)
        # or the rank has continued after this round
        end = world.ends[rank].get(rounds)
        assert end is None or end.outcome == DONE, world.describe(rank)
