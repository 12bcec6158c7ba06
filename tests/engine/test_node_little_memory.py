"""Ranks have too little memory: no sum is wrong, and a decided round does not fail on
other ranks.
"""

import contextlib
import random
import resource

import pytest
from hypothesis import example, given
from schedules import many, seeds

_nodes = pytest.importorskip("_nodes", reason="built without the engine")

import simulation
from simulation import (
    ALERT,
    DESYNCHRONIZED,
    DONE,
    Call,
    Running,
    World,
    random_plan,
    random_world,
)
from test_node_memory import measurable
from test_node_sharing import World as SharingWorld
from test_node_sharing import world as sharing_world

from jaxcoded import Coded, Shared, make_plan

LITTLE = "rank 1 has too little memory for this call"


def world_of(plan, **options):
    script = [Call((("float64", 60),), seed) for seed in range(6)]
    world = World(plan, script, random.Random(0), chained=True, **options)
    world.snapshots = [1] * plan.size
    world.open = 1
    world.settle()
    return world


def pass_time(world):
    """Let time pass. Without memory nodes try again for ever."""
    for _ in range(20):
        world.sweep_all()
        world.clock += world.limits.orphan_seconds


# A root, ranks 1 and 2, and one rank below each of them.
FIVE = make_plan(5, Coded(parents=(-1, 0, 0, 1, 2), code={0: "fractional_repetition"}))


def assert_nobody_is_harmed(world, fails):
    """Check that rank 1 fails alone and enters no sum until it has the other ranks'
    state, even if rank 2 is late. Without the other ranks' state it fails the next
    round.
    """
    end = world.ends[1][2]
    assert end.outcome == DESYNCHRONIZED
    assert end.error == (
        f"{fails}, and round 2 failed at this rank alone, and others may have its result: call group.resync"
    )
    world.idle = {2}
    world.open = 3
    world.settle()
    world.idle.clear()
    world.open = 6
    world.settle()
    world.assert_done({0, 2, 3, 4})
    assert world.restored == {1: [3]}
    assert all(world.ends[1][number].outcome == DONE for number in range(3, 7))


def test_a_late_rank_without_memory_for_its_message():
    """The rank knows that the round is decided, but cannot keep the result."""
    world = world_of(FIVE)
    world.idle.add(1)
    world.short_of_memory.add(1)
    world.open = 2
    pass_time(world)
    assert world.done(0)
    world.idle.clear()
    world.submit(1)
    world.short_of_memory.clear()
    assert_nobody_is_harmed(world, LITTLE)


def submit_unmade(world, rank):
    """Submit a call for which there was too little memory."""
    node, call = world.nodes[rank], world.script[world.nodes[rank].next_round() - 1]
    running = world.running[rank] = Running(node.next_round(), call, [], [], 0)
    running.message = []
    none = "", "", True, True, True, [], [], [], 0
    node.submit(call.fingerprint, *none, lacks_memory=True)
    world.check_end(rank)


@pytest.mark.parametrize("here", [True, False])
def test_a_late_rank_without_memory_for_its_call(here):
    """The rank has its round's result in its history, or knows that it exists."""
    world = world_of(FIVE)
    world.idle.add(1)
    if not here:
        world.short_of_memory.add(1)
    world.open = 2
    pass_time(world)
    assert world.nodes[1].frontier() == 2 + here
    submit_unmade(world, 1)
    world.idle.clear()
    world.short_of_memory.clear()
    assert_nobody_is_harmed(world, LITTLE)


def test_a_call_without_memory_whose_round_is_not_decided_fails_it_everywhere():
    world = world_of(FIVE)
    world.open = 2
    world.idle = {0, 2}
    submit_unmade(world, 1)
    world.sweep_all()
    world.idle.clear()
    world.settle()
    for rank in range(5):
        assert world.ends[rank][2].error == f"CodedError: {LITTLE}"
    world.open = 6
    world.settle()
    for rank in range(5):
        assert all(world.ends[rank][r].outcome == DONE for r in range(3, 7))


def test_a_late_rank_without_memory_to_relay_fails_no_other_round():
    """The rank's own round was decided long ago, and the rank lacks the last part of
    its message.
    """
    plan = make_plan(
        9, Coded(parents=(-1, 0, 0, 0, 0, 1, 2, 3, 4), code={0: "progressive"})
    )
    assert plan.parts_above[1] > 1
    world = world_of(plan)
    world.open = 2
    world.begins_with[1, 2] = 1
    world.submit(1)
    world.idle.add(1)
    world.settle()
    world.short_of_memory.add(1)
    world.open = 4
    told = []
    deliver = world.deliver

    def watched(link):
        told.append((link[0], world.queues[link][0][0]))
        deliver(link)

    world.deliver = watched
    pass_time(world)
    assert (1, ALERT) not in told
    world.short_of_memory.clear()
    world.idle.clear()
    world.open = 6
    world.settle()
    world.assert_done()


def test_a_late_rank_without_memory_for_its_sum():
    """The rank has children, its round was decided long ago, and it still lacks the
    last part of its message.
    """
    plan = make_plan(
        9, Coded(parents=(-1, 0, 0, 0, 0, 1, 2, 3, 4), code={0: "progressive"})
    )
    world = world_of(plan)
    world.idle.add(1)
    world.open = 2
    world.settle()
    world.begins_with[1, 2] = 1
    world.short_of_memory.add(1)
    world.submit(1)
    world.sweep_all()
    world.short_of_memory.clear()
    world.idle.clear()
    world.open = 6
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("number", range(12))
def test_a_late_rank_without_memory_to_read_offers_accuses_nobody(number, monkeypatch):
    """The rank has the result, and lacks the last part of its message. A rank below it
    is even later.
    """
    parents = (-1, 0, 0, 0, 0, 1, 2, 3, 4, 1)
    plan = make_plan(10, Coded(parents=parents, code={0: "progressive"}))
    world = world_of(plan)
    world.idle.add(1)
    world.frozen.add(9)
    world.open = 2
    world.settle()
    world.begins_with[1, 2] = 1
    with contextlib.ExitStack() as stack:
        # the call begins with a look at the clock
        def now(_):
            if not seen:
                seen.append(stack.enter_context(_nodes.Failing(number)))
            return world.clock

        seen = []
        stack.enter_context(monkeypatch.context()).setattr(simulation.Wire, "now", now)
        try:
            world.submit(1)
        except MemoryError:
            world.nodes[1].lack_memory()
    assert seen
    world.frozen.clear()
    world.settle()
    world.idle.clear()
    world.open = 6
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("decided", [False, True])
def test_a_rank_without_memory_for_a_part_of_its_message(decided):
    """The rank's call does not wait for the part that the program passed and that was
    lost.
    """
    plan = make_plan(4, Coded(code="progressive"))
    assert plan.parts_above[1] > 1
    world = world_of(plan)
    world.open = 2
    world.begins_with[1, 2] = 1
    world.submit(1)
    world.idle.update({0, 1})
    world.settle()
    if decided:
        world.idle.remove(0)
        world.settle()
    world.nodes[1].lack_memory(True)
    world.check_end(1)
    world.idle.clear()
    world.settle()
    if decided:
        assert world.ends[1][2].outcome == DESYNCHRONIZED
        assert world.ends[1][2].error.startswith(LITTLE)
    else:
        for ends in world.ends:
            assert ends[2].error == f"CodedError: {LITTLE}"
    world.open = 6
    world.settle()
    for ends in world.ends:
        assert all(ends[number].outcome == DONE for number in range(3, 7))


def sharing_of_four(rounds):
    """Return a world of four ranks that share the work of the first round, and may call
    this round."""
    world = sharing_world(
        random.Random(1),
        size=4,
        work=Shared(replicas=2, blocks=3),
        rounds=rounds,
        handed_over=False,
        audited=False,
    )
    world.shared = {1}
    world.open = 1
    return world


def test_a_root_without_memory_does_not_revoke_the_others_sum():
    """Other ranks have computed all blocks while the root's program computes one."""
    world = sharing_of_four(rounds=2)
    world.idle.add(0)
    world.submit(0)
    world.settle()
    assert world.nodes[0].frontier() == 2 and world.running[0]
    world.nodes[0].lack_memory()
    world.idle.clear()
    world.settle()
    world.assert_done()


def test_a_root_that_loses_the_others_result_fails_the_next_round():
    """The root's call got no memory for the result, and cannot get the result any more."""
    world = sharing_of_four(rounds=3)
    world.idle.add(0)
    world.submit(0)
    world.settle()
    assert world.nodes[0].frontier() == 2 and world.running[0]
    world.nodes[0].lack_memory(True)
    world.check_end(0)
    text = "CodedError: rank 0 has too little memory for this call"
    assert world.ends[0][1].error == text
    world.idle.clear()
    world.open = 3
    world.settle()
    for rank, ends in enumerate(world.ends):
        assert rank == 0 or ends[1].outcome == DONE
        assert ends[2].error.startswith(f"{text}, round 1, whose result others have: ")
        assert ends[3].outcome == DONE


@many
@example(887926241)
# the rank that gets nothing learns this before the root does
@example(1879141004)
@given(seeds)
def test_ranks_short_of_memory_spoil_no_sum(seed):
    """Any ranks lack memory now and then; some are late or stopped."""
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, least=2, most=9), 12
    world = random_world(plan, rounds, rng, chained=True)
    world.rests = 0  # during rests nodes may not try again and again
    world.snapshots = [1] * plan.size
    for node in world.nodes:
        node.keep_state(1, world.state(1))
    for world.open in range(1, rounds - 1):
        for ranks in (world.frozen, world.idle, world.short_of_memory):
            ranks.clear()
            if rng.random() < 0.5:
                ranks.update(rng.sample(range(plan.size), rng.randint(0, plan.size)))
        for _ in range(rng.randint(0, 300)):
            world.step()
        world.short_of_memory.clear()
        if rng.random() < 0.5:
            world.frozen.clear()
            world.settle()
    world.frozen.clear()
    world.idle.clear()
    for world.open in (rounds - 1, rounds):
        world.settle()
    for rank, ends in enumerate(world.ends):
        for number, end in ends.items():
            assert end.outcome in (DONE, DESYNCHRONIZED) or (
                end.error.endswith("has too little memory for this call")
                or " (too little memory); " in end.error
            ), (rank, number, end)
        assert world.nodes[rank].next_round() == rounds + 1, world.describe(rank)
        # or the rank has continued after this round
        assert rounds not in ends or ends[rounds].outcome == DONE


class Tired(simulation.Wire):
    """A node that has too little memory for its first action after its call has ended."""

    tired = False

    def now(self):
        if self.tired and self.world.nodes[self.rank].outcome() == DONE:
            self.tired = False
            raise MemoryError
        return super().now()


@pytest.mark.parametrize("rank", [0, 1])
def test_too_little_memory_at_the_end_of_a_call(rank, monkeypatch):
    """The node does not confuse the next call with this one."""
    monkeypatch.setattr(simulation, "Wire", Tired)
    world = world_of(make_plan(3, Coded(stragglers=0)))
    world.open = 2
    world.idle.add(0)
    world.sweep_all()
    world.idle.clear()
    if rank == 0:
        world.submit(0)
    world.wires[rank].tired = True
    world.open = 6
    world.settle()
    assert not world.wires[rank].tired
    world.assert_done()


class Short(simulation.Wire):
    """A node that has too little memory for the next message."""

    short = False

    def send(self, to, message):
        if self.short:
            self.short = False
            raise MemoryError
        super().send(to, message)


@pytest.mark.parametrize("number", range(8))
def test_too_little_memory_to_hear_that_the_root_has_ended(number):
    """The rank learns it from the next message that says so, and its call ends."""
    world = world_of(make_plan(3, Coded(stragglers=0)))
    world.open = 1
    world.idle = {2}
    world.submit(1)
    world.advance(1)
    world.frozen = {0}
    with _nodes.Failing(number):
        try:
            world.nodes[1].root_has_ended()
        except MemoryError:
            world.nodes[1].lack_memory()
    world.nodes[1].root_has_ended()
    world.check_end(1)
    assert 1 in world.ends[1], world.nodes[1].waiting_for()


@pytest.mark.parametrize("number", range(8))
def test_too_little_memory_to_leave(number):
    """The rank leaves when it tries again, and no other rank waits for it."""
    world = world_of(make_plan(3, Coded(stragglers=0, parents=(-1, 0, 1))))
    node = world.nodes[1]
    with _nodes.Failing(number):
        try:
            node.leave("")
        except MemoryError:
            node.lack_memory()
    node.leave("")
    world.leaving.add(1)
    world.open = 1
    world.settle()
    assert all(1 in world.ends[rank] for rank in (0, 2)), world.describe(0)


def test_too_little_memory_to_say_that_a_program_computes_no_more(monkeypatch):
    """An exception has ended the program's loop over blocks. This call does not block
    the program's next call for ever.
    """
    monkeypatch.setattr(simulation, "Wire", Short)
    script = [Call((("float32", 5),), seed) for seed in range(2)]
    plan = make_plan(3, Shared(replicas=2, blocks=2))
    world = SharingWorld(plan, script, random.Random(0), shared={1, 2})
    world.open = 1
    world.submit(1)
    assert world.may_extend(1)  # the rank takes a block
    world.frozen.add(1)
    world.settle()
    world.assert_done([0, 2])
    world.frozen.clear()
    world.wires[1].short = True
    world.running[1].left = world.running[1].over = True
    world._turn(1, world.nodes[1].leave_call)
    assert not world.wires[1].short
    world.open = 2
    world.settle()
    for rank in range(3):
        assert 2 in world.ends[rank], world.describe(rank)


@pytest.mark.parametrize("hosts", [[0] * 4, list(range(4))])
def test_a_rank_without_memory_for_its_section_learns_that_the_round_failed(hosts):
    """The report of the failure comes after the order to form the section."""
    world = World(
        make_plan(4, Coded(fanout=3, stragglers=0)),
        [Call((("float64", 200),), seed) for seed in range(3)],
        random.Random(0),
        hosts=hosts,
        limits={"piece_bytes": 64, "announced_bytes": 128, "sections_from": 1},
    )
    world.short_of_memory = {1}
    world.open = 1
    pass_time(world)
    for ends in world.ends:
        assert ends[1].error == f"CodedError: {LITTLE}"
    world.short_of_memory.clear()
    world.open = 3
    world.settle()
    for ends in world.ends:
        assert (ends[2].outcome, ends[3].outcome) == (DONE, DONE)


@many
@given(seeds)
def test_too_little_memory_blocks_no_inbox(seed):
    """From some moment on one rank of a star always has too little memory for vectors.
    Sums are formed in sections, some of them sent within messages.
    """
    rng = random.Random(seed)
    size, stragglers = rng.randint(3, 6), rng.randint(0, 1)
    world = World(
        make_plan(size, Coded(fanout=size - 1, stragglers=stragglers)),
        [Call((("float64", rng.randint(20, 80)),), seed) for seed in range(3)],
        rng,
        hosts=rng.choice([[0] * size, list(range(size))]),
        inline=rng.choice([(0,), (64,), (0, 32, 1 << 20)]),
        limits={"piece_bytes": 16, "announced_bytes": 64, "sections_from": 1},
    )
    world.recovers = False
    world.open = 1
    for _ in range(rng.randint(0, 600)):
        world.step()
    victim = rng.randrange(size)
    world.short_of_memory = {victim}
    world.open = 3
    for _ in range(4):
        pass_time(world)
    if not world.nodes[victim].desynchronized():
        assert not any(world.running), world.describe(victim)


def test_too_little_memory_for_a_snapshot():
    """The rank that fetches the snapshot gets all later messages. It may ask again once
    it has enough memory.
    """
    if not measurable():
        pytest.skip("the allocator of a sanitizer ends the process")
    # a unique size, which memory freed by other tests does not fit
    state = bytes(range(251)) * (1 << 18)
    kept = []  # the first attempt may get memory that other tests have left unused
    for _ in range(2):
        world = World(make_plan(3, Coded(stragglers=0)), [], random.Random(0))
        kept.append(world)
        root, child = world.nodes[0], world.nodes[1]
        root.keep_state(5, state)
        child.ask_state()
        root.deliver(1, world.queues[1, 0].popleft())
        root.advance()
        message = world.queues[0, 1].popleft()
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + len(state) // 4, limits[1]))
        try:
            child.deliver(0, message)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        if said := child.take_news():
            break
    (words,) = said
    assert f"the snapshot of rank 0, {len(state)} bytes" in words
    assert child.state_missing()
    child.ask_state()
    child.deliver(0, message)
    while child.advance():
        pass
    assert (child.state_round(), child.state()) == (5, state)


def test_a_rank_without_memory_between_two_blocks():
    """The rank's call ends with the error, although its program does not come for
    another block.
    """
    world = sharing_of_four(rounds=2)
    world.submit(1)
    assert world.may_extend(1)  # rank 1 computes a block
    world.idle.add(1)
    world.nodes[1].lack_memory(True)
    world.settle()
    for ends in world.ends:
        assert ends[1].error == f"CodedError: {LITTLE}"
    world.running[1] = None
    world.idle.clear()
    world.open = 2
    world.settle()
    assert all(ends[2].outcome == DONE for ends in world.ends)


class Silent(simulation.Wire):
    """A node that has too little memory for this many reports of errors."""

    refuses = 0

    def send(self, to, message):
        if self.refuses and message[0] == simulation.ALERT:
            self.refuses -= 1
            raise MemoryError
        super().send(to, message)


@pytest.mark.parametrize("refuses", [1, 4, 9])
def test_too_little_memory_to_report_too_little_memory(refuses, monkeypatch):
    """The rank reports the lack of memory once it can. No report claims that the rank skipped."""
    monkeypatch.setattr(simulation, "Wire", Silent)
    plan = make_plan(3, Coded(stragglers=0, parents=(-1, 0, 1)))
    world = world_of(plan)
    world.open = 1
    world.settle()
    world.wires[2].refuses = refuses
    world.open = 2
    world.submit(2)
    for _ in range(refuses):  # the engine tries again as well
        with pytest.raises(MemoryError):
            world.nodes[2].lack_memory()
    world.nodes[2].lack_memory()
    world.settle()
    text = "CodedError: rank 2 has too little memory for this call"
    assert [ends[2].error for ends in world.ends] == [text] * 3


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_too_little_memory_for_the_copy_of_a_result(granted):
    """All ranks have decided the round: neither this round nor the next one fails."""
    plan = make_plan(9, Coded(parents=(-1, 0, 0, 1, 1, 1, 2, 2, 2), stragglers=0))
    limits = {"piece_bytes": 64, "announced_bytes": 128, "sections_from": 1}
    script = [simulation.Call((("float64", 200),), seed) for seed in range(4)]
    world = simulation.World(
        plan, script, random.Random(0), hosts=list(range(9)), limits=limits
    )
    world.open = 1
    world.settle()
    asked = []

    def has_memory(size):
        if world.nodes[0].frontier() < 3:
            return True
        asked.append(size)
        return len(asked) <= granted

    world.wires[3].has_memory = has_memory
    world.open = 2
    for _ in range(20):
        world.sweep_all()
        world.clock += 0.05
    assert len(asked) > granted
    del world.wires[3].has_memory
    world.open = 4
    world.settle()
    world.assert_done()


def test_a_root_without_memory_to_tell_of_its_failed_round(monkeypatch):
    """The round has failed on all ranks, so the next round does not fail, too."""
    monkeypatch.setattr(simulation, "Wire", Short)
    world = world_of(make_plan(3, Coded(stragglers=0)))
    world.open = 2
    for rank in (1, 2):
        world.submit(rank)
    world.idle = {0}
    world.sweep_all()
    world.wires[0].short = True
    submit_unmade(world, 0)
    assert not world.wires[0].short
    world.idle = set()
    world.open = 3
    world.settle()
    text = "CodedError: rank 0 has too little memory for this call"
    for ends in world.ends:
        assert ends[2].error == text
        assert ends[3].outcome == DONE
