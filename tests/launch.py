"""Start several ranks, with a time limit that depends on the machine's speed."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from jaxcoded.tools.launch import launcher

ROOT = pathlib.Path(__file__).parent.parent
LIMIT = 240  # seconds that a job may take on an idle machine
SLOWNESS = "JAXCODED_SLOWNESS"  # environment variable: slowness at a job's start
WORK, IDLE = 2_000_000, 0.04  # steps of a loop, and their seconds on an idle machine
OWN_LOAD = 3.0  # processes for each core, while only the tests run
MOST = 10.0

_slowest = float(os.environ.get(SLOWNESS, "1"))


def slowness():
    """Return the largest slowness of this machine, relative to an idle machine, that any call in this process has
    measured; at most `MOST`. Waits for other processes scale with the slowness, and no test requires a small slowness.
    """
    global _slowest
    start = time.monotonic()
    for _ in range(WORK):
        pass
    measured = (time.monotonic() - start) / IDLE
    # ranks wait for each other, and for a core
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) / OWN_LOAD
    _slowest = min(MOST, max(_slowest, measured, waiting))
    return _slowest


def limited(seconds):
    """Return the environment of a job that may take ``seconds`` on an idle machine."""
    slower = slowness()
    settings = {"JAXCODED_MPIRUN_TIMEOUT": f"{seconds * slower:.0f}"}
    settings[SLOWNESS] = f"{slower:.2f}"
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    if beside.exists():
        settings["JAXCODED_MPIRUN"] = str(beside)
    return os.environ | settings


def needs_fault_tolerance():
    """Return the options with which MPI survives the death of a rank; without them skip
    the test.
    """
    mpirun = launcher.located(limited(10).get("JAXCODED_MPIRUN"))
    if mpirun.mpi != launcher.OPEN_MPI or mpirun.major < 5:
        pytest.skip(f"the option is one of Open MPI 5, not of {mpirun}")
    return "--with-ft", "ulfm"


def mpirun(ranks, *arguments, limit=LIMIT, options=(), check=True, **environment):
    """Run ``python *arguments`` on ``ranks`` ranks with these mpirun options; return
    the finished process.

    The job ends after ``limit`` seconds, or later on a busy machine. With ``check``
    this fails unless the job succeeds.
    """
    job = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts/mpirun",
            "-n",
            str(ranks),
            *options,
            sys.executable,
            *arguments,
        ],
        env=limited(limit) | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if check and job.returncode:
        raise AssertionError(
            f"exit status {job.returncode}\n{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
        )
    return job
