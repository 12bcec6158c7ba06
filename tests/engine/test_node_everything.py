"""Everything that can happen to a group, in one run."""

import dataclasses
import random

import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

from simulation import (
    DESYNCHRONIZED,
    DONE,
    FAILED,
    Call,
    comparing,
    erasable,
    random_plan,
    random_script,
    random_world,
    tolerated,
)

ROUNDS = 25


def mixed_script(plan, rng):
    script = random_script(plan, rng, ROUNDS, most=20)
    for i, call in enumerate(script):
        kind = rng.choice(
            ["allreduce"] * 4 + ["reduce", "broadcast", "erased", "refused"]
        )
        if kind == "erased":
            call = dataclasses.replace(call, erased=frozenset(erasable(plan, rng)))
        elif kind == "refused":
            call = dataclasses.replace(call, why_not=f"refused: no. {i}")
        else:
            call = dataclasses.replace(call, kind=kind)
        script[i] = call
    return script


@pytest.mark.slow
@many
@given(seeds)
def test_everything_at_once(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    script = mixed_script(plan, rng)
    limits = {"history_bytes": 0, "history_rounds": rng.choice([3, 8, 100])}
    options = comparing(plan, rng) | {"chained": True}
    world = random_world(plan, ROUNDS, rng, script=script, limits=limits, **options)
    every = rng.randint(1, 3)
    world.snapshots = [every] * plan.size
    for _ in range(rng.choice([0, 0, 1, 2])):
        odd = rng.randrange(plan.size), rng.randint(1, ROUNDS)
        world.deviations[odd] = Call((("float32", 5 * plan.padding_multiple),), seed)
        # a late rank with a different call fails the round alone, and the others fail a
        # later one
        world.chained = False
    for round, call in enumerate(script, 1):
        if call.kind == "allreduce" and not call.erased and rng.random() < 0.1:
            world.skips |= {(rank, round) for rank in tolerated(plan, rng)}

    while not all(node.next_round() > ROUNDS for node in world.nodes):
        before = [node.next_round() for node in world.nodes]
        for ranks in (world.frozen, world.idle):
            ranks.clear()
            if rng.random() < 0.7:
                ranks.update(rng.sample(range(plan.size), rng.randint(0, plan.size)))
        for _ in range(rng.randint(0, 400)):
            world.step()
        for node in world.nodes:
            assert node.status()
        if rng.random() < 0.3:
            world.frozen.clear()
            world.idle.clear()
            world.open = min(max(before) + 3, ROUNDS)
            world.settle()
            after = [node.next_round() for node in world.nodes]
            assert min(after) > world.open, world.describe(after.index(min(after)))
            world.open = ROUNDS

    for rank in range(plan.size):
        for end in world.ends[rank].values():
            if end.outcome == FAILED:
                assert end.error.startswith("refused: no. ") or (
                    world.deviations
                    and end.error.startswith("GroupMismatch: ")
                    and ": ranks called different things" in end.error
                )
            else:
                assert end.outcome in (DONE, DESYNCHRONIZED)
    if not world.deviations:
        for round, call in enumerate(script, 1):
            assert (round in world.results) == (not call.why_not)
    world.frozen.clear()
    world.idle.clear()
    for rank in range(plan.size):
        world.leave(rank)
    world.settle()
    assert world.dead == set(range(plan.size))
