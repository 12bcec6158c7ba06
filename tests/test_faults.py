"""Run the programs of tests/faults under mpirun, in which ranks are stopped, are late, fail or leave: the other ranks
continue as documented.

Each job has a time limit. A job that hangs is ended, and shows where its ranks were.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cases import more
from launch import limited, needs_fault_tolerance, slowness

ROOT = pathlib.Path(__file__).parent.parent
MPIRUN = ROOT / "scripts" / "mpirun"
FAULTS = ROOT / "tests" / "faults"
LIMIT = 110  # seconds for a job, on an idle machine
SMALL_LIMIT = 60
BARE, MPI4PY = (), ("-m", "mpi4py")  # with mpi4py an uncaught error ends the job

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(LIMIT + 30)]

# The victims: a leaf (rank 4 of 5), and a rank with children (rank 1).


@dataclasses.dataclass
class Job:
    """A finished job.

    Attributes:
        status: exit status of mpirun.
        seconds: the time that it took.
        stderr: the standard error of all ranks.
        reports: the ranks' reports, by rank.
    """

    status: int
    seconds: float
    stderr: str
    reports: dict[int, dict]

    def of_all(self, name):
        """Return the value that all ranks report."""
        values = {rank: report.get(name) for rank, report in self.reports.items()}
        first = next(iter(values.values()))
        assert first is not None and set(map(str, values.values())) == {str(first)}, (
            name,
            values,
        )
        return first


def settings(limit):
    """Return the environment of a job."""
    return limited(limit) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def run(
    directory,
    ranks,
    program,
    *arguments,
    limit=SMALL_LIMIT,
    python=MPI4PY,
    options=(),
    start=(),
    **environment,
):
    """Run a program of tests/faults; fail if it hangs or crashes.

    Args:
        start: the beginning of the command line, instead of mpirun.
        environment: variables added to the environment.
    """
    begun = time.monotonic()
    mpirun = sys.executable, MPIRUN, *options, "-n", str(ranks), sys.executable, *python
    job = subprocess.run(
        [*(start or mpirun), FAULTS / program, directory, *arguments],
        env=settings(limit) | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        cwd=ROOT,
    )
    seconds = time.monotonic() - begun
    if job.returncode == 124:
        raise AssertionError(f"{program} hangs; {whereabouts(directory, job.stderr)}")
    for words in ("Process received signal", "Fatal Python error"):
        assert words not in job.stderr, whereabouts(directory, job.stderr)
    reports = {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
        for path in directory.glob("rank-*.json")
    }
    return Job(job.returncode, seconds, job.stderr, reports)


def whereabouts(directory, stderr):
    """Return a text that tells where the ranks of a job were at its end."""
    board = directory / "board"
    rounds = np.fromfile(board, np.int64).tolist() if board.exists() else "none"
    stacks = "\n".join(
        f"--- {path.name}\n{path.read_text()}"
        for path in sorted(directory.glob("stacks-*"))
        if path.stat().st_size
    )
    return f"rounds done: {rounds}\n{stderr[-8000:]}\n{stacks}"


def succeed(job, ranks):
    """Check that the job succeeded, and that all ranks got the same bits."""
    assert job.status == 0, job.stderr[-8000:]
    assert len(job.reports) == ranks
    job.of_all("digest")


# Late ranks.


def test_stopped_processes_delay_no_rank(tmp_path):
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


@pytest.mark.parametrize(
    ("tokens", "late"),
    [("yes", "512"), *(more(each, "51212") for each in ("yes", "no"))],
)
def test_a_rank_that_is_too_late_continues_from_a_snapshot(tmp_path, tokens, late):
    job = run(tmp_path, 7, "training.py", tokens, *late, limit=LIMIT)
    succeed(job, 7)
    for rank in (1, 5):
        assert job.reports[rank]["resynced"]
    for report in job.reports.values():
        for left, joined in report["resynced"]:
            assert joined > left


@pytest.mark.exhaustive
def test_a_rank_that_is_too_late_finds_a_snapshot_above_its_parent(tmp_path):
    # the rank's parent is stopped for longer than the rank
    job = run(tmp_path, 7, "training.py", "no", "4,1")
    succeed(job, 7)
    assert job.reports[4]["resynced"]


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("rounds", [400, more(2000)])
def test_random_sleeps(tmp_path, rounds):
    limit = 2 * LIMIT - 30
    job = run(tmp_path, 13, "sleeps.py", "3", str(rounds), "40,3000", limit=limit)
    succeed(job, 13)
    assert max(report["lag"] for report in job.reports.values()) > 0
    for rank, report in job.reports.items():
        early, late = report["early"], report["late"]
        assert late["memory"] < early["memory"] + 4, f"rank {rank}"
        assert late["files"] == early["files"], f"rank {rank}"
        # a thread may end in the meantime: once 19 threads were left of 20
        assert late["threads"] <= early["threads"], f"rank {rank}"


def test_a_parent_that_lacks_too_many_waits(tmp_path):
    job = run(tmp_path, 7, "waits.py")
    succeed(job, 7)
    (text,) = (line for line in job.reports[0]["heard"] if "round 10:" in line)
    assert text.endswith(
        "round 10: rank 0 waits for ranks 1, 2; it needs 1 of its 2 children"
    )
    words = "rank 1 waits for rank 0, which does not answer"
    assert any(line.endswith(words) for line in job.reports[1]["heard"])


# Ranks that are alive but stuck.


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("lock", "its process answers, so its program is busy or stuck at round 10"),
        more(
            "loop", "its process answers, so its program is busy or stuck at round 10"
        ),
        more(
            "device",
            "its process answers, so its program is busy or stuck at round 10",
        ),
        more("stopped", "its process does not answer: it is stopped, dead or cut off"),
    ],
)
def test_a_rank_that_is_stuck_is_named(tmp_path, way, words):
    job = run(tmp_path, 5, "stuck.py", way, "3")
    assert set(job.reports) == {0, 1, 2, 4}, job.stderr[-8000:]
    job.of_all("digest")
    # on a busy machine the first round may take longer than the deadline
    heard = {
        rank: [line for line in report["heard"] if ", round 1: " not in line]
        for rank, report in job.reports.items()
    }
    (text,) = heard[1]
    assert "no call of rank 3 has come for " in text
    assert "rounds up to 30 are decided" in text
    assert words in text
    assert not any(heard[rank] for rank in (0, 2, 4))
    if way != "stopped":
        (stands,) = re.findall("group 0, rank 3 .*", job.stderr)
        assert stands.startswith("group 0, rank 3 has not called round 10, for ")
        assert "; rounds up to 30 are decided; its parent, rank 1, was" in stands


def test_ranks_that_wait_in_a_step_say_for_whom(tmp_path):
    job = run(tmp_path, 5, "stuck.py", "jit", "3")
    succeed(job, 5)
    for rank, words in (
        (3, " has not called round 10, for "),
        (1, " waits in round 10, for .*: rank 1 waits for rank 3; it needs 2 of its 2"),
        (0, " waits in round 10, for .*: rank 0 waits for rank 1; it needs 2 of its 2"),
    ):
        (stands,) = re.findall(f"jaxcoded: group 0, rank {rank} .*", job.stderr)
        assert re.search(words, stands), stands


@pytest.mark.parametrize(
    ("before", "environment", "status", "text"),
    [
        ("", {}, 0, "jaxcoded: group 0, rank 0 has not called round 1"),
        ("", {"JAXCODED_STATUS_SIGNAL": "OFF"}, -signal.SIGUSR1, ""),
        ("signal.signal(signal.SIGUSR1, lambda *_: print('mine'))", {}, 0, "mine"),
        more("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", {}, 0, ""),
    ],
)
def test_the_owner_of_the_signal(before, environment, status, text):
    program = f"""
import os, signal, time
{before}
from jaxcoded import Coded
import jaxcoded
from mpi4py import MPI
group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="engine")
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(1)
group.close()
"""
    job = subprocess.run(
        [sys.executable, "-c", program],
        env=settings(SMALL_LIMIT) | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert job.returncode == status, job.stderr
    assert text in job.stdout + job.stderr
    assert ("jaxcoded: " in job.stderr) == text.startswith("jaxcoded: ")


def test_an_answer_into_a_full_pipe():
    """Standard error is a full pipe. The engine continues, and ends."""
    program = """
import fcntl, os, signal, time
from mpi4py import MPI
import jaxcoded
group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="engine")
flags = fcntl.fcntl(2, fcntl.F_GETFL)
fcntl.fcntl(2, fcntl.F_SETFL, flags | os.O_NONBLOCK)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    fcntl.fcntl(2, fcntl.F_SETFL, flags)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(1)
group.close()
MPI.Finalize()
print("done", flush=True)
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=settings(SMALL_LIMIT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as job:
        try:
            assert job.wait(60 * slowness()) == 0
            assert job.stdout.read() == b"done\n"
        finally:
            job.kill()


def test_groups_one_after_the_other(tmp_path):
    succeed(run(tmp_path, 5, "starts.py", "2", "30", limit=LIMIT), 5)


@pytest.mark.parametrize(("end", "groups"), [("close", "5"), more("exit", "1")])
def test_threads_whose_groups_come_and_go(tmp_path, end, groups):
    # for longer and with sanitizers: make test-asan, make test-tsan
    job = run(tmp_path, 4, "stress.py", "0", groups, end, python=BARE)
    assert job.status == 0, job.stderr[-8000:]
    assert len(job.reports) == 4
    assert job.of_all("failures") == []


def test_daemon_threads_in_the_engine_at_the_end(tmp_path):
    job = run(tmp_path, 1, "daemons.py", python=BARE)
    assert job.status == 0, job.stderr[-8000:]
    assert job.of_all("end")


# Errors.


def test_a_caught_error_disturbs_no_rank(tmp_path):
    job = run(tmp_path, 5, "errors.py", "caught", "4,1")
    succeed(job, 5)


@pytest.mark.parametrize("victim", [more(4), 1, more(0)])
def test_an_uncaught_error_ends_the_job(tmp_path, victim):
    job = run(tmp_path, 5, "errors.py", "uncaught", str(victim))
    assert job.status not in (0, 124)
    assert f"injected into rank {victim}" in job.stderr


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        ("in-flight", 4),
        *(more(*each) for each in (("uncaught", 1), ("uncaught", 4), ("in-flight", 1))),
    ],
)
def test_an_uncaught_error_without_mpi4py_disturbs_no_rank(tmp_path, way, victim):
    job = run(tmp_path, 5, "errors.py", way, str(victim), python=BARE)
    assert job.status not in (0, 124)
    assert f"injected into rank {victim}" in job.stderr
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")


def test_an_uncaught_error_of_the_root_ends_the_job(tmp_path):
    job = run(tmp_path, 5, "errors.py", "uncaught", "0", python=BARE)
    assert job.status not in (0, 124)
    assert "but rank 0 failed: RuntimeError: injected into rank 0" in job.stderr


def test_a_root_that_exits_with_an_error_reports_it(tmp_path):
    job = run(tmp_path, 5, "leaving.py", "exit-1", "0")
    assert job.status not in (0, 124)
    assert "but rank 0 failed: SystemExit: 1" in job.stderr


# Too little memory.


@pytest.fixture(scope="module")
def little_memory(tmp_path_factory):
    """Return the library to preload so that the engine finds too little memory on
    command.
    """
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "c++"), "g++")), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    out = tmp_path_factory.mktemp("memory") / "libmemory.so"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *options, FAULTS / "memory.cpp", "-o", out], check=True, timeout=100
    )
    return str(out)


@pytest.mark.parametrize(
    ("way", "victim"),
    [("started", "3"), *(more(*each) for each in (("started", "0"), ("called", "0")))],
)
def test_too_little_memory_fails_a_round_on_all_ranks(
    tmp_path, little_memory, way, victim
):
    job = run(tmp_path, 4, "little_memory.py", way, victim, LD_PRELOAD=little_memory)
    assert job.status == 0, job.stderr[-8000:]
    assert len(job.reports) == 4
    assert len(job.of_all("failed")) > 5


def test_too_little_memory_for_one_more_started_round(tmp_path, little_memory):
    job = run(tmp_path, 2, "little_memory_started.py", "1", LD_PRELOAD=little_memory)
    assert job.status == 0, job.stderr[-8000:]
    assert 0 < len(job.of_all("failed")) < 20


def test_too_little_memory_for_a_sum_that_all_have(tmp_path, little_memory):
    """The rank that lacks the third sum tells all ranks in the next step, so that no sum mixes different states."""
    job = run(tmp_path, 3, "little_memory_done.py", "1", LD_PRELOAD=little_memory)
    assert job.status == 0, job.stderr[-8000:]
    for rank, report in job.reports.items():
        assert list(report["errors"]) == (["3", "4"] if rank == 1 else ["4"])
        assert "rank 1" in report["errors"]["4"]
        assert "out of memory" in report["errors"]["4"]


# MPI, and ranks that do not receive.


@pytest.fixture
def refusing(tmp_path):
    """Return the options with which MPI is the one of `refusing.c`."""
    out = tmp_path / "librefusing.so"
    compiler = pathlib.Path(sys.executable).with_name("mpicc")
    if not compiler.exists():
        pytest.skip("there is no compiler for MPI")
    subprocess.run(
        [compiler, "-shared", "-fPIC", FAULTS / "refusing.c", "-o", out],
        check=True,
        timeout=100,
    )
    return "-x", f"LD_PRELOAD={out}"


def test_a_message_that_mpi_refuses_is_not_lost(tmp_path, refusing):
    job = run(tmp_path, 4, "refusing.py", options=refusing)
    assert job.status == 0, job.stderr[-8000:]
    assert job.of_all("rounds") == 40
    assert sum(report["refused"] for report in job.reports.values()) > 40


@pytest.mark.parametrize(
    ("which", "rank", "number"),
    [
        ("received", 0, 3),
        ("asking", 3, 1),
        ("piece", 0, 1),
        more("received", 1, 2),
        more("received", 1, 7),
        more("received", 3, 1),
        more("sent", 1, 1),
        more("sent", 3, 1),
    ],
)
def test_a_message_that_mpi_loses_hangs_nobody(tmp_path, refusing, which, rank, number):
    """A round that lacks the message fails on all ranks, and the next rounds are right.
    A lost piece is requested and sent again.
    """
    arguments = which, str(rank), str(number)
    job = run(tmp_path, 4, "losing.py", *arguments, options=refusing)
    assert job.status == 0, job.stderr[-8000:]
    assert job.reports[rank]["lost"] == 2
    errors = job.of_all("errors")
    assert len(errors) <= (0 if which in ("asking", "piece") else 2)
    assert all("MPI has lost a message to or from rank" in it for it in errors.values())


@pytest.mark.parametrize("link", [("0", "1"), ("1", "0")])
def test_a_broken_link_is_like_a_late_rank(tmp_path, refusing, link):
    """At most one round fails for the ranks that have other links. The rank without a link
    gets an error at the deadline.
    """
    job = run(tmp_path, 4, "broken_link.py", *link, options=refusing)
    assert job.status == 0, job.stderr[-8000:]
    cut_off = job.reports.pop(1)
    for report in job.reports.values():
        assert report["rounds"] == 20
        assert len(report["errors"]) <= 1
        assert all("MPI has lost" in text for text in report["errors"].values())
    errors = cut_off["errors"].values()
    assert any(
        "rank 1 waits for rank 0, which does not answer" in text for text in errors
    )
    lost = cut_off["lost"] + job.reports[0]["lost"]
    assert 0 < lost < 200, "the ranks keep sending over the link"


@pytest.mark.parametrize("number", [41, more(60)])
def test_a_lost_request_harms_no_request_long_after_it(tmp_path, refusing, number):
    """After 32,763 more pieces MPI's tags repeat, and a later piece does not get the tag of the lost one."""
    arguments = "received", "1", str(number), "1500"
    job = run(tmp_path, 4, "losing.py", *arguments, options=refusing)
    assert job.status == 0, job.stderr[-8000:]
    assert job.reports[1]["lost"] == 2
    assert len(job.of_all("errors")) == 1


def test_an_idle_rank_polls_rarely(tmp_path):
    """An idle rank polls rarely, although a stopped rank does not receive its message."""
    job = run(tmp_path, 5, "polling.py")
    assert job.status == 0, job.stderr[-8000:]
    for rank in (0, 2, 3, 4):
        assert job.reports[rank]["sleeps"] < 100


# Shared work. Gradients of 20,000 floats need several messages.


@pytest.mark.parametrize(
    "arguments", [("20000", "1", "3"), *map(more, [("200", "1", "3"), ("20000", "2")])]
)
def test_a_rank_stopped_in_a_block_delays_no_other(tmp_path, arguments):
    job = run(tmp_path, 4, "sharing.py", "stopped", *arguments)
    succeed(job, 4)
    assert job.of_all("steps") == 36
    assert job.reports[0]["without"] >= 15
    for rank in map(int, arguments[1:]):
        assert job.reports[rank]["lag"] >= 10
    assert not any(report["close_warnings"] for report in job.reports.values())


@pytest.mark.parametrize("arguments", [("200", "1", "3"), more(("20000", "2"))])
def test_others_compute_the_blocks_of_killed_ranks(tmp_path, arguments, fault_tolerant):
    victims = list(map(int, arguments[1:]))
    job = run(
        tmp_path,
        4,
        "sharing.py",
        *("killed", *arguments),
        options=fault_tolerant,
    )
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == set(range(4)) - set(victims)
    job.of_all("digest")
    assert job.of_all("steps") == 36
    warnings = " ".join(job.reports[0]["close_warnings"])
    assert f"without ranks {victims}" in warnings


@pytest.mark.parametrize("way", ["jit", more("host")])
def test_others_continue_with_the_blocks_that_they_hold(tmp_path, way):
    """All holders of some blocks are stopped. Meanwhile sums lack the blocks that only stopped ranks hold."""
    job = run(tmp_path, 4, "partial.py", way, "1", "2")
    succeed(job, 4)
    assert job.of_all("steps") == 32
    assert 16 <= job.of_all("partial") < 32
    assert job.reports[0]["approximate"] == job.reports[0]["partial"]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("shared", "SIGKILL"), ("coded", "SIGKILL"), more("shared", "SIGSTOP")],
)
def test_a_fault_between_a_sum_and_its_gradient(tmp_path, strategy, fault):
    """The gradient of a function of the sum is still exact, with the same bits on all
    ranks.
    """
    dies = fault == "SIGKILL"
    options = ()
    if dies:
        needs_fault_tolerance()
        options = ("--with-ft", "ulfm")
    job = run(tmp_path, 4, "composing.py", strategy, fault, options=options)
    assert set(job.reports) == set(range(3 if dies else 4)), job.stderr[-8000:]
    assert f"rank 3: gets {fault} between the sum and its gradient" in job.stderr
    assert dies or job.status == 0, job.stderr[-8000:]
    job.of_all("digest")
    assert job.of_all("steps") == 12


@pytest.mark.parametrize("victim", [3, more(0)])
def test_an_exception_in_a_block_is_caught(tmp_path, victim):
    """Only the rank with the exception loses the step."""
    job = run(tmp_path, 4, "sharing.py", "continues", "200", str(victim))
    assert job.status == 0, job.stderr[-8000:]
    assert f"injected into rank {victim}" in job.stderr
    assert job.of_all("steps") == 36
    del job.reports[victim]
    job.of_all("digest")


@pytest.mark.parametrize("way", ["uncaught", *map(more, ["closes", "exits", "ends"])])
def test_a_rank_leaves_a_group_with_shared_work(tmp_path, way):
    job = run(tmp_path, 4, "sharing.py", way, "200", "3", python=BARE)
    assert (job.status not in (0, 124)) == (way == "uncaught"), job.stderr[-8000:]
    assert ("injected into rank 3" in job.stderr) == (way in ("uncaught", "closes"))
    assert (3 in job.reports) == (way in ("closes", "ends"))
    job.reports.pop(3, None)
    assert set(job.reports) == {0, 1, 2}
    job.of_all("digest")
    assert job.of_all("steps") == 36


@pytest.mark.parametrize(
    ("way", "words"),
    [("closes", "rank 0 closed the group"), more("uncaught", "rank 0 failed: Jax")],
)
def test_a_root_leaves_a_group_with_shared_work(tmp_path, way, words):
    """The other ranks end their step without the root, and get an error in the next."""
    job = run(tmp_path, 4, "sharing.py", way, "200", "0", python=BARE)
    assert job.status not in (0, 124)
    assert words in job.stderr, job.stderr[-8000:]
    done = np.fromfile(tmp_path / "board", np.int64)
    assert f"{way} in a block of step {done[1]}\n" in job.stderr
    assert done.tolist() == [done[1] - 1, done[1], done[1], done[1]]


# Leaving.


@pytest.mark.parametrize("victim", [more(4), 1])
def test_late_ranks_get_their_results_before_others_leave(tmp_path, victim):
    job = run(tmp_path, 5, "leaving.py", "late", str(victim))
    succeed(job, 5)
    assert not any(report["close_warnings"] for report in job.reports.values())


@pytest.mark.parametrize("way", [more("deleted"), "in-flight"])
def test_a_group_that_is_never_closed(tmp_path, way):
    succeed(run(tmp_path, 5, "leaving.py", way, "4"), 5)


def test_processes_that_end_with_a_round_in_flight(tmp_path):
    # other ranks read their memory completely, or do not use it
    job = run(tmp_path, 7, "ending.py", python=BARE)
    assert job.status not in (0, 124)
    assert "injected into rank 3" in job.stderr
    assert set(job.reports) == {0, 1, 6}, job.stderr[-8000:]
    job.of_all("digest")


@pytest.mark.parametrize("victim", [4, more(1)])
def test_a_rank_that_exits_early(tmp_path, victim):
    job = run(tmp_path, 5, "leaving.py", "exit", str(victim))
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")


@pytest.mark.parametrize(
    ("way", "python"),
    [
        ("interrupt", BARE),
        more("interrupt", MPI4PY),
        more("exit-1", BARE),
        more("exit-1", MPI4PY),
    ],
)
def test_a_rank_that_is_interrupted_or_exits_with_an_error(tmp_path, way, python):
    job = run(tmp_path, 5, "leaving.py", way, "4", python=python)
    assert job.status not in (0, 124)
    if python == BARE:
        assert set(job.reports) == {0, 1, 2, 3}
        job.of_all("digest")


@pytest.fixture
def fault_tolerant():
    """Return the mpirun options with which MPI survives the death of a rank."""
    return needs_fault_tolerance()


def test_a_stopped_root_is_an_error_at_the_deadline(tmp_path):
    job = run(tmp_path, 5, "root.py", "stopped")
    assert set(job.reports) >= {1, 2, 3, 4}
    for rank in (1, 2, 3, 4):
        error = job.reports[rank]["error"]
        assert "DeadlineExceeded: round 5 was not decided within 2 s: rank" in error
        assert "0, which do" in error


def test_a_killed_root_is_an_error_where_mpi_is_fault_tolerant(
    tmp_path, fault_tolerant
):
    job = run(tmp_path, 5, "root.py", "killed", options=fault_tolerant)
    for rank in (1, 2, 3, 4):
        error = job.reports[rank]["error"]
        assert re.search("the root, rank 0, is dead|0, which do(es)? not answer", error)


@pytest.mark.parametrize("who", [more("inside"), "outside"])
def test_healthy_ranks_come_to_their_end(tmp_path, who):
    job = run(tmp_path, 5, "healthy.py", who)
    assert job.status == 0, job.stderr[-8000:]
    assert job.of_all("end")
    assert set(job.reports) == set(range(5))
    assert "without ranks [3]" in str(job.reports[1]["close_warnings"])
    assert ("waits in MPI_Finalize for ranks [3]" in job.stderr) == (
        who == "outside"
    ), job.stderr[-8000:]


@pytest.mark.parametrize("way", ["atexit", more("raise")])
def test_a_healthy_rank_in_a_function_of_atexit_is_not_cut_off(tmp_path, way):
    job = run(tmp_path, 5, "healthy.py", way, python=BARE)
    assert "ends the job without ranks [4]" in job.stderr
    assert set(job.reports) == {0, 1, 2, 3}
    assert job.of_all("end")
    assert job.status == (way == "raise"), job.stderr[-8000:]


@pytest.mark.parametrize("victim", [more(4), 1, more(2)])
def test_a_killed_rank_where_mpi_is_fault_tolerant(tmp_path, victim, fault_tolerant):
    job = run(
        tmp_path,
        5,
        "leaving.py",
        *("killed", str(victim)),
        options=fault_tolerant,
    )
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")
    (warning,) = job.reports[0]["close_warnings"]
    assert f"without ranks [{victim}]" in warning
    # no rank below the victim needs anything, so the job does not wait for the victim
    if victim != 1:
        assert "a rank below has given them up" in warning
    assert "Exception" not in job.stderr


def recover(tmp_path, options, way, *victims, start=(), status=0):
    """Run the training that continues without its dead; return the finished job."""
    job = run(
        *(tmp_path, 7, "recovering.py", way, *victims),
        options=options,
        limit=LIMIT,
        start=start,
    )
    assert job.status == status, job.stderr[-8000:]
    return job


def as_readme_does(ranks, limit):
    """Return the beginning of the command line."""
    needs_fault_tolerance()
    options = "--ft", "--timeout", f"{limit * slowness():.0f}"
    return sys.executable, "-m", "jaxcoded", "run", "-n", str(ranks), *options


def played(tmp_path, program, ranks=4, arguments=()):
    """Run a program like README's on ``ranks`` ranks."""
    (tmp_path / "program.py").write_text(program)
    return subprocess.run(
        [*as_readme_does(ranks, SMALL_LIMIT), tmp_path / "program.py", *arguments],
        env=settings(SMALL_LIMIT),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )


def trained(job, without, *sizes):
    """Check that the live ranks continued together, and compiled the step once for each
    group.
    """
    assert set(job.reports) == set(range(7)) - without, job.stderr[-8000:]
    sizes = 7, *sizes
    assert job.of_all("compiled") == list(sizes)
    assert job.of_all("size") == sizes[-1]
    ranks = {report["rank"] for report in job.reports.values()}
    assert len(ranks) == len(job.reports) and ranks <= set(range(sizes[-1]))
    job.of_all("digest")
    assert max(report["error"] for report in job.reports.values()) < 1e-12


@pytest.mark.parametrize(
    ("way", "victims", "sizes"),
    [
        more("trains", ["3"], [6]),
        more("trains", ["1"], [6]),
        more("trains", ["3,6", "1"], [5, 4]),
        ("shared", ["3,6", "1"], [5, 4]),
    ],
)
def test_live_ranks_continue_without_the_dead(
    tmp_path, fault_tolerant, way, victims, sizes
):
    job = recover(tmp_path, fault_tolerant, way, *victims)
    trained(job, {int(rank) for words in victims for rank in words.split(",")}, *sizes)
    assert job.of_all("followed")
    heard = " ".join(str(report["heard"]) for report in job.reports.values())
    assert "is dead, as MPI reports" in heard


def test_as_many_ranks_die_as_the_plan_tolerates(tmp_path, fault_tolerant):
    """Three ranks die in one round, below two parents, and one more later: the group is
    not recovered.
    """
    job = recover(tmp_path, fault_tolerant, "continues", "2,4,5", "3")
    trained(job, {2, 3, 4, 5})
    assert job.of_all("steps") == job.of_all("rounds") == 60  # no step is repeated
    for parent, children in (0, {2, 3}), (1, {4, 5}):
        heard = str(job.reports[parent]["heard"])
        named = re.findall(r"rank (\d+) is dead, as MPI reports", heard)
        assert sorted(map(int, named)) == sorted(children), heard


@pytest.mark.parametrize(
    ("way", "words"),
    [
        more(
            "explicit",
            "ValueError: no plan for the 6 ranks that live: Coded(parents=",
        ),
        more(
            "few", "ValueError: no plan for the 6 ranks that live: size=6 ranks are too"
        ),
        ("stopped", "CodedError: ranks [6] are alive, but have not called recovered"),
    ],
)
def test_ranks_that_cannot_continue_get_an_error_and_live(
    tmp_path, fault_tolerant, way, words
):
    job = recover(tmp_path, fault_tolerant, way, "3")
    trained(job, {3}, 6)
    late = {6} if way == "stopped" else set()
    for rank in set(job.reports) - late:
        (text,) = job.reports[rank]["said"]
        assert text.startswith(words)


def test_more_dead_than_a_parent_tolerates(tmp_path, fault_tolerant):
    job = recover(tmp_path, fault_tolerant, "beyond", "1,2")
    trained(job, {1, 2}, 5)
    (text,) = job.of_all("said")
    lacks = "rank 0 cannot rebuild its sum, as it lacks rank 1, which is dead, rank 2, which is dead"
    below = ", and what any below them have; any 1 of its 2 children"
    assert f"TooManyErasures: round 11: {lacks}{below}" in text
    assert "go on with group.recovered()" in text


# Lengths in floats: around the longest message within an announcement (from the same host, or from another host),
# around a piece, and around the shortest sum in sections.
AT_MOST = [str(most // 4) for most in (1 << 10, 32 << 10, 256 << 10, (1 << 20) - 4)]
BEYOND = [str(int(most) + 1) for most in AT_MOST]


@pytest.mark.parametrize(
    ("when", "sizes"),
    [
        ("known", BEYOND),
        more("known", AT_MOST),
        more("at once", AT_MOST),
        more("at once", BEYOND),
        more("before", AT_MOST),
        more("before", BEYOND),
    ],
)
def test_the_death_of_a_needed_rank(tmp_path, fault_tolerant, when, sizes):
    places = 4
    ranks = places * len(sizes)
    job = run(
        *(tmp_path, ranks, "announced.py", when, *sizes),
        options=fault_tolerant,
        limit=LIMIT,
    )
    assert set(job.reports) == {rank for rank in range(ranks) if rank % places != 1}
    for root in range(0, ranks, places):
        text, *others = (job.reports[root + place]["outcome"] for place in (0, 2, 3))
        assert others == [text] * 2
        if when != "before" and 4 * int(sizes[root // places]) <= 32 << 10:
            assert text == "sum" or text.startswith("TooManyErasures: round 2: "), text
            continue
        # the announcement did not include the message
        assert text.startswith("TooManyErasures: round 2: rank 0 cannot rebuild"), text
        assert "it lacks rank 1, which is dead" in text
    # the engine does not poll the network for a message that will never come
    for report in job.reports.values():
        assert report["wake_ups"] < 500


@pytest.mark.parametrize(
    ("way", "victims", "sizes"),
    [
        more("root", ["0", "1"], [6, 5]),
        more("root", ["0,3"], [5]),
        ("root-shared", ["0"], [6]),
        more("root-holds", ["0"], [6]),
        more("root-donated", ["0"], [6]),
        ("behind", ["0"], [6]),
    ],
)
def test_live_ranks_continue_without_the_root(
    tmp_path, fault_tolerant, way, victims, sizes
):
    for attempt in range(4):
        (where := tmp_path / str(attempt)).mkdir()
        job = recover(where, fault_tolerant, way, *victims)
        failed_at = {rank: each["failed_at"][0] for rank, each in job.reports.items()}
        # rank 2 finds results and the root's death as it wakes, and may handle the
        # results first
        if way != "behind" or failed_at[2] < failed_at[1]:
            break
    # a rank that must die with the root may lack its last result, and dies after the
    # other ranks have continued
    also = [6] if victims == ["0,3"] and 6 in job.of_all("compiled") else []
    trained(
        job,
        {int(rank) for words in victims for rank in words.split(",")},
        *also,
        *sizes,
    )
    for report in job.reports.values():
        assert "cannot be decided: the root, rank 0, is dead" in report["said"][0]
        assert report["read"] == ([8] if way == "root-donated" else [])
    assert job.of_all("alike")[0] == (len(set(failed_at.values())) == 1)
    if way == "behind":
        assert failed_at[2] < failed_at[1]
        assert job.reports[1]["rank"] == 0 and job.reports[2]["rank"] == 1
        assert "first send the root's state to all ranks" in job.of_all("too_early")[0]


def words_of(victims):
    return {
        int(rank) for words in victims for rank in words.partition(":")[0].split(",")
    }


@pytest.mark.parametrize(
    ("way", "victims", "sizes"),
    [
        more("trains", ["3:lock", "1:stopped"], [6, 5]),
        more("trains", ["1:device"], [6]),
        more("trains", ["3,6:loop", "1:lock"], [5, 4]),
        more("shared", ["3:loop", "1,2:stopped"], [6, 4]),
        ("root", ["0:loop"], [6]),
        more("root", ["0:stopped"], [6]),
        more("root-shared", ["0,3:stopped"], [5]),
        more("beyond", ["1,2:stopped"], [5]),
    ],
)
def test_a_rank_that_is_stuck_is_put_out(tmp_path, fault_tolerant, way, victims, sizes):
    job = recover(tmp_path, fault_tolerant, way, *victims)
    trained(job, words_of(victims), *sizes)
    heard = " ".join(str(report["heard"]) for report in job.reports.values())
    for rank in words_of(victims):
        assert (
            heard.count(f", rank {rank}, which is alive but has not called recovered")
            == 1
        )
    for report in job.reports.values():
        assert all("DeadlineExceeded" in words for words in report["said"])
        assert bool(report["said"]) == (way not in ("trains", "shared"))


@pytest.mark.parametrize(
    ("way", "victims", "sizes"),
    [
        ("trains", ["3:leaves", "1:leaves busy"], [6, 5]),
        more("shared", ["3,6:leaves busy", "1:leaves"], [5, 4]),
        more("root", ["0:leaves"], [6]),
    ],
)
def test_a_rank_leaves_in_order_on_a_signal(tmp_path, way, victims, sizes):
    start = as_readme_does(7, LIMIT)
    job = recover(tmp_path, (), way, *victims, start=start)
    trained(job, words_of(victims), *sizes)
    took, notice = job.reports[5]["took"], job.reports[5]["notice"]
    assert set(map(int, took)) == words_of(victims)
    assert max(took.values()) < notice
    # the other ranks, too, have status 0, or they would be listed
    assert not re.search(r"ranks? \d.*: (status|killed by|no report)", job.stderr)
    assert job.stderr.count("leaves its groups, as it received SIGTERM") == len(
        words_of(victims)
    )
    assert "Traceback" not in job.stderr
    if way != "root":  # no rank was missing: parents report at most that the rank left
        heard = [line for report in job.reports.values() for line in report["heard"]]
        assert all("has closed the group" in line for line in heard)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("", ""),
        more("another user", "Operation not permitted"),
        more("another namespace", "no rank in this call can see it"),
    ],
)
def test_a_rank_that_is_alive_but_stuck(tmp_path, fault_tolerant, why, words):
    job = run(tmp_path, 3, "alive_but_stuck.py", why, options=fault_tolerant)
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == {0, 1, 2} - (set() if why else {2})
    assert job.of_all("size") == len(job.reports)
    for rank, report in job.reports.items():
        late, *then = report["said"]
        assert "rank 2" in late
        if rank == 2:
            (then,) = then
            assert then.startswith(
                "rank 2 has called this too late for the other ranks, which wanted"
            )
        elif why:
            (then,) = then
            assert then.startswith("ranks [2] are alive, but have not called recovered")
            assert "They could not be put out: rank 2 (process " in then
            assert then.endswith(words)


@pytest.mark.parametrize("informed", ["2,3", *map(more, ("", "1", "2", "1,2,3,4"))])
def test_the_root_dies_while_it_names_the_survivors(tmp_path, fault_tolerant, informed):
    job = run(
        tmp_path, 6, "roll.py", "regroup", informed, options=fault_tolerant, limit=LIMIT
    )
    assert set(job.reports) == {1, 2, 3, 4}, job.stderr[-8000:]
    assert job.of_all("survivors") == [3, 1, 2, 4]
    assert job.of_all("size") == 4
    assert {rank for rank, report in job.reports.items() if report["behind"]} == {3}


@pytest.mark.parametrize("informed", ["1,2", more(""), more("3")])
def test_the_root_dies_while_it_reports_that_all_are_alive(
    tmp_path, fault_tolerant, informed
):
    """Ranks that got the root's message, and ranks that did not, meet nevertheless."""
    job = run(
        tmp_path, 5, "roll.py", "stay", informed, options=fault_tolerant, limit=LIMIT
    )
    assert set(job.reports) == {1, 2, 3, 4}, job.stderr[-8000:]
    assert job.of_all("survivors") == [3, 1, 2, 4]
    stayed = {rank for rank, report in job.reports.items() if report["stayed"]}
    assert stayed == {int(rank) for rank in informed.split(",") if rank}


@pytest.mark.parametrize(
    ("way", "size", "gone", "status"),
    [
        more("late", 5, [], 0),
        ("late without one", 4, [4], 0),
        more("stops", 4, [4], 0),
        more("fails", 4, [0], 1),
        ("exits", 4, [4], 7),
        more("in vain", 5, [], 0),
    ],
)
def test_live_ranks_meet_at_last(tmp_path, way, size, gone, status):
    """Live ranks meet, however often some have given up before."""
    start = as_readme_does(5, LIMIT)
    job = run(tmp_path, 5, "meeting.py", way, limit=LIMIT, start=start)
    assert job.status == status, job.stderr[-8000:]
    assert set(job.reports) == set(range(5)) - set(gone), job.stderr[-8000:]
    assert job.of_all("size") == size
    assert job.of_all("same") == (size == 5)
    if way.startswith("late"):
        for rank in range(1, 4):
            assert (
                "rank 0, which coordinates the recovery" in job.reports[rank]["said"][0]
            )
    assert "has killed" not in job.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["successor", "asked for"])
def test_a_new_root_dies_before_it_hands_its_state_on(tmp_path, way):
    """The group then uses the state of the other ranks that have done the most rounds."""
    start = as_readme_does(5, LIMIT)
    job = run(tmp_path, 5, "meeting.py", way, limit=LIMIT, start=start)
    if way == "asked for":
        assert job.of_all("refused") == [True, True]
    assert set(job.reports) == {2, 3, 4}, job.stderr[-8000:]
    assert job.of_all("alike") is False
    assert [job.reports[rank]["rank"] for rank in (2, 3, 4)] == [1, 0, 2]


@pytest.mark.exhaustive
def test_a_group_that_rounds_have_overtaken_is_not_taken(tmp_path):
    """The other ranks have given up the new group, and done more rounds in the old group. In the new group, ranks would
    lack these rounds' sums.
    """
    start = as_readme_does(6, LIMIT)
    job = run(tmp_path, 6, "meeting.py", "overtaken", limit=LIMIT, start=start)
    assert job.status == 1, job.stderr[-8000:]
    assert set(job.reports) == {0, 1, 2, 3, 4}, job.stderr[-8000:]
    assert "rounds of the old group were decided since then" in job.reports[1]["said"]
    for rank in (0, 2, 3, 4):
        text = job.reports[rank]["said"][0]
        assert "rounds of the old group were decided since then" in text
        assert job.reports[rank]["size"] == 4


def test_a_program_that_catches_its_error_is_not_killed(tmp_path):
    """The program has left the group, and may continue with anything else."""
    start = as_readme_does(3, SMALL_LIMIT)
    job = run(tmp_path, 3, "meeting.py", "caught", start=start)
    assert job.status == 0, job.stderr[-8000:]
    assert job.of_all("lives") is True
    for rank in (0, 2):
        text = job.reports[rank]["said"]
        assert text.startswith(
            "ranks [1] are alive, but have not called recovered: ranks [1] have closed"
        )
    assert "has killed" not in job.stderr


def assert_exact(job):
    """Check that each rank's checkpoint and final parameters are exact."""
    errors = {rank: report["errors"] for rank, report in job.reports.items()}
    assert np.max(list(errors.values())) < 1e-12, (errors, job.stderr[-8000:])


def test_a_job_that_is_started_again_has_all_ranks(tmp_path):
    job = run(tmp_path, 3, "restarting.py", "0")
    assert job.status != 0 and not job.reports
    job = run(tmp_path, 4, "restarting.py", "-1")
    assert job.status == 0, job.stderr[-8000:]
    assert (job.of_all("began"), job.of_all("size")) == (10, 4)
    assert_exact(job)


def test_a_job_that_lacks_ranks_ends_with_an_error_for_a_restart(tmp_path):
    """With `--ft` the job would end with status 0."""
    start = as_readme_does(4, SMALL_LIMIT)
    job = run(tmp_path, 4, "restarting.py", "2", "whole", start=start)
    assert job.status != 0 and not job.reports
    # The first of the three ends the job, perhaps before the other ranks have reported.
    assert "RuntimeError: 3 of 4 ranks are left" in job.stderr
    job = run(tmp_path, 4, "restarting.py", "-1", "whole", start=start)
    assert job.status == 0, job.stderr[-8000:]
    assert (job.of_all("began"), job.of_all("size")) == (15, 4)
    assert_exact(job)


def extend(tmp_path, ranks, size, option, *events, status=0):
    """Run the training that takes in ranks; return the finished job."""
    start = as_readme_does(ranks, LIMIT)
    job = run(
        *(tmp_path, ranks, "extending.py", option, *events), limit=LIMIT, start=start
    )
    assert job.status == status, job.stderr[-8000:]
    assert set(job.reports) == set(range(size)), job.stderr[-8000:]
    assert job.of_all("size") == size
    job.of_all("digest")
    assert max(each["error"] for each in job.reports.values()) < 1e-12
    for report in job.reports.values():  # one report for each group
        assert report["compiled"] == report["sizes"]
    return job


@pytest.mark.parametrize(
    ("ranks", "option", "events", "sizes"),
    [
        (4, "code", ["kill 2", "join 1", "kill 3"], [4, 3, 4, 3]),
        more(4, "shared", ["kill 2", "join 1", "kill 3", "join 1"], [4, 3, 4, 3, 4]),
        more(5, "code", ["kill 3,4", "join 2", "kill 4", "join 1"], [5, 3, 5, 4, 5]),
        more(3, "code", ["join 3", "join 1"], [3, 6, 7]),
        more(4, "code", ["leave 3", "join 1", "leave 3", "join 1"], [4, 3, 4, 3, 4]),
        more(4, "code", ["roots 2", "kill 1", "join 1"], [4, 6, 5, 6]),
        more(3, "code", ["dies enter", "kill", "join 1"], [3, 5, 4, 5]),
    ],
)
def test_ranks_join_a_group_that_runs(tmp_path, ranks, option, events, sizes):
    job = extend(tmp_path, ranks, sizes[-1], option, *events)
    longest = max((report["sizes"] for report in job.reports.values()), key=len)
    assert longest == sizes


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["code", "shared"])
def test_all_ranks_are_replaced_one_after_the_other(tmp_path, option):
    """All ranks, even the root, are replaced three times: at the end a new rank is the
    root.
    """
    events = ["kill 0", "join 1"] * 4
    job = extend(tmp_path, 4, 4, option, *events)
    assert all(report["joined"] for report in job.reports.values())


def failed(job):
    """Return the old ranks' report on the first attempt, which is the same on all old ranks."""
    texts = {
        report["said"][0] for report in job.reports.values() if not report["joined"]
    }
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "words", "status"),
    [
        ("exit 1", "one of them has ended before it called", 1),
        ("exit 0", "one of them has ended before it called", 0),
        ("ends", "one of them has ended before it called", 0),
        ("dies hello", "one of them has ended before it called", 0),
        ("dies open", "no rank has joined: a new or an old rank", 0),
        ("alone", "one of them has ended before it called", 1),
        ("hangs", "numbers [1, 2] of them have not called", 0),
        ("refuses", "ranks 3, 4: extended=[3, 2]", 0),
        ("differs 2", "ranks called extended with different arguments", 0),
    ],
)
def test_ranks_that_fail_to_join_do_not_change_the_group(tmp_path, way, words, status):
    job = extend(tmp_path, 3, 4, "code", way, "join 1", status=status)
    assert words in failed(job)
    assert "Exception: MPI_ERR" not in job.stderr  # the error of the other rank
    if way == "exit 1":  # the job reports how they end
        assert re.search("ranks? 3(-4)?: status 1", job.stderr), job.stderr[-2000:]


def test_a_rank_that_dies_while_others_connect_with_it(tmp_path):
    job = extend(tmp_path, 3, 4, "code", "dies connect", "join 1")
    texts = {
        report["said"][0] for report in job.reports.values() if not report["joined"]
    }
    starter = "none of the 2 new ranks has joined: number 1 of the started processes has not joined: it has died"
    assert sum(starter in text for text in texts) == 1
    assert all("this group continues unchanged" in text for text in texts)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("2 ask", "rank 2 has died: call recovered first"),
        ("2 start", "no rank has joined: a new or an old rank has died"),
        ("2 connect", "no rank has joined: a new or an old rank has died"),
        ("0 start", "rank 0, which starts ranks that join, has died"),
        ("0 connect", "no rank has joined: a new or an old rank has died"),
        ("2 ready", "no rank has joined: a new or an old rank has died"),
        ("0 ask", "rank 0, which starts ranks that join, has died"),
        ("0 ready", "no rank has joined: a new or an old rank has died"),
    ],
)
def test_a_rank_that_dies_while_others_join(tmp_path, way, words):
    job = extend(tmp_path, 4, 4, "code", f"loses {way}", "join 1")
    assert words in failed(job)


def test_a_rank_that_leaves_by_an_exception_while_others_join(tmp_path):
    job = extend(tmp_path, 3, 4, "code", "interrupts 2", "join 1")
    texts = {rank: report["said"] for rank, report in job.reports.items()}
    assert texts[2] == ["ValueError: interrupted"] and not texts[3]
    for rank in (0, 1):
        assert "or other ranks have failed and report why" in texts[rank][0]


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_while_others_join(tmp_path):
    events = "loses 2 connect stops", "join 1"
    # the rank that should join has waited too long, and ends with an error
    job = extend(tmp_path, 4, 4, "code", *events, status=1)
    assert "ranks [2] are alive, but" in failed(job)


@pytest.mark.exhaustive
def test_sums_wait_for_the_state_of_ranks_that_join(tmp_path):
    job = extend(tmp_path, 3, 5, "forgets", "join 2")
    for report in job.reports.values():
        assert "ranks have joined that have no state yet" in report["said"][0]


def test_no_ranks_join_where_the_launcher_would_not_forgive_their_death(
    tmp_path, fault_tolerant
):
    job = run(
        *(tmp_path, 3, "extending.py", "code", "join 1"),
        options=fault_tolerant,
        python=BARE,
    )
    assert job.status == 0 and set(job.reports) == {0, 1, 2}
    (text,) = job.of_all("said")
    assert "start the job with jaxcoded run --ft" in text


# Open MPI 5: a new rank may die, and MPI_Finalize has no barrier, which might not end
# with dead ranks
JOINABLE = (
    *("--prtemca", "state_base_recoverable", "1"),
    *("--mca", "async_mpi_finalize", "1"),
)


def joining(directory, options, way, limit=SMALL_LIMIT):
    """Return the status of a job with one added rank, the number of printed sums, and
    the output.
    """
    program = [sys.executable, FAULTS / "joining.py", directory, way]
    start = [sys.executable, MPIRUN, *options, "-n"]
    pipes = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    pipes["env"] = settings(limit)
    job = subprocess.Popen([*start, "3", *program], **pipes)
    if way == "connects":
        while not (directory / "port").exists() and job.poll() is None:
            time.sleep(0.05)
        if job.poll() is None:
            subprocess.run([*start, "1", *program, "joins"], check=False, **pipes)
    text = job.communicate()[1]
    return job.returncode, text.count("sum of "), text


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "sums"),
    [
        ("spawned", 4),
        ("after a death", 3),
        ("old dies", 3),
        ("new dies", 3),
        ("again", 4),
    ],
)
def test_mpi_can_start_one_more_rank(tmp_path, fault_tolerant, way, sums):
    *result, text = joining(tmp_path, (*fault_tolerant, *JOINABLE), way)
    assert result == [0, sums], text[-8000:]


@pytest.mark.exhaustive
def test_the_death_of_a_rank_that_has_joined_fails_the_job(tmp_path, fault_tolerant):
    """The other ranks continue, but without an option the launcher counts the death as
    a failure.
    """
    options = *fault_tolerant, *JOINABLE[3:]
    *result, text = joining(tmp_path, options, "new dies")
    assert result == [137, 3], text[-8000:]


def as_known(result, text, known):
    """Check a known failure by its output. Any other failure is unexpected."""
    if result not in ([0, 3], known):
        pytest.fail(f"{result}: {text[-8000:]}")
    assert result == [0, 3]


# If one of these tests passes, ranks can join that no other rank has started.
not_in_open_mpi_5 = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="Open MPI 5.0, see docs/open-mpi.md"
)


@pytest.mark.exhaustive
@not_in_open_mpi_5
def test_a_rank_of_another_mpirun_joins(tmp_path, fault_tolerant):
    *result, text = joining(tmp_path, fault_tolerant, "connects", limit=10)
    as_known(result, text, [124, 0])


@pytest.mark.exhaustive
@not_in_open_mpi_5
def test_a_rank_of_another_mpirun_joins_by_a_daemon(tmp_path, fault_tolerant):
    """This follows Open MPI's manual. Its mpirun then has a segmentation fault."""
    own = pathlib.Path(sys.executable).with_name("prte")
    prte = shutil.which(own if own.exists() else "prte")
    if prte is None:
        pytest.skip("Open MPI's prte is not installed")
    uri = tmp_path / "uri"
    as_root = ("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM")
    allowed = dict.fromkeys(as_root, "1") if os.geteuid() == 0 else {}
    command = [prte, "--report-uri", uri]
    daemon = subprocess.Popen(command, env=os.environ | allowed, stdout=subprocess.PIPE)
    try:
        until = time.monotonic() + 10 * slowness()
        while not (uri.exists() and uri.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        if not uri.exists() or daemon.poll() is not None:
            pytest.fail("prte does not run")
        options = *fault_tolerant, "--dvm", f"file:{uri}"
        *result, text = joining(tmp_path, options, "connects", limit=20)
        as_known(result, text, [139, 0])
    finally:
        daemon.terminate()
        daemon.communicate()


def test_a_rank_that_dies_while_the_others_recover(tmp_path, fault_tolerant):
    job = recover(tmp_path, fault_tolerant, "again", "3")
    trained(job, {3, 6}, 5)
    (text,) = job.of_all("said")
    assert text.startswith(
        "CodedError: one more rank died, or did not take part, while the ranks made"
    )


@pytest.mark.exhaustive
def test_ranks_that_wait_in_vain_while_they_recover(tmp_path, fault_tolerant):
    """Open MPI may leave ranks in MPI_Comm_dup this way."""
    job = recover(tmp_path, fault_tolerant, "waits", "3")
    trained(job, {3}, 6)
    (text,) = job.of_all("said")
    assert text.startswith(
        "CodedError: one more rank died, or did not take part, while the ranks made"
    )


@pytest.mark.exhaustive  # a minute of processor time, since survivors poll in MPI
def test_a_rank_that_is_stopped_while_the_others_recover(tmp_path, fault_tolerant):
    """MPI would wait for the rank for ever."""
    job = recover(tmp_path, fault_tolerant, "stops", "3")
    trained(job, {3, 6}, 5)
    (text,) = job.of_all("said")
    assert text.startswith(
        "CodedError: one more rank died, or did not take part, while the ranks made"
    )


def test_a_root_that_wakes_when_others_have_missed_its_round(tmp_path, fault_tolerant):
    """No rank is dead, but `recovered` does not return the old group: ranks that missed its round could do no more
    rounds there.
    """
    job = recover(tmp_path, fault_tolerant, "wakes", "0:wakes")
    trained(job, set(), 7)
    for rank in range(1, 7):
        # rank 0 wakes as soon as one rank has missed it, and may tell the other ranks
        # itself
        assert "was not decided within" in job.reports[rank]["said"][0]


def test_a_rank_whose_program_has_failed_is_left_behind(tmp_path):
    """Otherwise the rank would wait at its end for the other ranks, and MPI for this
    rank.
    """
    start = as_readme_does(7, LIMIT)
    job = recover(tmp_path, (), "trains", "3:raises", "6", start=start, status=1)
    trained(job, {3, 6}, 6, 5)
    assert job.stderr.count("ArithmeticError: injected") >= 1
    assert "has killed" not in job.stderr
    assert "rank 3: status 1" in job.stderr


LEFT = """
import os, pathlib, signal, sys, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxcoded
left = pathlib.Path("left")
group = jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1))
weights = group.batch(4).weights
for step in range(20):
    if step == 5 and group.rank == 2:
        {fault}
    total = jax.block_until_ready(jaxcoded.coded_allreduce(jnp.ones(3), group, weights))
while not left.exists():  # rank 2 may be late, but is not to be stuck
    time.sleep(0.01)
try:
    group = group.recovered(timeout={seconds:.2f}, put_out={put_out})
    print(group.size, flush=True)
except jaxcoded.CodedError as error:
    print(error, flush=True)
group.close(2.0)
"""


@pytest.mark.parametrize(
    ("fault", "status", "put_out", "text"),
    [
        ("left.touch(); raise ValueError('mine')", 1, False, "3"),
        more(
            "group.close(); left.touch(); os.read(0, 1); sys.exit()",
            0,
            False,
            "ranks [2] are alive, but have not called recovered: ranks [2] have closed the group",
        ),
        ("group.close(); left.touch(); signal.pause()", 0, True, "3"),
        # Python does not report this error
        more("left.touch(); sys.exit(1)", 0, True, "3"),
    ],
)
def test_a_rank_that_has_left_does_not_keep_the_others(
    tmp_path, fault, status, put_out, text
):
    """If an error has ended the rank's program, the other ranks leave the rank behind. An error that Python reports
    gives the job its status.
    """
    seconds = 5.0 * slowness()
    job = played(tmp_path, LEFT.format(fault=fault, seconds=seconds, put_out=put_out))
    assert job.returncode == status, job.stderr
    assert ("has killed" in job.stderr) == put_out
    lines = re.findall(r"<stdout>: (.*)", job.stdout)
    assert len(lines) == 3 and all(line.startswith(text) for line in lines), job.stdout
    assert ("rank 2: status 1" in job.stderr) == status, job.stderr


GIVEN = """
import os, time
from mpi4py import MPI
import jaxcoded
star = jaxcoded.Coded(parents=[-1, 0, 0, 0])
group = jaxcoded.CodedGroup(MPI.COMM_WORLD, star)
if group.rank == 2:
    os.kill(os.getpid(), 9)
said = ""
while not said:
    time.sleep(0.05)
    try:
        assert group.recovered(timeout={seconds:.2f}) is group
    except ValueError as error:
        said = str(error)
print(said, flush=True)
group = group.recovered(strategy=jaxcoded.Shared())
assert group.size == 3
group.close()
"""


def test_a_strategy_for_just_its_ranks_is_an_error_that_asks_for_another(tmp_path):
    job = played(tmp_path, GIVEN.format(seconds=60 * slowness()))
    assert job.returncode == 0, job.stderr
    lines = re.findall(r"<stdout>: (.*)", job.stdout)
    assert len(lines) == 3, job.stdout
    for line in lines:
        assert "no plan for the 3 ranks that live: Coded(parents=" in line
        assert "names the parents or codes of single ranks" in line


def test_an_error_before_the_first_group_ends_the_job(tmp_path):
    program = """
from mpi4py import MPI
import jaxcoded
if MPI.COMM_WORLD.rank == 2:
    raise ValueError("mine")
jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded())
"""
    job = played(tmp_path, program)
    assert job.returncode == 1, job.stderr
    assert "ValueError: mine" in job.stderr and "rank 2: status 1" in job.stderr


MIXED = """
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxcoded
group = jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=0))
for first in range({ranks}):
    try:
        group.extended(1, timeout=5.0) if group.rank == first else group.recovered(timeout=5.0)
        print("nothing", flush=True)
    except jaxcoded.CodedError as error:
        print(f"{{group.rank == first}} {{error}}", flush=True)
    assert group.recovered(timeout={seconds:.1f}) is group
total = jaxcoded.coded_allreduce(jnp.ones(3), group)
print(total.tolist(), flush=True)
group.close()
"""


def test_ranks_that_want_others_to_join_while_others_recover(tmp_path):
    """No rank mistakes a call of the other ranks for its own call."""
    job = played(tmp_path, MIXED.format(ranks=3, seconds=60 * slowness()), ranks=3)
    assert job.returncode == 0, job.stderr
    lines = re.findall(r"<stdout>: (.*)", job.stdout)
    texts = sorted(line.partition(":")[0] for line in lines)
    theirs = "has called this too late for the other ranks, or the other ranks have called something else"
    assert texts == sorted(
        [
            "True ranks [1, 2] are alive, but have not called extended",
            *(f"False rank {rank} {theirs}" for rank in (1, 2)),
            *["False ranks [1] are alive, but have not called recovered"] * 2,
            f"True rank 1 {theirs}",
            *["False ranks [2] are alive, but have not called recovered"] * 2,
            f"True rank 2 {theirs}",
            *["[3.0, 3.0, 3.0]"] * 3,
        ]
    ), job.stdout


ALONE = """
import os, pathlib, signal, threading, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxcoded
def tries(**how):
    try:
        group.recovered(timeout={seconds:.2f}, **how)
    except jaxcoded.CodedError as error:
        print(error, flush=True)
def tries_meanwhile():
    while not group._membership._changes.locked():
        time.sleep(0.001)
    tries()
def stopped():
    return pathlib.Path(f"/proc/{{parent}}/stat").read_text().rpartition(")")[2].split()[0] == "T"
given_up, last = pathlib.Path("given up"), pathlib.Path("last")
group = jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1, fanout=2))
parent = MPI.COMM_WORLD.allgather(os.getpid())[1]
weights = group.batch(4).weights
add = lambda: jax.block_until_ready(jaxcoded.coded_allreduce(jnp.ones(3), group, weights))
for step in range(5):
    add()
if {stops} and group.rank == 1:
    os.kill(parent, signal.SIGSTOP)
if group.rank == 3:
    while {stops} and not stopped():
        time.sleep(0.01)
    started = [jaxcoded.coded_allreduce_start(jnp.ones(3), group, weights) for _ in range({started})]
    second = threading.Thread(target=tries_meanwhile)
    second.start()
    tries(put_out=True)
    second.join()
    given_up.touch()
else:
    count = 0
    while not last.exists() or count < int(last.read_text()):
        if group.rank == 0 and given_up.exists() and not last.exists():
            pathlib.Path("written").write_text(str(count + 400))  # as all are near
            os.rename("written", last)
            os.kill(parent, signal.SIGCONT)
        add()
        count += 1
        time.sleep({pause})
group.close()
"""


@pytest.mark.parametrize(
    ("stops", "started", "pause"),
    [more(False, 0, 0.01), (True, 0, 0.01), more(False, 200, 0.03)],
)
def test_a_rank_that_calls_recovered_alone_kills_no_other(
    tmp_path, stops, started, pause
):
    """The other ranks work, and continue without the rank. The test covers a rank whose parent is stopped and cannot
    inform it, and a rank that has started rounds.
    """
    given = {"stops": stops, "started": started, "pause": pause}
    program = ALONE.format(seconds=2.0 * slowness(), **given)
    job = played(tmp_path, program, 7)
    assert job.returncode == 0, job.stderr
    assert "another thread of this rank is in recovered" in job.stdout
    assert "no rank was put out: do all ranks call recovered" in job.stdout
    assert "has killed" not in job.stderr


@pytest.mark.exhaustive
def test_a_rank_that_calls_something_other_than_recovered(tmp_path, fault_tolerant):
    """The rank waits for the other ranks, which give it up and continue."""
    job = recover(tmp_path, fault_tolerant, "apart", "3")
    assert set(job.reports) == {0, 1, 2, 4, 5, 6}
    for rank, report in job.reports.items():
        assert rank == 2 or report["said"][0].startswith(
            "ranks [2] are alive, but have"
        )


def test_no_rank_can_be_left_behind_where_mpi_is_not_fault_tolerant(tmp_path):
    program = """
import jaxcoded
from mpi4py import MPI
with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="engine") as group:
    try:
        group.recovered()
    except ValueError as error:
        print(error)
"""
    job = subprocess.run(
        [sys.executable, "-c", program],
        env=settings(SMALL_LIMIT),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert job.returncode == 0, job.stderr
    assert "start the job with jaxcoded run --ft, which needs Open MPI 5" in job.stdout


@pytest.mark.parametrize(
    ("way", "victim"),
    [more("stopped", 4), more("stopped", 1), ("stopped-unclosed", 4)],
)
def test_leaving_a_stopped_rank_behind(tmp_path, way, victim):
    job = run(tmp_path, 5, "leaving.py", way, str(victim), limit=40, python=BARE)
    if (
        way == "stopped-unclosed"
    ):  # rank 3 fails at the end, and MPICH itself ends the job
        assert job.status != 0
    else:
        assert f"ends the job without ranks [{victim}]" in job.stderr
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")
    if way == "stopped":
        parent = job.reports[(victim - 1) // 2]
        assert f"without ranks [{victim}]" in " ".join(parent["close_warnings"])
        for report in job.reports.values():
            assert report["close_seconds"] < 10 * slowness()


@pytest.mark.parametrize("victim", [more(-1), 4])
def test_a_program_that_finalizes_mpi_with_an_open_group(tmp_path, victim):
    job = run(tmp_path, 5, "leaving.py", "finalize", str(victim), limit=40)
    assert job.status == 0, job.stderr[-8000:]
    assert set(job.reports) == set(range(5)) - {victim}
    job.of_all("digest")
    assert job.stderr.count("has finalized MPI") == (5 if victim < 0 else 0)
    assert ("ends the job without ranks [4]" in job.stderr) == (victim == 4)


def test_the_status_of_a_root_that_leaves_a_stopped_rank_behind(tmp_path):
    job = run(tmp_path, 5, "leaving.py", "stopped-status", "4", limit=40)
    assert "ends the job without ranks [4]" in job.stderr
    assert job.status == 3


def test_a_rank_that_the_root_has_left_behind(tmp_path):
    """The rank learns that the root has left it behind, and the job ends. In an earlier
    version the rank and the root waited for each other for ever.
    """
    job = run(tmp_path, 5, "left_behind.py", limit=60)
    assert job.status == 0, job.stderr[-8000:]
    words = r"round \d+ cannot be decided: the root, rank 0, has left the group"
    assert re.search(words, job.reports[4]["error"])
    assert set(job.reports) == set(range(5))


def test_every_line_of_the_faults_page_has_a_test():
    page = (ROOT / "docs" / "faults.md").read_text()
    lines = re.findall(r"^\| (?!what happens|---).*", page, re.MULTILINE)
    assert len(lines) > 15
    tests = {
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    }
    for line in lines:
        names = re.findall(r"`(\w+)`", line.split("|")[-2])
        assert names, line
        for name in names:
            assert name in tests, name


# The first two loops of docs/recovery.md, in which a rank is killed.

LOOPS = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs" / "recovery.md").read_text(),
    re.MULTILINE | re.DOTALL,
)[:2]
AROUND = """
import os, signal, sys
import jax, numpy as np
from mpi4py import MPI
import jaxcoded

jax.config.update("jax_enable_x64", True)
data, steps, victim = np.random.default_rng(0).standard_normal((40, 5)), 40, int(sys.argv[1])

def rows(number):
    return data[(np.arange(24) + number) % 40]

def make_step(group):
    part = group.batch(24)
    losses = lambda w, x: (x @ w - 1) ** 2
    coded = jaxcoded.coded_value_and_grad(losses, group)

    def step(params, state, x):
        return params - 0.1 * coded(params, part.of(x))[1], state + 1

    def batch(number):
        if number == 17 and MPI.COMM_WORLD.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(number)[part.indices]

    return jax.jit(step), batch

params, state = np.zeros(5), np.zeros((), int)
group = jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1))
step, batch = make_step(group)
{}
w = np.zeros(5)
for number in range(steps):
    w = w - 0.1 * 2 * rows(number).T @ (rows(number) @ w - 1) / 24
assert state == steps and abs(params - w).max() < 1e-12
print(f"is right on one of {{group.size}} ranks")
group.close()
"""


@pytest.mark.parametrize(
    ("loop", "victim"), [(LOOPS[0], 4), (LOOPS[1], 0), more(LOOPS[1], 3)]
)
def test_loops_of_the_recovery_page(tmp_path, loop, victim):
    loop = loop.replace("1000", "10").replace("999", "9")
    job = played(tmp_path, AROUND.format(loop), 5, [str(victim)])
    assert job.stdout.count("is right on one of 4 ranks") == 4, job.stderr[-8000:]
    assert job.returncode == 0


# README.md's start lines and its program, with a fault of a rank.

README = (ROOT / "README.md").read_text()
(FIRST_RUN,) = re.findall(r"^JAXCODED_DEBUG=1 (jaxcoded run .+)$", README, re.MULTILINE)
(START,) = re.findall(r"^(jaxcoded run .* train.py)$", README, re.MULTILINE)
FAULT = """\
        if next(steps) == {step} and MPI.COMM_WORLD.rank == {victim}:
            jax.block_until_ready(w)
            {fault}
"""


SHARED = "CodedGroup(MPI.COMM_WORLD)"
CODED = "CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1))"


def start(
    directory,
    line,
    victim=None,
    fault="",
    step=150,
    limit=40,
    group=SHARED,
    **environment,
):
    """Run README's program, `examples/train.py`, by a start line, with a fault at a
    rank and a step; ``group``: the code that makes the group. Return the finished
    process, and the weights of the ranks that reached the end.
    """
    program = (ROOT / "examples" / "train.py").read_text()
    assert program.count(SHARED) == 1
    program = program.replace(SHARED, group)
    head = "import itertools, os, pathlib, signal, time\nsteps = itertools.count()\n"
    program = head + program
    if victim is not None:
        body = "        w, state, mean = step("
        assert program.count(body) == 1
        program = program.replace(
            body, FAULT.format(step=step, victim=victim, fault=fault) + body
        )
    end = "group.close()\n"
    assert program.endswith(end)
    text = f"pathlib.Path({str(directory)!r}, str(group.rank))"
    program = program.removesuffix(end) + (
        f"{text}.write_text(' '.join(map(str, np.asarray(w))))\ngroup.close(3.0)\n"
    )
    (directory / "train.py").write_text(program)
    command, run, *words = line.split()
    assert (command, run, words[-1]) == ("jaxcoded", "run", "train.py")
    places = settings(limit)
    limited = "--timeout", places["JAXCODED_MPIRUN_TIMEOUT"]
    job = subprocess.run(
        [sys.executable, "-m", command, run, *limited, *words],
        env=places | environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=directory,
    )
    found = {
        int(path.name): np.array(path.read_text().split(), float)
        for path in directory.iterdir()
        if path.name.isdigit()
    }
    return job, found


def assert_trained(found, ranks):
    assert set(found) == set(ranks)
    for weights in found.values():
        np.testing.assert_allclose(weights, np.arange(5.0), atol=0.05)


def test_the_first_run(tmp_path):
    job, found = start(tmp_path, FIRST_RUN, JAXCODED_DEBUG="1")
    assert job.returncode == 0, job.stderr
    assert_trained(found, range(4))


def test_the_first_run_finds_a_mistake(tmp_path):
    fault = "batch = batch.of(tuple(a[::-1] for a in batch.data))  # weights of others"
    # with shared work one block of a round is compared, and the mistake is in one round
    job, found = start(
        tmp_path, FIRST_RUN, 2, fault, step=1, group=CODED, JAXCODED_DEBUG="1"
    )
    assert job.returncode not in (0, 124), job.stderr
    assert "InconsistentMessages: round 2, " in job.stderr
    assert not found


@pytest.mark.exhaustive
def test_readme_starts_with_a_slow_rank(tmp_path):
    # the rank continues once another rank has reached the end
    fault = (
        f"""while not pathlib.Path({str(tmp_path)!r}, "0").exists(): time.sleep(0.01)"""
    )
    job, found = start(tmp_path, START.replace(" --ft", ""), 3, fault)
    assert job.returncode == 0, job.stderr
    assert_trained(found, range(4))


@pytest.mark.parametrize("option", ["--ft", more("--on-error go-on")])
def test_readme_starts_with_an_exception(tmp_path, option):
    if option == "--ft":
        needs_fault_tolerance()
    fault = "raise RuntimeError('injected')"
    job, found = start(tmp_path, START.replace("--ft", option), 3, fault)
    assert job.returncode not in (0, 124), job.stderr
    assert "injected" in job.stderr
    assert_trained(found, range(3))


def test_readme_starts_with_a_rank_that_is_stopped_for_good(tmp_path):
    """The job ends without the rank, although a fault-tolerant mpirun would continue."""
    needs_fault_tolerance()
    fault = "os.kill(os.getpid(), signal.SIGSTOP)"
    job, found = start(tmp_path, START, 3, fault, limit=120)
    assert job.returncode == 0, job.stderr
    assert "ends the job without ranks [3]" in job.stderr
    assert_trained(found, range(3))


def test_readme_starts_with_a_killed_rank(tmp_path):
    needs_fault_tolerance()
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    job, found = start(tmp_path, START, 3, fault)
    assert job.returncode == 0, job.stderr
    assert_trained(found, range(3))


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("--ft", "raise RuntimeError"),
        more("--ft", "os.kill(os.getpid(), signal.SIGKILL)"),
        more("--on-error go-on", "raise RuntimeError"),
        more("--on-error go-on", "os.kill(os.getpid(), signal.SIGKILL)"),
    ],
)
def test_readme_starts_with_a_fault_of_the_root(tmp_path, option, fault):
    if option == "--ft":
        needs_fault_tolerance()
    job, found = start(tmp_path, START.replace("--ft", option), 0, fault)
    assert job.returncode not in (0, 124), job.stderr
    assert not found
