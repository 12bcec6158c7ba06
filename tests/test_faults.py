"""Runs the programs of tests/faults under mpirun: what stopped, late, failing and leaving
ranks do to the others, and the others to them.

Each job has a time limit. One that hangs is ended, and says where it was.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
MPIRUN = ROOT / "scripts" / "mpirun"
FAULTS = ROOT / "tests" / "faults"
LIMIT = 110  # seconds for a job
SMALL_LIMIT = 60
BARE, MPI4PY = (), ("-m", "mpi4py")  # with the latter an uncaught error ends the job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(LIMIT + 30)]


@dataclasses.dataclass
class Job:
    """A finished job.

    Attributes:
        status: exit status of mpirun.
        seconds: that it took.
        stderr: of all ranks.
        reports: what the ranks reported, by rank.
    """

    status: int
    seconds: float
    stderr: str
    reports: dict[int, dict]

    def of_all(self, name):
        """What all ranks report alike."""
        values = {rank: report.get(name) for rank, report in self.reports.items()}
        first = next(iter(values.values()))
        assert first is not None and set(map(str, values.values())) == {str(first)}, (
            name,
            values,
        )
        return first


def settings(limit):
    """The environment of a job."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    added = {"JAXCODED_MPIRUN_TIMEOUT": str(limit), "PYTHONPATH": str(ROOT)}
    if beside.exists():
        added["JAXCODED_MPIRUN"] = str(beside)
    return os.environ | added


def run(
    directory,
    ranks,
    program,
    *arguments,
    limit=SMALL_LIMIT,
    python=MPI4PY,
    options=(),
    leavers=None,
):
    """Run a program of tests/faults. Fails if it hangs or crashes.

    Args:
        leavers: the job need not end if so many ranks have left the program.
    """
    start = time.monotonic()
    job = subprocess.run(
        [
            *(MPIRUN, *options, "-n", str(ranks)),
            *(sys.executable, *python, FAULTS / program, directory, *arguments),
        ],
        env=settings(limit),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        cwd=ROOT,
    )
    seconds = time.monotonic() - start
    left = job.stderr.count(": leaves the program")
    if job.returncode == 124 and left != leavers:
        raise AssertionError(f"{program} hangs; {whereabouts(directory, job.stderr)}")
    for words in ("Process received signal", "Fatal Python error"):
        assert words not in job.stderr, whereabouts(directory, job.stderr)
    reports = {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
        for path in directory.glob("rank-*.json")
    }
    return Job(job.returncode, seconds, job.stderr, reports)


def whereabouts(directory, stderr):
    """Where the ranks of a job were at its end, in words."""
    board = directory / "board"
    rounds = np.fromfile(board, np.int64).tolist() if board.exists() else "none"
    stacks = "\n".join(
        f"--- {path.name}\n{path.read_text()}"
        for path in sorted(directory.glob("stacks-*"))
        if path.stat().st_size
    )
    return f"rounds done: {rounds}\n{stderr[-8000:]}\n{stacks}"


def succeed(job, ranks):
    """The job ended well, and all ranks got the same bits."""
    assert job.status == 0, job.stderr[-8000:]
    assert len(job.reports) == ranks
    job.of_all("digest")


# Late ranks.


def test_stopped_processes_hold_nobody_up(tmp_path):
    # a leaf, an inner rank, and one of each under different parents
    job = run(
        tmp_path,
        7,
        "stopped.py",
        "2",
        "120",
        "300,3000,50000",
        "5",
        "1",
        "2,3",
        limit=LIMIT,
    )
    succeed(job, 7)
    for rank in (1, 2, 3, 5):
        assert job.reports[rank]["lag"] > 100
    assert not any(report["close_warnings"] for report in job.reports.values())


@pytest.mark.parametrize("tokens", ["yes", "no"])
def test_a_rank_that_is_too_late_continues_from_a_snapshot(tmp_path, tokens):
    job = run(tmp_path, 7, "training.py", tokens, *"51212", limit=LIMIT)
    succeed(job, 7)
    for rank in (1, 5):
        assert job.reports[rank]["resynced"]
    for report in job.reports.values():
        for left, joined in report["resynced"]:
            assert joined > left


def test_a_rank_that_is_too_late_finds_a_snapshot_above_its_parent(tmp_path):
    # its parent stays stopped for longer
    job = run(tmp_path, 7, "training.py", "yes", "4,1")
    succeed(job, 7)
    assert job.reports[4]["resynced"]


@pytest.mark.timeout(2 * LIMIT)
def test_random_sleeps(tmp_path):
    job = run(tmp_path, 13, "sleeps.py", "3", "2000", "40,3000", limit=2 * LIMIT - 30)
    succeed(job, 13)
    assert max(report["lag"] for report in job.reports.values()) > 0
    for rank, report in job.reports.items():
        early, late = report["early"], report["late"]
        assert late["memory"] < early["memory"] + 4, f"rank {rank}"
        for name in ("threads", "files"):
            assert late[name] == early[name], f"rank {rank}: {name}"


def test_a_parent_that_lacks_too_many_waits(tmp_path):
    job = run(tmp_path, 7, "waits.py")
    succeed(job, 7)
    (said,) = job.reports[0]["heard"]
    assert said.endswith(
        "round 10: rank 0 waits for ranks 1, 2; it needs 1 of its 2 children"
    )


def test_groups_one_after_the_other(tmp_path):
    succeed(run(tmp_path, 5, "starts.py", "2", "30", limit=LIMIT), 5)


def test_threads_whose_groups_come_and_go(tmp_path):
    # with the sanitizers and more of it: make test-asan, make test-tsan
    job = run(tmp_path, 4, "stress.py", "0", "5", "close")
    assert job.status == 0, job.stderr[-8000:]
    assert len(job.reports) == 4
    assert job.of_all("failures") == []


# Errors.


def test_a_caught_error_disturbs_nobody(tmp_path):
    job = run(tmp_path, 5, "errors.py", "caught", "4,1")
    succeed(job, 5)


@pytest.mark.parametrize("victim", [4, 1, 0])
def test_an_uncaught_error_ends_the_job(tmp_path, victim):
    job = run(tmp_path, 5, "errors.py", "uncaught", str(victim))
    assert job.status not in (0, 124)
    assert f"injected into rank {victim}" in job.stderr


@pytest.mark.parametrize("victim", [4, 1])
@pytest.mark.parametrize("way", ["uncaught", "in-flight"])
def test_an_uncaught_error_without_mpi4py_disturbs_nobody(tmp_path, way, victim):
    job = run(tmp_path, 5, "errors.py", way, str(victim), python=BARE)
    assert job.status not in (0, 124)
    assert f"injected into rank {victim}" in job.stderr
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")


def test_an_uncaught_error_of_the_root_ends_the_job(tmp_path):
    job = run(tmp_path, 5, "errors.py", "uncaught", "0", python=BARE)
    assert job.status not in (0, 124)
    assert "but rank 0 closed the group" in job.stderr


# Leaving.


@pytest.mark.parametrize("victim", [4, 1])
def test_late_ranks_get_their_results_before_others_leave(tmp_path, victim):
    job = run(tmp_path, 5, "leaving.py", "late", str(victim))
    succeed(job, 5)
    assert not any(report["close_warnings"] for report in job.reports.values())


@pytest.mark.parametrize("way", ["deleted", "in-flight"])
def test_a_group_that_is_never_closed(tmp_path, way):
    succeed(run(tmp_path, 5, "leaving.py", way, "4"), 5)


@pytest.mark.parametrize("victim", [4, 1])
def test_a_rank_that_exits_early(tmp_path, victim):
    job = run(tmp_path, 5, "leaving.py", "exit", str(victim))
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")


@pytest.mark.parametrize("python", [MPI4PY, BARE])
@pytest.mark.parametrize("way", ["interrupt", "exit-1"])
def test_a_rank_that_is_interrupted_or_exits_with_an_error(tmp_path, way, python):
    job = run(tmp_path, 5, "leaving.py", way, "4", python=python)
    assert job.status not in (0, 124)
    if python == BARE:
        assert set(job.reports) == {0, 1, 2, 3}
        job.of_all("digest")


@pytest.mark.parametrize("victim", [4, 1])
def test_a_killed_rank_where_mpi_is_fault_tolerant(tmp_path, victim):
    version = subprocess.run(
        [MPIRUN, "--version"],
        env=settings(10),
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if not re.search(r"Open MPI\S* [5-9]\.", version):
        pytest.skip(f"the option is one of Open MPI 5, not of {version[:60]!r}")
    options = ("--with-ft", "ulfm")
    # Once in a while MPI_Finalize of Open MPI 5.0 never ends where a rank has died.
    job = run(
        tmp_path,
        5,
        "leaving.py",
        *("killed", str(victim)),
        limit=30,
        options=options,
        leavers=4,
    )
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")
    assert f"without ranks [{victim}]" in " ".join(job.reports[0]["close_warnings"])
    assert "Exception" not in job.stderr


@pytest.mark.parametrize(
    ("way", "victim"), [("stopped", 4), ("stopped", 1), ("stopped-unclosed", 4)]
)
def test_leaving_a_stopped_rank_behind(tmp_path, way, victim):
    job = run(tmp_path, 5, "leaving.py", way, str(victim), limit=40)
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")
    if way == "stopped":
        parent = job.reports[(victim - 1) // 2]
        assert f"without ranks [{victim}]" in " ".join(parent["close_warnings"])
        for report in job.reports.values():
            assert report["close_seconds"] < 10
