"""Start several ranks, with a time limit."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
LIMIT = 240  # seconds that a job may take


def mpirun(ranks, *arguments, limit=LIMIT, **environment):
    """Run ``python *arguments`` on so many ranks and return the finished process.

    The job is ended after ``limit`` seconds. Fails unless it succeeds.
    """
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    settings = {"JAXCODED_MPIRUN_TIMEOUT": str(limit)}
    if beside.exists():
        settings["JAXCODED_MPIRUN"] = str(beside)
    job = subprocess.run(
        [ROOT / "scripts/mpirun", "-n", str(ranks), sys.executable, *arguments],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if job.returncode:
        raise AssertionError(
            f"exit status {job.returncode}\n{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
        )
    return job
