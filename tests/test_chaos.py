"""A few schedules of faults on real processes; `make chaos` plays as many as one likes."""

import sys

import pytest
from launch import ROOT
from test_faults import needs_fault_tolerance

sys.path.insert(0, str(ROOT / "tests" / "chaos"))
import chaos

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("seeds", "ranks"),
    [
        # killed and stopped ranks, the root too, skips and errors, more dead than the plan can do without
        ([162, 137], 8),
        # an old rank is killed while others join, which then do; the root is
        ([1961089], 9),
    ],
)
def test_schedules_of_faults(seeds, ranks):
    needs_fault_tolerance()
    played, _ = chaos.play(seeds, ranks)
    assert [it.seed for it in played] == seeds
