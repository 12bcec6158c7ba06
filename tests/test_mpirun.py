"""Runs the files of tests/mpi under mpirun."""

import pytest
from launch import LIMIT, ROOT, mpirun

FILES = sorted(path.name for path in (ROOT / "tests/mpi").glob("test_*.py"))


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [2, 4, 7, 13])
@pytest.mark.parametrize("file", FILES)
def test_under_mpirun(file, ranks):
    options = ("-q", "-p", "no:cacheprovider", "--color=no")
    job = mpirun(ranks, "-m", "pytest", *options, f"tests/mpi/{file}")
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
