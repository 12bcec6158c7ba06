"""Rounds fail on some ranks alone, because the root does not answer, although it may have decided these rounds. Later
contributions of a rank that failed alone belong to another state, and enter no sum.
"""

import random

import pytest
from hypothesis import example, given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

import test_node_sharing
from simulation import (
    DESYNCHRONIZED,
    DONE,
    FAILED,
    Call,
    World,
    random_plan,
    random_world,
)
from test_node_deadline import SECONDS, limits
from test_node_silent import TICK, ended, pass_time

from jaxcoded import Check, Coded, Shared, make_plan

ROUNDS = 12


def outcomes(world, rank):
    return {number: end.outcome for number, end in sorted(world.ends[rank].items())}


def failed_alone(parents, **options):
    """Stop the root in round 2, with the needed messages in its mailbox. All other
    ranks fail that round and call the next one.
    """
    plan = make_plan(len(parents), Coded(parents=parents, stragglers=0, code="uncoded"))
    world = World(
        plan,
        [Call((("float64", 8),), seed) for seed in range(6)],
        random.Random(0),
        inline=(1 << 20,),
        limits=limits("raise"),
        chained=True,
        **options,
    )
    world.snapshots = [1] * plan.size
    world.open = 1
    world.settle()
    others = set(range(1, plan.size))
    world.open = 2
    world.idle |= others
    world.sweep_all()  # the root has called
    world.idle.clear()
    world.frozen.add(0)
    pass_time(world, ended(world, others, 2))
    world.open = 3
    world.sweep_all()
    world.frozen.clear()
    return world, others


TREES = {"star": [-1, 0, 0, 0], "tree": [-1, 0, 0, 1, 1, 2, 2], "chain": [-1, 0, 1, 2]}


@pytest.mark.parametrize("tree", TREES)
def test_a_rank_that_failed_alone_enters_no_sum_until_it_resyncs(tree):
    world, others = failed_alone(TREES[tree])
    world.recovers = False
    world.sweep_all()
    assert outcomes(world, 0) == {1: DONE, 2: DONE}
    # deeper ranks learn it when they ask
    pass_time(world, ended(world, others, 3))
    for rank in others:
        assert outcomes(world, rank) == {1: DONE, 2: FAILED, 3: DESYNCHRONIZED}
        words = "round 2 failed at this rank alone, and others may have its result"
        assert world.ends[rank][3].error.startswith(words)


def test_a_rank_that_failed_alone_learns_of_the_death_before_the_last_result():
    """No resync can follow: the rank's next call fails like the calls of all other
    ranks.
    """
    world, others = failed_alone(TREES["star"])
    world.recovers = False
    for rank in others:
        world.nodes[rank].lost(0)
    world.sweep_all()  # the result that the root had sent
    for rank in others:
        assert world.nodes[rank].desynchronized()
        assert outcomes(world, rank) == {1: DONE, 2: FAILED, 3: FAILED}
        words = "round 3 cannot be decided: the root, rank 0, is dead: go on with group.recovered()"
        assert world.ends[rank][3].error == f"CodedError: {words}"


@pytest.mark.parametrize("tree", TREES)
def test_a_rank_that_failed_alone_continues_in_the_roots_round(tree):
    """No later snapshot can come, as the root waits for this rank."""
    world, others = failed_alone(TREES[tree])
    world.open = 6
    world.settle()
    for rank in others:
        assert outcomes(world, rank) == {1: DONE, 2: FAILED} | dict.fromkeys(
            range(3, 7), DONE
        )
        assert world.restored[rank] == [3]
    assert outcomes(world, 0) == dict.fromkeys(range(1, 7), DONE)


def test_a_snapshot_of_a_state_that_others_lack_is_not_handed_on():
    """Rank 1 keeps a snapshot after the round that failed on rank 1 alone, and rank 3
    asks for this snapshot.
    """
    world, _ = failed_alone(TREES["chain"])
    world.recovers = False
    node = world.nodes[3]
    node.ask_state()
    while not (node.state_round() or node.state_missing()):
        world.sweep()
        world.clock += 0.1
    world.check_state(3, node.state_round())


def test_a_failure_in_a_later_round_does_not_end_the_roots_round():
    """Rank 1 is a round ahead of the root, and has too little memory in that round."""
    world = World(
        make_plan(3, Coded(stragglers=0)),
        [Call((("float64", 8),), seed) for seed in range(6)],
        random.Random(0),
        limits=limits("raise"),
    )
    world.snapshots = [1] * 3
    world.open = 1
    world.settle()
    world.open = 2
    world.idle.add(2)
    world.sweep_all()
    world.frozen.add(0)
    pass_time(world, ended(world, {1}, 2))
    world.open = 3
    world.sweep_all()
    world.nodes[1].lack_memory()
    world.frozen.clear()
    world.idle.clear()
    world.open = 6
    world.settle()
    for rank, ends in enumerate(world.ends):
        assert ends[2].error.startswith("DeadlineExceeded: round 2 was not decided")
        assert ends[3].error == "CodedError: rank 1 has too little memory for this call"
        assert [outcomes(world, rank)[r] for r in (1, 4, 5, 6)] == [DONE] * 4


@many
@example(603301975)
@given(seeds)
def test_a_rank_that_fails_alone_never_spoils_a_sum(seed):
    """Any ranks stop and continue, even the root."""
    rng = random.Random(seed)
    plan = random_plan(rng, least=2, most=9)
    world = random_world(plan, ROUNDS, rng, limits=limits("raise"), chained=True)
    world.snapshots = [1] * plan.size
    for node in world.nodes:
        node.keep_state(1, world.state(1))
    world.open = 0
    while world.open < ROUNDS - 2:
        world.open = min(world.open + rng.randint(1, 2), ROUNDS - 2)
        for ranks in (world.frozen, world.idle):
            ranks.clear()
            if rng.random() < 0.7:
                ranks.update(rng.sample(range(plan.size), rng.randint(0, plan.size)))
        if rng.random() < 0.5:
            world.frozen.add(plan.root)
        for _ in range(rng.randint(0, 200)):
            world.step()
        for _ in range(rng.choice([0, 3, 20])):
            world.sweep_all()
            world.clock += rng.choice([TICK, 1, SECONDS])
    world.frozen.clear()
    world.idle.clear()
    for world.open in (ROUNDS - 2, ROUNDS):
        world.settle()
    for rank in range(plan.size):
        for number, end in world.ends[rank].items():
            assert end.outcome in (DONE, DESYNCHRONIZED) or (
                end.error.startswith("DeadlineExceeded: ")
            ), (rank, number, end)
        assert world.nodes[rank].next_round() == ROUNDS + 1, world.describe(rank)
        # or the rank has continued after this round
        assert outcomes(world, rank).get(ROUNDS, DONE) == DONE


def gone_back(world, failed):
    """Let all ranks except the root fail this many rounds alone, and go back to round 2 with a snapshot."""
    others = set(range(1, world.plan.size))
    for rank, node in enumerate(world.nodes):
        world.snapshots[rank] = 1
        node.keep_state(1, world.state(1))
    world.open = 1
    for rank in world.plan.tree.order:
        world.submit(rank)
        while world.may_extend(rank):
            world.extend(rank)
        world.advance(rank)
    world.frozen.add(0)
    world.sweep_all()
    world.open = failed
    start = world.clock
    while any(world.nodes[rank].next_round() <= failed for rank in others):
        assert world.clock < start + 3 * failed * SECONDS
        world.clock += TICK
        world.sweep_all()
    world.frozen.clear()
    world.open = 1
    start = world.clock
    while any(node.next_round() != 2 for node in world.nodes):
        world.sweep()
        world.clock += 0.001
        assert world.clock < start + 1


@pytest.mark.parametrize("kind", ["coded", "compared", "shared"])
def test_rounds_that_failed_alone_are_not_decided(kind):
    """A rank that has gone back behind such rounds is not late: it contributes to the
    rounds that follow.
    """
    failed, rounds = 5, 7
    shares = kind == "shared"
    plan = make_plan(3, Shared(replicas=1, blocks=2) if shares else Coded(stragglers=0))
    world = (test_node_sharing.World if shares else World)(
        plan,
        [Call((("float64", 80),), seed) for seed in range(rounds)],
        random.Random(0),
        inline=(1 << 20,),
        limits=limits("raise"),
        check=Check("raise", wait=False) if kind == "compared" else None,
        **({"shared": set(range(1, rounds + 1))} if shares else {}),
    )
    gone_back(world, failed)
    for world.open in range(2, rounds + 1):
        assert [node.lag() for node in world.nodes] == [0, 0, 0]
        start = world.clock
        while any(node.next_round() <= world.open for node in world.nodes):
            world.sweep()
            world.clock += 0.01
            assert world.clock < start + SECONDS / 2
        assert {ends[world.open].outcome for ends in world.ends} == {DONE}


def test_a_rank_without_memory_contributes_after_it_has_gone_back():
    """The rank lacked memory in a round to which it returns. Its messages are available
    again.
    """
    world = World(
        make_plan(3, Coded(stragglers=0)),
        [Call((("float64", 8),), seed) for seed in range(9)],
        random.Random(0),
        inline=(1 << 20,),
        limits=limits("raise"),
    )
    world.snapshots = [1] * 3
    for node in world.nodes:
        node.keep_state(1, world.state(1))
    world.open = 1
    world.submit(0)
    world.frozen.add(0)
    world.sweep_all()
    world.open = 4
    start = world.clock
    while any(world.nodes[rank].next_round() < 4 for rank in (1, 2)):
        assert world.clock < start + 9 * SECONDS
        world.clock += TICK
        world.sweep_all()
    world.sweep_all()
    world.nodes[1].lack_memory()
    world.inline = dict.fromkeys(world.inline, 0)  # from now on messages are fetched
    world.frozen.clear()
    world.open = 9
    world.settle()
    for ends in world.ends:
        later = {number: end.outcome for number, end in ends.items() if number > 2}
        assert later == dict.fromkeys(range(3, 10), DONE)
