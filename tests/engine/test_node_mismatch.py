"""Ranks make different calls in one round: all ranks get an error, and none gets a
wrong sum."""

import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import example, given
from independent import random_missing
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DONE,
    DTYPES,
    FAILED,
    FAILURE,
    HEADER,
    RESULTS,
    Call,
    Running,
    World,
    random_plan,
    random_world,
    vectors,
)

from jaxcoded import Coded, make_plan


def other(call, plan, rng):
    """Return a call that differs from the given call."""
    q, seed = plan.padding_multiple, call.seed + 1
    return rng.choice(
        [
            dataclasses.replace(call, seed=seed),
            Call((("float64", q * rng.randint(0, 30)),), seed),
            Call((), seed, "broadcast"),
            Call((("float32", q * 40),), seed, "reduce"),
        ]
    )


def failures(world, rank):
    return {r: e for r, e in world.ends[rank].items() if e.outcome != DONE}


def test_errors_show_the_ends_of_long_calls():
    plan = make_plan(2, Coded(stragglers=0))
    segments = tuple(("float32", count) for count in range(40))
    world = random_world(plan, 1, random.Random(0), script=[Call(segments, 1)])
    world.deviations[1, 1] = Call((*segments[:20], ("float32", 7), *segments[21:]), 1)
    world.settle()
    for ends in world.ends:
        text = ends[1].error
        assert "round 1, allreduce 1 of [('float32', 0), (" in text
        assert text.endswith("('float32', 38), ('float32', 39)]") and " ... " in text
        assert len(text) < 2000


def assert_told(world, odd, round):
    """Check that all ranks failed in one round, with an error about the odd call, and
    that later rounds are right. If the odd call's round was decided before, the odd rank failed in it; if the odd rank
    is the root, all other ranks failed in it.

    Returns:
        The round in which all failed.
    """
    last = world.open
    signature = world.deviations[odd, round].signature
    ranks = range(world.plan.size)
    for rank in ranks:
        assert set(world.ends[rank]) == set(range(1, last + 1)), world.describe(rank)
    failed = [failures(world, rank) for rank in ranks]
    at = max(failed[odd])
    assert at >= round
    for rank in ranks:
        assert failed[rank][at] == failed[0][at]
        others = failed[rank].keys() - {at}
        assert others <= {round}
        if at > round:
            assert (round in others) == ((rank == odd) == (odd != world.plan.root))
        for end in failed[rank].values():
            assert end.outcome == FAILED
            assert re.match(
                r"GroupMismatch: .* at rank (\d+), .* at rank (\d+): ranks called different "
                r"things in the same round, but all ranks must make the same calls in the same order; "
                r"rank \1: round \d+, .*; rank \2: round \d+, .*",
                end.error,
            )
            assert f"rank {odd}: round {round}, {signature}" in end.error
    return at


@pytest.mark.slow
@many
@given(seeds)
def test_in_time(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    world = random_world(plan, 8, rng)
    odd, round = rng.randrange(plan.size), rng.randint(1, 5)
    world.deviations[odd, round] = other(world.script[round - 1], plan, rng)
    for world.open in range(1, 9):
        for _ in range(rng.choice([0, 100])):
            world.step()
        world.settle()
    assert assert_told(world, odd, round) in (round, round + 1)


@pytest.mark.slow
@many
@given(seeds)
@example(507095104)  # other ranks read pieces of a result that becomes an error
def test_at_any_time(seed):
    """All other ranks continue at any pace."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    rounds = 30
    world = random_world(plan, rounds, rng)
    odd, round = rng.randrange(plan.size), rng.randint(1, 5)
    world.deviations[odd, round] = other(world.script[round - 1], plan, rng)
    pace = [rng.choice([0.1, 1, 1]) for _ in range(plan.size)]
    world.open = 15
    for _ in range(rng.choice([0, 300, 2000])):
        world.step(pace)
    world.settle()
    world.open = rounds
    world.settle()
    assert round <= assert_told(world, odd, round) <= 16


@pytest.mark.slow
@many
@given(seeds)
def test_late(seed):
    """The round is over when the odd rank calls."""
    rng = random.Random(seed)
    plan = random_plan(rng, 3, stragglers=(1, 2))
    late = random_missing(plan, np.random.default_rng(seed))
    if not late:
        return
    world = random_world(plan, 12, rng)
    odd, round = rng.choice(sorted(late)), rng.randint(1, 5)
    world.deviations[odd, round] = other(world.script[round - 1], plan, rng)
    rng.choice([world.frozen, world.idle]).update(late)
    world.open = 8
    world.settle()
    world.assert_done(set(range(plan.size)) - late)
    world.frozen.clear()
    world.idle.clear()
    world.settle()
    assert failures(world, odd).keys() == {round}
    world.open = 12
    world.settle()
    assert assert_told(world, odd, round) == 9


@pytest.mark.parametrize("odd", [0, 1, 4])
def test_one_rank_is_a_round_ahead(odd):
    """This rank made one more call than the other ranks, so that no later call matches."""
    plan = make_plan(13, Coded(fanout=3))
    script = [Call((("float32", 30),), seed) for seed in range(12)]
    world = World(plan, script, random.Random(0), limits={"piece_bytes": 32})
    for round in range(4, 13):
        world.deviations[odd, round] = Call((("float32", 30),), 3 + 100 * (round > 4))
        if round > 4:
            world.deviations[odd, round] = script[round - 2]
        else:
            world.deviations[odd, round] = Call((("float64", 3),), 77)
    world.settle()
    for rank in range(13):
        assert set(world.ends[rank]) == set(range(1, 13))
        failed = failures(world, rank)
        assert all(e.error.startswith("GroupMismatch: ") for e in failed.values())
        assert failed.keys() & {4, 5}
        assert not failed.keys() & {1, 2, 3}
        if rank == odd:
            assert failed.keys() == set(range(4, 13))


@pytest.mark.slow
@many
@given(seeds)
def test_a_refusal_and_a_mismatch_in_one_round(seed):
    """A round that fails for another reason still reports that its calls did not match."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    world = random_world(plan, 10, rng)
    round = rng.randint(1, 4)
    at = round + 1
    world.script[at - 1] = dataclasses.replace(world.script[at - 1], why_not="refused")
    odd = rng.randrange(plan.size)
    world.deviations[odd, round] = other(world.script[round - 1], plan, rng)
    for world.open in range(1, 11):
        world.settle()
    for rank in range(plan.size):
        assert set(world.ends[rank]) == set(range(1, 11)), world.describe(rank)
        failed = failures(world, rank)
        assert set(failed) <= {round, at, at + 1}
        assert any(e.error.startswith("GroupMismatch: ") for e in failed.values()), (
            failed
        )


def test_pieces_do_not_hide_an_error():
    """The root's report of the failed round comes before the parent's report of its
    first pieces.
    """
    plan = make_plan(3, Coded(parents=[-1, 0, 1], stragglers=0))
    call = Call((("float32", 64),), 0)
    world = World(plan, [call], random.Random(0), hosts=range(3))
    world.submit(2)
    error = HEADER.pack(RESULTS, FAILURE, 0, 1, 1, 1, 1, call.fingerprint, 0) + b"no"
    pieces = HEADER.pack(RESULTS, 0, 1, 1, 1, 1, 1, call.fingerprint, 0)
    pieces += np.array([3, 64, 0], np.uint64).tobytes()
    world.nodes[2].deliver(0, error)
    world.nodes[2].deliver(1, pieces)
    world.advance(2)
    assert failures(world, 2)[1].error == "no"


@pytest.mark.parametrize("sections_from", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_replaces_another_does_not_get_its_sum(seed, sections_from):
    """The last part of a call's message never comes while the rank's family forms the
    sum. Another call of the same length follows.
    """
    plan = make_plan(4, Coded(code="progressive"))
    calls = [Call((("float64", 60),), number) for number in range(2)]
    world = World(
        plan,
        calls,
        random.Random(seed),
        hosts=list(range(4)),
        limits={
            "sections_from": sections_from,
            "section_pieces": 6,
            "least_piece_bytes": 16,
            "piece_bytes": 64,
            "announced_bytes": 64,
        },
    )
    rank, node, other = 3, world.nodes[3], calls[1]
    world.open = 1
    world.begins_with[rank, 1] = 1
    world.submit(rank)
    world.idle.add(rank)
    begun = "forms pieces" if sections_from else "lacks 1,"
    while begun not in node.status() or not world.offered[rank, 1]:
        world.step()
    own, out = other.own(plan, rank), [np.zeros(60)]
    message = [(DTYPES[str(vector.dtype)], len(vector)) for vector in own]
    world.running[rank] = Running(1, other, own, out, len(own))
    world.running[rank].message = message
    called = other.fingerprint, other.signature, "", True, True, False, []
    node.submit(*called, vectors(own), vectors(out), len(own), breaks_off=True)
    world.check_end(rank)
    world.idle.clear()
    world.settle()
    assert world.ends[rank][1].outcome == FAILED
    assert "GroupMismatch: " in world.ends[rank][1].error
    for others in range(3):
        assert world.ends[others][1].outcome == DONE
