"""Ranks that close their group, in any order."""

import contextlib
import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import example, given
from independent import random_missing
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

import simulation
from simulation import (
    BYE,
    DONE,
    FAILED,
    Call,
    World,
    comparing,
    erasable,
    random_plan,
    random_script,
    random_world,
    too_many,
)

from jaxcoded import Check, Coded, make_plan


def leave_at(world, rounds):
    """Let each rank leave after its number of rounds; return whether any did."""
    ready = [
        rank
        for rank in range(world.plan.size)
        if rank not in world.leaving | world.frozen | world.idle
        and world.running[rank] is None
        and world.nodes[rank].next_round() > rounds
    ]
    for rank in ready:
        world.leave(rank)
    return bool(ready)


def settle_and_leave(world, rounds):
    world.settle()
    while leave_at(world, rounds):
        world.settle()


@pytest.mark.slow
@many
# a rank had a round's result before it called the round, and left before its parent called
@example(2091250508)
@given(seeds)
def test_all_leave(seed):
    rng = random.Random(seed)
    plan, rounds = random_plan(rng), rng.randint(0, 5)
    world = random_world(plan, rounds, rng, **comparing(plan, rng))
    pace = [rng.choice([0.05, 1, 1]) for _ in range(plan.size)]
    for _ in range(rng.choice([0, 300, 2000])):
        world.step(pace)
        if rng.random() < 0.3:
            leave_at(world, rounds)
    settle_and_leave(world, rounds)
    world.assert_done()
    assert world.dead == set(range(plan.size))
    assert not any(
        "has closed the group" in text for news in world.news for text in news
    )


def test_a_rank_that_leaves_before_the_others_is_named():
    """Usually the program of that rank has done fewer steps than the programs of the
    other ranks.
    """
    plan = make_plan(4, Coded(fanout=3, stragglers=1))
    world = random_world(plan, 5, random.Random(0))
    world.open = 2
    world.settle()
    world.leave(3)
    world.open = 5
    world.settle()
    assert world.news[1:] == [[], [], []]
    (text,) = world.news[0]
    assert re.fullmatch(
        r"rank 3 has closed the group; the last call that is known is that of round 2, and "
        r"rounds up to \d are decided without it",
        text,
    )


def test_a_rank_that_leaves_out_its_last_call_is_named():
    """Its parent has closed the group before it."""
    plan = make_plan(4, Coded(fanout=3, stragglers=1))
    script = [Call((("float32", 6),), seed) for seed in range(5)]
    world = World(plan, script, random.Random(0))
    world.open = 4
    world.settle()
    world.idle.add(3)
    world.open = 5
    world.settle()
    for rank in range(4):
        world.leave(rank)
    world.settle()
    words = "rank 3 has closed the group; the last call that is known is that of round 4, and "
    assert world.news == [[words + "rounds up to 5 are decided without it"], [], [], []]


def test_a_rank_that_is_behind_and_advances_is_not_called_stuck():
    """It gets the results from its own memory or from its parent's."""
    plan = make_plan(4, Coded(fanout=3, stragglers=1))
    script = [Call((("float32", 6),), seed) for seed in range(30)]
    limits = {"stuck_seconds": 1e4}
    world = World(plan, script, random.Random(0), limits=limits)
    world.idle.add(3)
    world.open = 30
    world.settle()
    assert world.nodes[3].lag() == 30
    for _ in range(29):
        world.submit(3)
        for _ in range(4):
            world.sweep_all()
            world.clock += 1e3
    assert world.nodes[3].lag() == 1 and world.news == [[], [], [], []]
    for _ in range(3):
        world.clock += 1e4
        world.settle()
    (text,) = world.news[0]
    assert "busy or stuck at round 30" in text


@pytest.mark.parametrize("failing", [3, 6])
def test_a_rank_that_leaves_after_a_failure_is_named_with_it(failing):
    """The log of the rank's parent names the failure. So does the error of a call for
    which too few ranks are left.
    """
    plan = make_plan(13, Coded(fanout=3, stragglers=1))
    world = random_world(plan, 5, random.Random(0))
    world.open = 2
    world.settle()
    world.leave(failing, "ValueError: mine\nand more")
    world.open = 5
    world.settle()
    (words,) = world.news[plan.parents[failing]]
    assert words.startswith(f"rank {failing} failed: ValueError: mine; the last call")
    for rank in plan.coded_children(plan.parents[failing]):
        if rank != failing:
            world.leave(rank)
    world.settle()
    errors = {end.error for ends in world.ends for end in ends.values() if end.error}
    assert all(f"rank {failing} failed: ValueError: mine" in text for text in errors)


def test_a_rank_leaves_in_a_started_round():
    """The rank stays until it has the result, so that its call comes to an end."""
    world = World(
        make_plan(3, Coded(fanout=2, stragglers=0)),
        [Call((("float32", 6),), 1)],
        random.Random(0),
    )
    world.submit(1)
    world.advance(1)  # rank 1 offers its message
    world.leave(1)
    world.idle = {0}
    world.settle()
    assert not world.nodes[1].left()
    world.idle = set()
    world.settle()
    world.assert_done()
    assert world.nodes[1].left()


def test_a_root_that_ends_in_a_round():
    """The ranks that are in the round get an error."""
    world = World(
        make_plan(3, Coded(fanout=2, stragglers=0)),
        [Call((("float32", 6),), 1)],
        random.Random(0),
    )
    world.idle = {2}
    world.settle()
    world.leave(0)
    world.settle()
    assert not world.ends[0] and not world.ends[1]  # rank 2 may still call
    world.nodes[0].give_up()
    world.nodes[0].end()
    world.check_end(0)
    world.settle()
    error = "GroupMismatch: rank 0 closed the group before round 1 was over"
    assert [ends[1].error for ends in world.ends[:2]] == [error] * 2


@pytest.mark.slow
@many
@given(seeds)
def test_needed_ranks_stay(seed):
    """No rank ends before all ranks below it have ended, however late they are."""
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, 3, stragglers=(1, 2)), 5
    world = random_world(plan, rounds, rng)
    late = random_missing(plan, np.random.default_rng(seed))
    world.frozen |= late
    settle_and_leave(world, rounds)
    world.assert_done(set(range(plan.size)) - late)
    for rank in late:
        for above in world.ancestors[rank]:
            assert not world.nodes[above].left()
    world.frozen.clear()
    settle_and_leave(world, rounds)
    world.assert_done()
    assert world.dead == set(range(plan.size))


@many
@given(seeds)
def test_early_leavers_are_stragglers(seed):
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, 3, stragglers=(1, 2)), 8
    world = random_world(plan, rounds, rng, **comparing(plan, rng))
    early = random_missing(plan, np.random.default_rng(seed))
    world.open = rng.randint(0, 4)
    world.settle()
    for rank in early:
        world.leave(rank)
    world.open = rounds
    for _ in range(rng.choice([0, 300])):
        world.step()
    settle_and_leave(world, rounds)
    world.assert_done(set(range(plan.size)) - early)
    assert world.dead == set(range(plan.size))


@many
@given(seeds)
def test_too_many_leave(seed):
    """If too many ranks leave, the other ranks' calls fail with errors that name the ranks that have left."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    world = random_world(plan, 6, rng)
    early = [plan.root] if rng.random() < 0.3 else too_many(plan, rng, for_good=True)
    rounds = world.open = rng.randint(0, 3)
    world.settle()
    if rng.random() < 0.3:  # in the middle of a round of the other ranks
        world.idle |= set(early)
        world.open = 6
        world.settle()
        world.idle.clear()
        assert max(world.results, default=0) == rounds
    for rank in early:
        world.leave(rank)
    world.open = 6
    world.settle()
    for rank in set(range(plan.size)) - set(early):
        assert set(world.ends[rank]) == set(range(1, 7)), world.describe(rank)
        for round in range(rounds + 1, 7):
            end = world.ends[rank][round]
            assert end.outcome == FAILED
            assert end.error.startswith("GroupMismatch: ")
            assert end.error.endswith("closed the group")
            assert any(f" {r}" in end.error for r in early)
    settle_and_leave(world, 6)
    assert world.dead == set(range(plan.size))


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("down", ["allreduce", "reduce"])
def test_the_root_leaves_first(far, down):
    plan = make_plan(13, Coded(fanout=3))
    script = [Call((("float32", 30),), seed, down) for seed in range(6)]
    world = World(
        plan,
        script,
        random.Random(0),
        hosts=list(range(13)) if far else None,
        limits={"piece_bytes": 32},
    )
    world.open = 3
    world.settle()
    world.assert_done()
    world.leave(0)
    assert not world.nodes[0].left()
    world.open = 6
    world.settle()
    for rank in range(1, 13):
        for round in (1, 2, 3):
            assert world.ends[rank][round].outcome == DONE
        for round in (4, 5, 6):
            end = world.ends[rank][round]
            assert end.outcome == FAILED, world.describe(rank)
            assert "rank 0 closed the group" in end.error
    settle_and_leave(world, 6)
    assert world.dead == set(range(13))


class Short(simulation.Wire):
    """A node that has too little memory for some messages after it has left."""

    short = 0

    def send(self, to, message):
        if self.short and message[0] == BYE:
            self.short -= 1
            raise MemoryError
        super().send(to, message)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_too_little_memory_for_leaving(failures, monkeypatch):
    """In a later turn, a rank with children announces that it leaves, and that it is
    gone.
    """
    monkeypatch.setattr(simulation, "Wire", Short)
    script = [Call((("float32", 30),), seed) for seed in range(3)]
    world = World(make_plan(7, Coded(fanout=2)), script, random.Random(0))
    world.settle()
    world.wires[1].short = failures
    with pytest.raises(MemoryError):
        world.leave(1)
    for _ in range(failures):
        with contextlib.suppress(MemoryError):
            world.nodes[1].advance()
    world.wires[1].short = failures
    for child in world.plan.tree.children[1]:
        world.leave(child)
    for _ in range(failures):
        with contextlib.suppress(MemoryError):
            world.settle()
    settle_and_leave(world, 3)
    assert not world.wires[1].short
    assert world.dead == set(range(7))


def test_give_up():
    """A rank that gives up the ranks below it names them."""
    plan = make_plan(13, Coded(fanout=3))
    script = [Call((("float32", 30),), seed) for seed in range(3)]
    world = World(plan, script, random.Random(0))
    world.frozen.add(4)
    settle_and_leave(world, 3)
    assert not world.nodes[1].left()
    world.nodes[1].give_up()
    world.settle()
    assert world.nodes[1].absent() == [4]
    assert world.nodes[0].absent() == [4]
    assert world.dead == set(range(13)) - {4}


@pytest.mark.parametrize("early", [True, False])
def test_no_rank_waits_for_a_dead_leaf(early):
    """The death of the leaf is known before its parent leaves, or afterwards."""
    script = [Call((("float32", 30),), seed) for seed in range(3)]
    world = World(make_plan(7, Coded(fanout=2)), script, random.Random(0))
    world.frozen.update({2, 3})
    if early:
        world.nodes[1].lost(3)
    settle_and_leave(world, 3)
    if not early:
        assert not world.nodes[1].left()
        world.nodes[1].lost(3)
        world.settle()
    assert world.nodes[1].left()
    assert world.nodes[0].absent() == [3]
    # ranks below a dead parent may be on their way
    world.nodes[0].lost(2)
    assert not world.nodes[0].left()


@pytest.mark.slow
@many
@given(seeds)
def test_no_rank_waits_for_ever(seed):
    """Any rank may leave at any moment: all calls end, with the sum or with the reason."""
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, 2), 6
    script = random_script(plan, rng, rounds)
    for i, call in enumerate(script):
        if rng.random() < 0.2:
            erased = frozenset(erasable(plan, rng))
            script[i] = dataclasses.replace(call, erased=erased)
        elif rng.random() < 0.2:
            script[i] = dataclasses.replace(
                call, kind=rng.choice(["reduce", "broadcast"])
            )
    world = random_world(plan, rounds, rng, script=script, **comparing(plan, rng))
    leavers = rng.sample(range(plan.size), rng.randint(1, plan.size))
    at = {rank: rng.randint(1, rounds) for rank in leavers}
    for _ in range(rng.choice([100, 1000, 3000])):
        world.step()
        for rank in leavers:
            idle = rank not in world.leaving and world.running[rank] is None
            if idle and world.nodes[rank].next_round() >= at[rank]:
                world.leave(rank)
    settle_and_leave(world, rounds)
    for rank in range(plan.size):
        assert world.running[rank] is None, world.describe(rank)
        last = rounds if rank not in leavers else 0
        assert set(range(1, last + 1)) <= set(world.ends[rank])
        for end in world.ends[rank].values():
            assert end.outcome == DONE or re.fullmatch(
                r"GroupMismatch: rank \d+ .*called .* closed the group", end.error
            )
    for rank in leavers:
        if rank not in world.leaving:
            world.leave(rank)
    settle_and_leave(world, 0)
    assert world.dead == set(range(plan.size))


@pytest.mark.parametrize("compared", [False, True])
def test_a_rank_leaves_between_the_parts_of_its_message(compared):
    """The rank's first parts contribute to the first pieces of its parent's sum, and to no later pieces."""
    plan = make_plan(7, Coded(fanout=2, code="progressive"))
    leaf = plan.tree.children[1][0]
    assert plan.parts_above[leaf] == 4 and plan.parts_above[1] == 2
    check = Check("raise", wait="all") if compared else None
    call = Call((("float64", 8),), 0)
    world = World(plan, [call], random.Random(0), hosts=list(range(7)), check=check)
    world.begins_with[leaf, 1] = 2
    world.submit(leaf)
    while not world.offered[leaf, 1]:
        world.step()
    assert world.offered[leaf, 1] == [2]
    world.leave(leaf)
    world.settle()
    for rank in set(range(7)) - {leaf}:
        end = world.ends[rank][1]
        assert end.outcome == DONE or f"rank {leaf} closed the group" in end.error
        assert not compared or end.outcome == FAILED
