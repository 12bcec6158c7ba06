"""Anything happens to simulated ranks, in any order: each call gets its sum or an error, and each
living rank gets to the end. `groups` draws the ranks, tests/nodes plays the schedules.
"""

import pytest

pytest.importorskip("_nodes", reason="built without the engine")

import _nodes
import groups
from test_node_memory import measurable

from jaxcoded import Coded, Shared, make_plan


@pytest.mark.parametrize("number", range(40))
def test_schedules(number):
    groups.play(number)


@pytest.mark.parametrize("fault", ["damaged", "vanishing"])
def test_faults_of_mpi_are_found(fault):
    """MPI changes pieces, or loses messages without reporting it. This shows that the checks can fail."""
    found = 0
    for number in range(40):
        ranks, schedule = groups.drawn(number, **{fault: 0.05})
        seed, _ = _nodes.play_many(ranks, schedule, 10)
        found += seed is not None
    assert found > 20


def test_allocations_fail():
    """Allocations of the engine fail in schedules of disorder: tests/nodes/memory.cpp is linked as it must be."""
    if not measurable():
        pytest.skip("a sanitizer has memory of its own")
    failed = 0
    for number in range(10):
        ranks, schedule = groups.drawn(number)
        seed, seen = _nodes.play_many(ranks, schedule, 20)
        assert seed is None
        failed += seen["allocations that fail"]
    assert failed > 10


@pytest.mark.parametrize("number", [3779808888, 744069209, 1363292806, 90052])
def test_allocations_that_once_ended_the_process(number):
    """A rank had no memory to tell the other ranks that its sections end, or offered
    blocks of a round for which it had none.
    """
    groups.play(number)


THOUSAND = {
    "tree": (Coded(fanout=10), False),
    "star": (Coded(stragglers=1, fanout=1000, code="fractional_repetition"), False),
    "star in sections": (
        Coded(stragglers=1, fanout=1000, code="fractional_repetition"),
        True,
    ),
    "shared": (Shared(replicas=1, blocks=4), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THOUSAND)
def test_a_thousand_ranks(name):
    """The sums of a thousand ranks are right, and the ranks send few messages."""
    strategy, sections = THOUSAND[name]
    plan = make_plan(1001, strategy)
    ranks = groups.group(plan, list(range(1001)))
    numbers = 1 << 14 if sections else 1 << 10
    costs = _nodes.count_costs(ranks, 1, numbers, sections=sections)
    messages = [messages for _, _, messages, _ in costs]
    # makers of sections tell all other ranks how far they are
    assert sum(messages) <= (100 if sections else 10) * plan.size
    assert max(messages) <= 10 * (max(map(len, plan.tree.children)) + 1)
