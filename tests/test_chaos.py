"""Play a few schedules of faults on real processes; `make chaos` plays any number."""

import subprocess
import sys

import pytest
from launch import ROOT
from test_faults import needs_fault_tolerance

sys.path.insert(0, str(ROOT / "tests" / "chaos"))
import chaos

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


def test_schedules_of_faults():
    """Ranks, even the root, are killed and stopped. Ranks skip and make errors, and
    more ranks die than the plan tolerates.
    """
    needs_fault_tolerance()
    played, _ = chaos.play([162, 137], 8)
    assert [schedule.seed for schedule in played] == [162, 137]


@pytest.mark.exhaustive
def test_one_schedule_again():
    """The old root is killed while new ranks join. They join at the next attempt."""
    needs_fault_tolerance()
    job = subprocess.run(
        [sys.executable, chaos.__file__, "--replay", "1961089", "--ranks", "9"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-8000:]


@pytest.mark.exhaustive
def test_schedules_on_several_hosts():
    """Cables of hosts are cut for a while, and ranks are killed."""
    needs_fault_tolerance()
    if not chaos.can_make_hosts():
        pytest.skip("no hosts can be made")
    played, _ = chaos.play([104], 9, chaos.HOSTS, "100mbit")
    assert [schedule.seed for schedule in played] == [104]


def test_the_text_of_a_finding():
    schedule = chaos.schedule(162, 8)
    assert "--replay 162 --ranks 8 --hosts 3" in str(
        chaos.Finding("wrong", schedule, job=([161, 162], 9, 3))
    )
    assert "--first 161 --seeds 2 --ranks 9 --hosts 0" in str(
        chaos.Finding("files are left", None, job=([161, 162], 9, 0))
    )
