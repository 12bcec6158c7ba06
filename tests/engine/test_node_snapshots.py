"""Ranks that their ancestors' history no longer reaches continue from a snapshot."""

import random
import re

import numpy as np
import pytest
from hypothesis import given
from independent import random_missing
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DESYNCHRONIZED,
    DONE,
    RESULT,
    Call,
    World,
    Zeros,
    comparing,
    random_plan,
    random_world,
)

from jaxcoded import Coded, make_plan

SHORT = {"history_bytes": 0, "history_rounds": 4}


def thirteen(rounds, **more):
    plan = make_plan(13, Coded(fanout=3))
    script = [Call((("float32", 40),), seed) for seed in range(rounds)]
    limits = SHORT | {"piece_bytes": 32}
    return World(plan, script, random.Random(0), limits=limits, **more)


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 4])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("size", [0, 1, 33, 1000])
def test_a_snapshot_brings_a_late_rank_back(late, far, size):
    world = thirteen(40, hosts=list(range(13)) if far else None)
    world.snapshots = [3] * 13
    world.snapshot_bytes = size
    world.recovers = False
    world.open = 5
    world.settle()
    world.frozen.add(late)
    for world.open in range(6, 31):  # slowly, so that ranks below the late rank keep up
        world.settle()
    world.assert_done(set(range(13)) - {late})

    world.frozen.clear()
    world.settle()
    node = world.nodes[late]
    assert world.ends[late][6].outcome == DESYNCHRONIZED
    assert node.desynchronized()
    # all its calls end like this until it has a snapshot
    world.submit(late)
    assert world.ends[late][6].outcome == DESYNCHRONIZED
    world.settle()
    assert node.desynchronized()

    world.recovers = True
    world.settle()
    assert world.restored == {late: [30]}
    assert world.ends[late][30].outcome == DONE
    world.open = 40
    world.settle()
    for rank in range(13):
        assert all(world.ends[rank][r].outcome == DONE for r in range(30, 41)), rank


@pytest.mark.slow
@many
@given(seeds)
def test_while_the_others_continue(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 3, stragglers=(1, 2))
    rounds = 40
    late = random_missing(plan, np.random.default_rng(seed))
    limits = {
        "history_bytes": rng.choice([0, 0, 1000]),
        "history_rounds": rng.randint(4, 8),
        "ahead_bytes": rng.choice([0, 1 << 20]),
    }
    options = comparing(plan, rng) | {"chained": True}
    world = random_world(plan, rounds, rng, limits=limits, **options)
    world.snapshots = [0 if rng.random() < 0.2 else rng.randint(1, 4)] * plan.size
    world.snapshots[plan.root] = rng.randint(1, 4)
    world.snapshot_bytes = rng.choice([0, 10, 300])
    for world.open in range(1, rounds + 1, 3):
        if rng.random() < 0.3:
            world.frozen.clear()
            world.idle.clear()
        elif rng.random() < 0.5:
            for rank in late:
                rng.choice([world.frozen, world.idle]).add(rank)
        for _ in range(rng.choice([0, 20, 200])):
            world.step()
        world.settle()
        world.assert_done(set(range(plan.size)) - below(plan, late))
    world.frozen.clear()
    world.idle.clear()
    world.open = rounds
    world.settle()
    for rank in range(plan.size):
        # all its rounds, or all rounds since its last snapshot
        first = max(world.restored[rank], default=1)
        for round in range(first, rounds + 1):
            assert world.ends[rank][round].outcome == DONE, world.describe(rank)


def below(plan, ranks):
    """Return these ranks and all below them: a frozen rank keeps results that its
    ancestors have lost.
    """
    out = set(ranks)
    for rank in plan.tree.order:
        if plan.tree.parents[rank] in out:
            out.add(rank)
    return out


@pytest.mark.parametrize("far", [False, True])
def test_no_rank_has_a_snapshot(far):
    world = thirteen(40, hosts=list(range(13)) if far else None)
    world.open = 3
    world.settle()
    world.frozen.add(4)
    world.open = 30
    world.settle()
    world.frozen.clear()
    world.settle()
    node = world.nodes[4]
    assert node.desynchronized()
    assert node.state_missing()
    assert node.state_round() == 0
    # this does not affect the other ranks
    world.open = 40
    world.settle()
    world.assert_done(set(range(13)) - {4})


def test_the_nearest_ancestor_with_a_snapshot_is_asked():
    world = thirteen(40)
    world.snapshots[0] = 3  # only the root keeps snapshots
    world.open = 3
    world.settle()
    world.frozen.add(4)
    world.open = 30
    world.settle()
    world.frozen.clear()
    world.settle()
    assert world.restored == {4: [30]}
    asked = [source for a, source, what, *_ in world.fetched if (a, what) == (4, 2)]
    assert set(asked) == {0}


def test_an_ancestor_that_does_not_answer_is_passed_over():
    world = thirteen(40, hosts=list(range(13)))
    world.snapshots = [3] * 13
    world.open = 3
    world.settle()
    world.frozen.add(4)
    world.open = 30
    world.settle()
    world.recovers = False
    world.frozen.clear()
    world.settle()
    world.frozen.add(1)
    world.recovers = True
    world.settle()
    assert world.restored == {4: [30]}
    world.frozen.clear()
    world.open = 40
    world.settle()
    assert world.nodes[4].next_round() == 41


@pytest.mark.parametrize("far", [False, True])
def test_a_snapshot_that_is_replaced_while_it_is_fetched(far):
    world = thirteen(40, hosts=list(range(13)) if far else None)
    world.snapshots = [3] * 13
    world.snapshot_bytes = 3_000  # many pieces
    world.open = 3
    world.settle()
    world.frozen.add(1)
    for world.open in range(4, 31):
        world.settle()
    world.frozen.clear()
    for moment in range(400):
        world.step()
        if moment % 40 == 0:
            world.open = min(world.open + 1, 40)
    world.open = 40
    world.settle()
    assert world.nodes[1].next_round() == 41
    assert not world.nodes[1].desynchronized()


def test_a_long_stop_does_not_make_a_rank_wait_for_a_snapshot():
    """The rank was stopped in a call; then its parent is stopped."""
    world = thirteen(30)
    world.snapshots = [3] * 13
    world.recovers = False
    world.open = 1
    world.settle()
    world.idle.add(0)
    world.open = 2
    world.sweep_all()
    world.idle.clear()
    world.frozen.add(4)
    world.clock += 600
    world.open = 30
    world.sweep_all()
    world.frozen.clear()
    world.sweep_all()
    assert world.nodes[4].desynchronized()
    world.frozen.add(1)
    world.recovers = True
    since = world.clock
    while not world.restored[4]:
        world.sweep_all()
        world.clock += world.limits.orphan_seconds / 5
        assert world.clock - since < 20 * world.limits.orphan_seconds
    assert world.restored == {4: [30]}


@pytest.mark.parametrize("far", [False, True])
def test_two_snapshots_of_one_round(far):
    """The second snapshot replaces the first one while the first one is fetched."""
    world = chain(2, far)
    old, new = (random.Random(seed).randbytes(200) for seed in range(2))
    source, reader = world.nodes
    source.keep_state(1, old)
    fetched = []

    def fetch(asker, *piece):
        fetched.append(piece)
        if len(fetched) == 3:
            source.keep_state(1, new)
        return type(world).fetch(world, asker, *piece)

    world.fetch = fetch
    reader.ask_state()
    for _ in range(30):
        world.sweep()
    assert len(fetched) > 3
    assert (reader.state_round(), reader.state()) == (1, new)


@pytest.mark.parametrize("far", [False, True])
def test_snapshots_of_a_rank_that_has_gone_back(far):
    world = chain(3, far)
    for rank, round in ((0, 5), (1, 9)):
        world.nodes[rank].keep_state(round, world.state(round))
    back, reader = world.nodes[1:]
    back.ask_state()
    for _ in range(10):
        world.sweep()
    assert (back.state_round(), back.state()) == (5, world.state(5))
    back.resume()
    back.keep_state(7, world.state(7))
    reader.ask_state()
    for _ in range(30):
        world.sweep()
    assert (reader.state_round(), reader.state()) == (7, world.state(7))


@pytest.mark.parametrize("kept", [set(), {0}, {1}, {0, 1}])
@pytest.mark.parametrize("fetched", [None, 0, 2])
def test_no_time_passes_for_a_snapshot_of_a_dead_rank(kept, fetched):
    """The rank dies before it is asked, before it answers, or after some pieces."""
    world = chain(3, far=True)
    for rank in kept:
        world.nodes[rank].keep_state(1, world.state(1))
    reader = world.nodes[2]
    if fetched is None:
        world.kill(1, known=True)
    reader.ask_state()
    if fetched:
        while 1 in kept and len(world.fetched) < fetched:
            world.step()
    if fetched is not None:
        world.kill(1, known=True)
    world.sweep_all()
    if 0 in kept:
        assert (reader.state_round(), reader.state()) == (1, world.state(1))
    else:
        assert reader.state_missing()


def chain(ranks, far):
    """Return a chain of ranks that have not called anything."""
    world = World(
        make_plan(ranks, Coded(parents=list(range(-1, ranks - 1)), stragglers=0)),
        [Call((("float32", 4),), 0)],
        random.Random(0),
        hosts=list(range(ranks)) if far else None,
        limits={"piece_bytes": 32},
    )
    world.open = 0
    return world


def test_a_rank_that_has_gone_back_no_longer_has_what_it_announced():
    """Rank 3 is late and hands a part of a result on to rank 4. Then its program calls,
    and continues from a snapshot, past that round. Rank 4 gets the whole result from a
    rank further up, although that rank is further away.
    """
    history, step = 30, 0.02
    plan = make_plan(
        7,
        Coded(
            parents=(-1, 0, 0, 1, 3, 1, 1),
            stragglers=1,
            code={0: "fractional_repetition"},
        ),
    )
    world = World(
        plan,
        [Zeros((("float32", 64),), seed) for seed in range(3 * history)],
        random.Random(0),
        hosts=list(range(7)),
        limits={
            "piece_bytes": 32,
            "announced_bytes": 32,
            "sections_from": 0,
            "history_bytes": 0,
            "history_rounds": history,
        },
    )
    world.snapshots = [1] * plan.size
    world.open = 0

    def play(rounds, turns=10):
        for _ in range(rounds):
            world.open += 1
            for _ in range(turns):
                world.sweep()
                world.clock += step / turns

    play(3)
    world.idle = {3}
    play(history + 6)
    world.open = cut = world.open + 1
    while not re.search(f"rank 3 has [1-7] of {cut}", world.nodes[4].status()):
        for rank in (0, 1, 2, 5, 6, 3, 4):
            if world.may_call(rank):
                world.submit(rank)
            for link in world.queues:
                if link[1] == rank and world.queues[link]:
                    world.deliver(link)
            for request in [it for it in world.requests if it[1] == rank][:1]:
                world.requests.remove(request)
                world.answer(request)
            for answer in [it for it in world.answers if it[0] == rank][:1]:
                world.answers.remove(answer)
                world.arrive(answer)
            world.advance(rank)
    # the rest of that result reaches rank 3 only after its program has continued
    ask, mine = world._ask, lambda it: it[0] == 3 and it[2:4] == (RESULT, cut)
    held = [it for it in world.requests if mine(it)]
    world.requests = [it for it in world.requests if not mine(it)]
    world.answers = [it for it in world.answers if not mine(it)]
    world._ask = lambda it: held.append(it) if mine(it) else ask(it)
    play(3)
    world.idle = set()
    while not world.restored.get(3):
        play(1)
    world._ask = ask
    for request in held:
        ask(request)
    play(history // 2)
    assert world.nodes[4].next_round() > world.open - 5
    assert world.ends[4][cut].outcome == DONE


def test_a_rank_that_offers_a_round_again_gets_an_answer():
    """Two ranks of a chain have too little memory for the result of round 3. The upper
    rank goes back to round 5. The lower rank goes back to round 3, whose result it gets
    from the root. In round 5 the lower rank offers nothing before its parent has
    answered.
    """
    plan = make_plan(4, Coded(parents=[-1, 0, 1, 2], stragglers=0))
    script = [Call((("float64", 8),), seed) for seed in range(8)]
    script[3] = Call((("float64", 8),), 3, why_not="refused: round 4")
    world = World(
        plan,
        script,
        random.Random(0),
        inline=(1 << 20,),
        limits={"history_rounds": 100},
    )
    world.snapshots = [1] * 4
    for node in world.nodes:
        node.keep_state(1, world.state(1))
    world.open = 2
    world.settle()

    def deliver(source, to):
        while world.queues[source, to]:
            world.deliver((source, to))

    def lack_memory(rank):
        world.short_of_memory = {rank}
        world.advance(rank)
        world.short_of_memory = set()
        assert world.ends[rank][3].outcome == DESYNCHRONIZED

    world.open = 3
    for rank in (3, 2, 1, 0):
        world.submit(rank)
    for rank in (3, 2, 1):
        world.advance(rank)
        deliver(rank, rank - 1)
        world.advance(rank - 1)
    world.open = 4  # round 4 fails
    world.submit(0)
    world.advance(0)
    assert world.nodes[0].next_round() == 5
    for _ in range(2):  # the call in words, and the result
        world.deliver((0, 1))
    lack_memory(1)
    world.advance(1)
    deliver(1, 2)
    lack_memory(2)
    world.recover(2)
    deliver(2, 1)
    world.advance(1)
    deliver(1, 2)
    world.advance(2)
    world.recover(2)
    deliver(0, 1)
    for _ in range(3):
        world.advance(1)
    deliver(1, 2)
    world.recover(1)
    deliver(1, 0)
    world.advance(0)
    deliver(0, 1)
    world.advance(1)
    world.recover(1)
    assert world.restored == {1: [5], 2: [3]}
    world.open = 8
    for _ in range(20):
        world.step()
    world.settle()
    assert [node.next_round() for node in world.nodes] == [9] * 4
