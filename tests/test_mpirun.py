"""Runs tests/mpi under mpirun."""

import pytest
from launch import mpirun

LIMIT = 1500  # seconds for a job
TEST_LIMIT = 300  # seconds for a test in it; one that hangs says where


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [2, 4, 7, 13])
def test_under_mpirun(ranks):
    job = mpirun(
        ranks,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
        *(f"--timeout={TEST_LIMIT}", "--timeout-method=thread", "tests/mpi"),
        limit=LIMIT,
    )
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
