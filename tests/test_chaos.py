"""A few schedules of faults on real processes; `make chaos` plays as many as one likes."""

import sys

import pytest
from launch import ROOT
from test_faults import needs_fault_tolerance

sys.path.insert(0, str(ROOT / "tests" / "chaos"))
import chaos

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

# Killed and stopped ranks, the root too, skips and errors, more dead than the plan can do without.
SEEDS, RANKS = [162, 137], 8


def test_schedules_of_faults():
    needs_fault_tolerance()
    played, _ = chaos.play(SEEDS, RANKS)
    assert [it.seed for it in played] == SEEDS
