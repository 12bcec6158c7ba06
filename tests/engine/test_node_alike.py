"""Ranks that start with different states get no sum before the root's state."""

import random

import pytest
from simulation import DONE, FAILED, Call, World

from jaxcoded import Coded, make_plan

SEGMENTS = (("float64", 40),)


@pytest.mark.parametrize("arguments", [{"fanout": 2}, {"fanout": 6}])
@pytest.mark.parametrize("without", [{0}, {3}, {1, 5}])
@pytest.mark.parametrize("seed", range(10))
def test_a_sum_before_the_broadcast_is_an_error(arguments, without, seed):
    plan = make_plan(7, Coded(**arguments))
    kinds = ["allreduce", "reduce", "broadcast", "allreduce"]
    script = [Call(SEGMENTS, number, kind) for number, kind in enumerate(kinds)]
    world = World(plan, script, random.Random(seed))
    for rank in without:
        world.nodes[rank].expect_state()
    world.settle()
    for rank, ends in enumerate(world.ends):
        assert world.nodes[rank].alike()
        assert [ends[number].outcome for number in (3, 4)] == [DONE, DONE]
        for number in (1, 2):
            if rank in without:
                assert ends[number].outcome == FAILED
            if ends[number].outcome == FAILED:
                assert (
                    "hand it on first, as params = jaxcoded.tree_bcast"
                    in ends[number].error
                )
            else:  # the round was decided without these ranks; the world has checked it
                assert 0 not in without
