"""Jobs on several hosts of `scripts/on_hosts.py`."""

import contextlib
import csv
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import launch
import on_hosts
import pytest
from cases import more
from on_hosts import ROOT, received

from jaxcoded.tools.launch import guardian

LIMIT = 120  # seconds a job may take on an idle machine
HOSTS, RANKS_EACH = 4, 2
RANKS = RANKS_EACH * HOSTS

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(LIMIT + 60)]


@pytest.fixture
def hosts():
    """Return the names of hosts that reach each other and no other hosts."""
    try:
        with on_hosts.network(HOSTS) as names:
            yield names
    except on_hosts.Unavailable as reason:
        pytest.skip(str(reason))


def finished(*command, **environment):
    """Run a job within a limit that depends on the machine's speed; return the finished
    job.
    """
    limit = LIMIT * launch.slowness()
    return subprocess.run(
        command,
        env=on_hosts.environment(limit) | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit + 30,
    )


def on_all(hosts, directory, *program):
    """Run a program on `RANKS` ranks, equally many on each host, and return its stdout."""
    job = finished(
        *on_hosts.job(hosts, directory, RANKS, sys.executable, "-m", "mpi4py", *program)
    )
    stacks = "\n".join(
        f"--- {path.name}\n{path.read_text()}"
        for path in sorted(directory.glob("stacks-*"))
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}\n{stacks}"
    return job.stdout


def test_training(hosts, tmp_path):
    printed = on_all(hosts, tmp_path, ROOT / "tests" / "hosts" / "train.py")
    report = json.loads(printed.splitlines()[-1])
    assert report["hosts"] == [name for name in hosts for _ in range(RANKS_EACH)]
    # nothing wakes the thread that polls for messages: it sleeps for a millisecond
    assert max(report["awakenings"]) < 4000
    # at least one rank of every host gets each result over the cable, or a message
    for host in hosts:
        assert received(host) > report["message"]


def test_a_rank_closes_before_its_round_is_over(hosts, tmp_path):
    on_all(hosts, tmp_path, ROOT / "tests" / "hosts" / "closing.py")


def faulty(hosts, directory, program, *arguments):
    """Return the ranks' reports from a program of tests/faults, by rank."""
    before = [received(host) for host in hosts]
    on_all(hosts, directory, ROOT / "tests" / "faults" / program, directory, *arguments)
    reports = [
        json.loads((directory / f"rank-{rank}.json").read_text())
        for rank in range(RANKS)
    ]
    assert len({report["digest"] for report in reports}) == 1
    assert not any(report["close_warnings"] for report in reports)
    return reports, [received(host) - start for host, start in zip(hosts, before)]


def test_stopped_processes_delay_no_rank(hosts, tmp_path):
    # a leaf, an inner rank, and one of each under different parents; messages sent with
    # their announcement, and messages fetched in pieces
    rounds, widths = 30, (300, 5000, 50_000)
    reports, traffic = faulty(
        *(hosts, tmp_path, "stopped.py", "2", str(rounds)),
        *(",".join(map(str, widths)), "5", "1", "2,3"),
    )
    for rank in (1, 2, 3, 5):
        assert reports[rank]["lag"] > rounds - 10
    # there are 3 stops; every host gets each result over the cable, or a message
    least = 3 * rounds * 8 * sum(widths) / len(widths)
    assert least < min(traffic) and max(traffic) < 20 * least


def test_random_sleeps(hosts, tmp_path):
    reports, _ = faulty(hosts, tmp_path, "sleeps.py", "3", "150", "40,5000")
    assert max(report["lag"] for report in reports) > 0
    for report in reports:
        assert report["late"]["files"] == report["early"]["files"]
        # a thread may end in the meantime: once 19 threads were left of 20
        assert report["late"]["threads"] <= report["early"]["threads"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "why"), [(4, ""), (2, "another host")])
def test_a_stuck_rank_is_put_out_by_one_of_its_host(tmp_path, ranks, why):
    slower = launch.slowness()
    program = ROOT / "tests" / "faults" / "alive_but_stuck.py"
    try:
        with on_hosts.network(2) as names:
            job = finished(
                *on_hosts.job(
                    *(names, tmp_path, ranks, sys.executable, program, tmp_path, why),
                    options=["--with-ft", "ulfm"],
                ),
                **{launch.SLOWNESS: str(slower)},
            )
    except on_hosts.Unavailable as reason:
        pytest.skip(str(reason))
    assert job.returncode == 0, job.stderr[-8000:]
    texts = {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text())["said"]
        for path in tmp_path.glob("rank-*.json")
    }
    if why:
        assert set(texts) == {0, 1}
        assert texts[0][1].endswith("no rank in this call can see it")
    else:
        assert set(texts) == {0, 1, 2}
        (line,) = re.findall("rank . has killed .*", job.stderr)
        assert line.startswith("rank 2 ") and f" on {names[1]}, rank 3" in line


LASTING = """
from mpi4py import MPI
import os, pathlib, signal, sys, time

MPI.COMM_WORLD.Barrier()
pathlib.Path(sys.argv[1], f"rank-{MPI.COMM_WORLD.rank}.pid").write_text(f"{os.getpid()} ")
if MPI.COMM_WORLD.rank == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0.1)
"""


def test_ranks_on_other_hosts_end_with_a_launcher_that_is_killed(tmp_path):
    """Processes on other hosts have no mark, as `ssh` passes on no variables; one of them is stopped."""
    program = tmp_path / "lasting.py"
    program.write_text(LASTING)

    def in_time(true):
        end = time.monotonic() + 60 * launch.slowness()
        while not true() and time.monotonic() < end:
            time.sleep(0.05)
        return true()

    def processes(*words):
        """Return the processes whose command has all these words. Other tests start
        jobs at the same time.
        """
        words = set(map(str, words))
        for place in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if words <= set((place / "cmdline").read_text().split("\0")):
                    yield place

    def parent(place):
        with contextlib.suppress(OSError):
            return int((place / "stat").read_text().rpartition(")")[2].split()[1])

    try:
        with on_hosts.network(2) as names:
            command = on_hosts.job(
                names, tmp_path, 4, sys.executable, program, tmp_path
            )
            agent = tmp_path / "agent"
            agent.write_text(
                agent.read_text().replace("shift", "unset JAXCODED_JOB; shift", 1)
            )
            job = subprocess.Popen(
                command, cwd=ROOT, env=on_hosts.environment(LIMIT * launch.slowness())
            )
            assert in_time(lambda: len([*tmp_path.glob("rank-*.pid")]) == 4)
            (launcher,) = (
                int(process.name) for process in processes(on_hosts.MPIRUN, agent)
            )
            all_guardians = processes(guardian.__file__)
            (watcher,) = (
                all_guardian
                for all_guardian in all_guardians
                if parent(all_guardian) == launcher
            )
            os.kill(launcher, signal.SIGKILL)
            job.wait()
            assert in_time(lambda: not [*processes(program)])
            assert in_time(lambda: not watcher.exists())
            shared = os.listdir("/dev/shm")
            assert not [path for path in shared for name in names if name in path]
    except on_hosts.Unavailable as reason:
        pytest.skip(str(reason))


def test_training_benchmark(tmp_path):
    try:
        with on_hosts.network(2, "200mbit", both_ways=True):
            pass
    except on_hosts.Unavailable as reason:
        pytest.skip(str(reason))
    job = finished(
        *(sys.executable, "benchmarks/training.py", "--smoke", "--hosts", "5"),
        *("--schemes", "frc,ring", "--out", tmp_path),
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
    with (tmp_path / "training-hosts-5.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = {(row["problem"], row["model"], row["scheme"]) for row in rows}
    sizes, schemes = ["1000", "20000"], ["frc", "ring"]
    assert measured == set(itertools.product(sizes, ["none", "fixed"], schemes))
    for row in rows:
        assert float(row["max_relative_error"]) < 1e-5
    assert (tmp_path / "training-hosts-5.png").stat().st_size > 10_000


def test_sections_whose_holders_are_stopped_or_sleep(hosts, tmp_path):
    """All ranks are the root's children, and form its long sums together."""
    rounds, widths = 20, "300,30000,100000"
    for name in ("stopped", "sleeping"):
        (tmp_path / name).mkdir()
    reports, _ = faulty(
        *(hosts, tmp_path / "stopped", "stopped.py", str(RANKS - 1), str(rounds)),
        *(widths, "5", "1"),
    )
    for rank in (1, 5):
        assert reports[rank]["lag"] > rounds - 10
    reports, _ = faulty(
        *(hosts, tmp_path / "sleeping", "sleeps.py", str(RANKS - 1), "60", widths)
    )
    assert all(report["formed"] for report in reports)


def test_a_message_to_a_rank_that_dies_does_not_end_its_sender(hosts):
    """In this schedule rank 7 asks rank 1, for the first time, while rank 1 dies. Open MPI ended rank 7, as the request
    of this message was freed before the connection failed.
    """
    launch.needs_fault_tolerance()
    job = finished(
        *(sys.executable, ROOT / "tests" / "chaos" / "chaos.py"),
        *("--replay", "3012109", "--ranks", "9", "--hosts", "3"),
    )
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-8000:]


@pytest.mark.exhaustive
def test_sections_of_a_tree_that_follows_hosts(hosts, tmp_path):
    """One rank of each host adds up its host's messages, and forms the sum together with such ranks of other hosts."""
    rounds, widths = 20, "300,30000,100000"
    for name in ("stopped", "sleeping"):
        (tmp_path / name).mkdir()
    # a leaf, without which its parent has no message, and children of the root
    reports, _ = faulty(
        *(hosts, tmp_path / "stopped", "stopped.py", "hosts", str(rounds)),
        *(widths, "5", "1", "6"),
    )
    for rank in (1, 5, 6):
        assert reports[rank]["lag"] > rounds - 10
    reports, _ = faulty(
        *(hosts, tmp_path / "sleeping", "sleeps.py", "hosts", "60", widths)
    )
    formed = [bool(report["formed"]) for report in reports]
    assert formed == [rank in (0, 1, 2, 4, 6) for rank in range(RANKS)]


def test_sections_in_all_layers_of_a_tree(hosts, tmp_path):
    """The grandchildren of the root form their parents' messages, and share the result
    among each other.
    """
    rounds, widths = 20, "300,30000,100000"
    for name in ("stopped", "sleeping"):
        (tmp_path / name).mkdir()
    # rank 1 has the children 4 and 5, and rank 2 has 6 and 7
    reports, _ = faulty(
        *(hosts, tmp_path / "stopped", "stopped.py", "3 in sections", str(rounds)),
        *(widths, "5", "1", "2,4"),
    )
    for rank in (1, 2, 4, 5):
        assert reports[rank]["lag"] > rounds - 10
    reports, _ = faulty(
        *(hosts, tmp_path / "sleeping", "sleeps.py"),
        *("3 in sections", "60", widths),
    )
    assert all(report["formed"] for report in reports)


def users_job(hosts, directory, each, *words, **environment):
    """Run `jaxcoded run` with these numbers of ranks on the first hosts; return the
    finished job.
    """
    places = [f"{host}:{n}" for host, n in zip(on_hosts.addresses(len(each)), each)]
    command = [
        *(sys.executable, "-m", "jaxcoded", "run", "-n", str(sum(each))),
        *("--hosts", ",".join(places)),
        *("--timeout", f"{LIMIT * launch.slowness():.0f}", *map(str, words)),
    ]
    return finished(
        *on_hosts.on_host(hosts[0], shlex.join(command)),
        PRTE_MCA_plm_ssh_agent=str(on_hosts.agent(hosts, directory)),
        OMPI_MCA_pml="ob1",
        OMPI_MCA_btl_tcp_if_include=on_hosts.NETWORK,
        **environment,
    )


def test_run_reports_how_ranks_of_all_hosts_ended(hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from mpi4py import MPI\n"
        "rank = MPI.COMM_WORLD.rank\n"
        "MPI.Finalize()\n"
        "os._exit(3 * rank)\n"
    )
    job = users_job(hosts, tmp_path, [1, 1], program)
    texts = re.findall("^jaxcoded run: (ranks? .*), after", job.stderr, re.MULTILINE)
    assert "rank 1: status 3" in texts, job.stderr
    assert "rank 0: status 0" in texts, job.stderr


@pytest.mark.parametrize(
    ("option", "events", "joined"),
    [
        # the host with the fewest ranks gets the new ranks, although the root is on another host
        more("code", ["kill 3", "join 1", "kill 0", "join 1"], [1, 0]),
        more("shared", ["kill 0", "join 1", "kill 0", "join 1"], [0, 0]),
        # a whole host is lost
        more("code", ["kill 2,3", "join 2", "kill 0", "join 1"], [0, 0, 2]),
        more("code", ["kill 3", "loses 2 ready", "join 2"], [0, 0]),
        more("code", ["kill 3", "exit 1", "join 1"], [1]),
    ],
)
def test_ranks_join_on_the_host_with_the_fewest(
    hosts, tmp_path, option, events, joined
):
    launch.needs_fault_tolerance()
    program = ROOT / "tests" / "faults" / "extending.py"
    job = users_job(
        *(hosts, tmp_path, [2, 2, 2], "--ft", program, tmp_path, option, *events),
        **{launch.SLOWNESS: str(launch.slowness())},
    )
    assert job.returncode == int("exit 1" in events), job.stderr[-8000:]
    assert "Process received signal" not in job.stderr, job.stderr[-8000:]
    reports = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(len(list(tmp_path.glob("rank-*.json"))))
    ]
    assert {report["size"] for report in reports} == {len(reports)}
    assert len({report["digest"] for report in reports}) == 1
    assert max(report["error"] for report in reports) < 1e-12
    places = [hosts.index(each["host"]) for each in reports if each["joined"]]
    assert places == joined, job.stderr[-8000:]
