"""Queues stay bounded: messages to an inactive rank, and results kept for it."""

import random

import numpy as np
import pytest
from cases import more

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import DESYNCHRONIZED, Call, World, Zeros

from jaxcoded import Check, Coded, make_plan

ROUNDS = 200
COUNT = 128  # float32 numbers


def script(rounds=ROUNDS):
    return [Call((("float32", COUNT),), seed) for seed in range(rounds)]


def entry_bytes():
    """Return the bytes of a result in a rank's history while one child still needs it."""
    world = World(make_plan(3, Coded()), script(1), random.Random(0))
    world.frozen.add(2)
    world.sweep_all()
    return world.nodes[0].history_bytes()


ENTRY = entry_bytes()


def played(world, rounds, *, slow=0.0):
    """Play rounds, and let the world settle after each. In some rounds time passes
    before all ranks have called.
    """
    for world.open in range(1, rounds + 1):
        if world.rng.random() < slow:
            late = world.rng.randrange(world.plan.size)
            resting = late not in world.idle
            world.idle.add(late)
            for _ in range(6):
                world.sweep_all()
                world.clock += world.limits.orphan_seconds * world.rng.choice(
                    [1, 10, 30]
                )
            if resting:
                world.idle.discard(late)
        world.sweep_all()
        world.clock += world.rng.choice([0, 0, 0.01, 1])
        world.sweep_all()
        yield world.open


TREES = {
    "star": ([-1] + [0] * 7, {3}, {5}),
    "13": ([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], {1}, {7}),
    "both inner": ([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5], {1}, {8}),
    "one below the other": ([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], {1, 3}, {6}),
}


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("links", ["near", "far", more("inline")])
def test_messages_to_a_stopped_rank(tree, links):
    parents, frozen, idle = TREES[tree]
    stragglers = 2 if tree == "star" else 1
    plan = make_plan(len(parents), Coded(parents=parents, stragglers=stragglers))
    world = World(
        plan,
        script(),
        random.Random(1),
        hosts=list(range(plan.size)) if links == "far" else None,
        inline=(1 << 20 if links == "inline" else 0,),
        limits={"piece_bytes": 256},
    )
    for _ in played(world, 3):
        pass
    world.frozen |= frozen
    world.idle |= idle
    for round in played(world, ROUNDS, slow=0.2):
        world.settle() if round % 50 == 0 else None
    world.settle()
    world.assert_done(set(range(plan.size)) - frozen - idle)
    assert max(world.most_waiting.values()) <= 24, world.most_waiting.most_common(3)
    # requests for their pieces do not accumulate either
    assert len(world.requests) <= 24 * len(frozen)
    world.frozen.clear()
    world.idle.clear()
    world.settle()
    world.assert_done()
    assert max(world.most_waiting.values()) <= 24, world.most_waiting.most_common(3)


class NotFinite(Zeros):
    """Rank 7 contributes NaN."""

    def own(self, plan, rank):
        return [v + (np.nan if rank == 7 else 0) for v in super().own(plan, rank)]


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_messages_about_nan_to_a_stopped_rank(action):
    """The stopped rank gets the first and the latest of the alerts of each round."""
    parents, _, _ = TREES["one below the other"]
    plan = make_plan(len(parents), Coded(parents=parents))
    calls = [NotFinite((("float32", COUNT),), seed) for seed in range(ROUNDS)]
    world = World(plan, calls, random.Random(1), check=Check(action))
    for _ in played(world, 3):
        pass
    world.frozen.add(1)
    for _ in played(world, ROUNDS):
        world.clock += 1
        world.sweep_all()
    count = len(world.news[0])
    assert max(world.most_waiting.values()) <= 24, world.most_waiting.most_common(3)
    world.frozen.clear()
    world.settle()
    assert len(world.news[0]) <= count + 5
    assert {node.next_round() for node in world.nodes} == {ROUNDS + 1}


@pytest.mark.parametrize("leaver", [3, 7])
def test_messages_about_a_rank_that_has_left(leaver):
    """The children of the rank continue, and its parent is stopped."""
    parents, frozen, _ = TREES["one below the other"]
    plan = make_plan(len(parents), Coded(parents=parents))
    world = World(plan, script(), random.Random(1), limits={"piece_bytes": 256})
    for _ in played(world, 3):
        pass
    world.frozen |= frozen - {3}
    world.leave(leaver)
    for _ in played(world, ROUNDS):
        world.clock += 1
        world.sweep_all()
    world.assert_done(set(range(plan.size)) - frozen - {leaver})
    assert max(world.most_waiting.values()) <= 24, world.most_waiting.most_common(3)


@pytest.mark.parametrize("far", [False, True])
def test_history_without_stragglers(far):
    plan = make_plan(13, Coded(fanout=3))
    hosts = list(range(13)) if far else None
    world = World(plan, script(60), random.Random(0), hosts=hosts)
    for _ in range(3_000):  # in random order
        world.step()
        assert all(node.history_bytes() <= 8 * ENTRY for node in world.nodes)
    world = World(plan, script(60), random.Random(0), hosts=hosts)
    for _ in played(world, 60):
        # the last round's result, until all ranks are known to have it
        assert all(node.history_bytes() <= 2 * ENTRY for node in world.nodes)
    world.assert_done()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "idle"])
@pytest.mark.parametrize("late", [1, more(4)])
@pytest.mark.parametrize(
    ("budget", "rounds", "most", "kept"),
    [
        (10 * ENTRY, 3, 1 << 30, 10),  # as many results as the budget holds
        (2 * ENTRY, 7, 1 << 30, 7),  # at least this number of rounds
        (2 * ENTRY, 50, 12 * ENTRY, 12),  # as many of these rounds as `most` holds
        (0, 0, 0, 1),
    ],
)
def test_history_for_a_late_rank(kind, late, budget, rounds, most, kept):
    plan = make_plan(13, Coded(fanout=3))
    limits = {
        "history_bytes": budget,
        "history_rounds": rounds,
        "history_most": most,
        "ahead_bytes": 4 * ENTRY,
        "piece_bytes": 256,
    }
    world = World(plan, script(), random.Random(0), limits=limits)
    getattr(world, kind).add(late)
    line = world.ancestors[late]
    below = {rank for rank in range(13) if late in world.ancestors[rank]}
    memory = []
    for _ in played(world, ROUNDS):
        held = [node.history_bytes() for node in world.nodes]
        assert max(held) <= (max(kept, 4) + 1) * ENTRY
        if late == 4:  # a leaf keeps the results that it will need itself
            assert held[late] <= 4 * ENTRY
        if world.open > 20:  # ranks above the late rank keep the promised results
            assert all(held[rank] >= kept * ENTRY for rank in line)
        for rank in set(range(13)) - set(line) - below - {late}:
            assert held[rank] <= 2 * ENTRY
        memory.append(sum(node.memory_bytes() for node in world.nodes))
    assert max(memory[100:]) <= max(memory[:100])
    world.assert_done(set(range(13)) - below - {late})


def test_history_of_a_parent_that_has_not_got_all_of_its_message():
    """The parent relays results meanwhile. At the end no rank keeps the result of the parent's own call."""
    rounds = 60
    plan = make_plan(
        9, Coded(parents=(-1, 0, 0, 0, 0, 1, 2, 3, 4), code={0: "progressive"})
    )
    limits = {"history_bytes": 0, "history_rounds": 4, "history_most": 1 << 20}
    calls = [
        Call((("float32", 16 * plan.padding_multiple),), seed) for seed in range(rounds)
    ]
    world = World(plan, calls, random.Random(1), limits=limits)
    world.snapshots = [1] * plan.size
    world.open = 2
    world.settle()
    world.open = 3
    world.begins_with[1, 3] = 1
    world.submit(1)
    world.idle.add(1)
    held = []
    for world.open in range(3, rounds + 1):
        world.settle()
        held.append(world.nodes[1].history_bytes())
    assert max(held[20:]) <= max(held[:20])
    assert world.ends[1][3].outcome == DESYNCHRONIZED
    world.idle.clear()
    world.open = rounds
    world.settle()
    assert world.nodes[1].next_round() == rounds + 1


def test_messages_for_a_stopped_parent_of_a_late_rank():
    """The rank calls only rounds that are decided, so it offers its parent nothing. Its
    step times do not pile up at the parent.
    """
    plan = make_plan(
        6, Coded(parents=(-1, 0, 0, 1, 3, 3), code={0: "fractional_repetition"})
    )
    calls = [Zeros((("float32", 128),), seed) for seed in range(40)]
    world = World(plan, calls, random.Random(1), limits={"piece_bytes": 256})
    for world.open in range(1, 41):
        if world.open == 4:
            world.frozen.add(1)
        if world.open >= 4:
            world.idle = {3}
            for _ in range(8):
                world.sweep_all()
                world.clock += 10 * world.limits.orphan_seconds
            world.idle = set()
        world.sweep_all()
        world.clock += 2 * world.limits.step_times_seconds
        world.sweep_all()
    world.assert_done(set(range(6)) - {1})
    assert len(world.queues[3, 1]) <= 3


def test_memory_for_long_vectors():
    """Rounds reuse the same memory, and need little memory."""
    plan = make_plan(13, Coded(fanout=3))
    size = 4 << 20
    calls = [Zeros((("float32", size // 4),), seed) for seed in range(8)]
    world = World(plan, calls, random.Random(0), limits={"history_bytes": 3 * size})
    used = []
    for _ in played(world, len(calls)):
        used.append([node.memory_bytes() for node in world.nodes])
    world.assert_done()
    assert max(map(max, used[4:])) <= max(map(max, used[:4]))
    # a sum, a result and three children's messages, and as much memory kept for later rounds
    assert max(used[-1]) <= 6 * size


@pytest.mark.parametrize(
    ("code", "stragglers", "used"), [("uncoded", 0, 3), ("grouped(load=3)", 1, 1)]
)
def test_a_turn_sums_a_bounded_part(code, stragglers, used):
    """Other groups and requests need not wait for the sum of a whole vector."""
    plan = make_plan(4, Coded(stragglers=stragglers, code=code))
    limits = {"piece_bytes": 256, "announced_bytes": 1024}
    world = World(
        plan, [Call((("float32", 8192),), 1)], random.Random(1), limits=limits
    )
    root = world.nodes[plan.root]
    world.frozen.add(plan.root)  # until all offers have come
    world.sweep_all()
    world.submit(plan.root)
    for link in [link for link in world.queues if link[1] == plan.root]:
        while world.queues[link]:
            world.deliver(link)
    turns, more = [0], True
    while more:
        more = world.advance(plan.root)
        turns.append(root.fetched_bytes())
    assert turns[-1] == used * 4 * 8192
    assert np.diff(turns).max() == used * 1024


def test_a_turn_fetches_a_bounded_part_of_a_snapshot():
    plan = make_plan(3, Coded(stragglers=0))
    limits = {"piece_bytes": 256, "announced_bytes": 1024}
    world = World(plan, script(1), random.Random(1), limits=limits)
    root, child = world.nodes[0], world.nodes[1]
    root.keep_state(5, bytes(range(256)) * 64)
    child.ask_state()
    root.deliver(1, world.queues[1, 0].popleft())
    root.advance()
    child.deliver(0, world.queues[0, 1].popleft())
    turns = 0
    while child.advance():
        turns += 1
        assert len(world.fetched) <= 4 * turns
        assert not child.state_round()
    assert child.state() == bytes(range(256)) * 64
    assert turns == 15


def test_questions_for_a_state_to_stopped_ranks():
    """A rank that is later than the history reaches asks stopped ranks for a state, for days."""
    plan = make_plan(3, Coded(stragglers=0, parents=(-1, 0, 1)))
    world = World(plan, [Call((("float64", 6),), 1)], random.Random(0))
    world.settle()
    world.frozen = {0, 1}
    world.nodes[2].ask_state()
    for _ in range(3 * 24 * 60):
        world.clock += 60.0
        world.advance(2)
    waiting = {link: len(queue) for link, queue in world.queues.items() if queue}
    assert waiting and max(waiting.values()) <= 24, waiting


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("broadcasts", [0, 3])
def test_long_results_that_punctual_ranks_still_fetch(broadcasts, hosts):
    """The root has begun the next rounds. A broadcast waits for no rank."""
    kinds = ["broadcast"] * broadcasts + ["allreduce"] * (6 - broadcasts)
    script = [Call((("float32", 3000),), seed, kind) for seed, kind in enumerate(kinds)]
    most = {"piece_bytes": 256, "history_bytes": 256, "history_most": 20_000}
    plan = make_plan(4, Coded(stragglers=0))
    for seed in range(10):
        world = World(plan, script, random.Random(seed), hosts=hosts, limits=most)
        for _ in range(3000):
            world.step()
        world.settle()
        world.assert_done()
