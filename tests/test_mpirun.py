"""Runs the files of tests/mpi under mpirun, each with a time limit."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(path.name for path in (ROOT / "tests" / "mpi").glob("test_*.py"))
LIMIT = 240  # seconds a job may take


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [2, 4, 7, 13])
@pytest.mark.parametrize("file", FILES)
def test_under_mpirun(file, ranks):
    job = subprocess.run(
        [
            ROOT / "scripts" / "mpirun",
            "-n",
            str(ranks),
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
            ROOT / "tests" / "mpi" / file,
        ],
        env=os.environ | {"JAXCODED_MPIRUN_TIMEOUT": str(LIMIT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
