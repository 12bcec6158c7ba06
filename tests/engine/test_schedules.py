"""Anything happens to simulated ranks, in any order: each call gets its sum or an error, and each
living rank gets to the end. `groups` draws the ranks, tests/nodes plays the schedules.
"""

import pytest

pytest.importorskip("_nodes", reason="built without the engine")

import _nodes
import groups


@pytest.mark.parametrize("number", range(40))
def test_schedules(number):
    groups.play(number)


@pytest.mark.parametrize("fault", ["damaged", "vanishing"])
def test_faults_of_mpi_are_found(fault):
    """MPI changes pieces, or loses messages and tells nobody. This shows that the checks can fail."""
    found = 0
    for number in range(40):
        ranks, schedule = groups.drawn(number, **{fault: 0.05})
        seed, _ = _nodes.play_many(ranks, schedule, 10)
        found += seed is not None
    assert found > 20
