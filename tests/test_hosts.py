"""Several hosts: network namespaces with addresses and host names of their own, joined
by a bridge in one more namespace.

What runs on them is an ordinary multi-host mpirun over TCP.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MPIRUN = ROOT / "scripts" / "mpirun"
BESIDE = pathlib.Path(sys.executable).with_name("mpirun")
LIMIT = 120  # seconds a job may take
NETWORK = "10.77.0.0/24"  # exists in the namespaces only
ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 5))
RANKS_EACH = 2
RANKS = RANKS_EACH * len(ADDRESSES)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(LIMIT + 60)]


def environment():
    added = {
        "JAXCODED_MPIRUN_TIMEOUT": str(LIMIT),
        "PRTE_MCA_prte_if_include": NETWORK,
        "PYTHONPATH": str(ROOT),
    }
    if BESIDE.exists():
        added["JAXCODED_MPIRUN"] = str(BESIDE)
    return os.environ | added


def run(*command, check=True, **options):
    return subprocess.run(
        command, capture_output=True, text=True, check=check, **options
    )


@pytest.fixture
def hosts():
    """The names of hosts that reach each other at `ADDRESSES` and nobody else."""
    if sys.platform != "linux":
        pytest.skip("network namespaces need Linux")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no `{tool}` (packages iproute2 and util-linux)")
    version = run(MPIRUN, "--version", check=False, env=environment()).stdout
    if not re.search(r"Open MPI\S* [5-9]\.", version):
        pytest.skip(f"the options are those of Open MPI 5, not of {version[:60]!r}")

    prefix = f"jaxcoded-{os.getpid()}"
    names = tuple(f"{prefix}-{number}" for number in range(1, len(ADDRESSES) + 1))
    switch = f"{prefix}-switch"
    with contextlib.ExitStack() as stack:
        try:
            for name in (switch, *names):
                run("ip", "netns", "add", name)
                stack.callback(take_down, name)
            # cables and the bridge go when the namespaces go
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            for name, address in zip(names, ADDRESSES):
                port = f"port{address.rpartition('.')[2]}"
                run(
                    *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                    *("peer", "name", "eth0", "netns", name),
                )
                run(*("ip", "-n", switch, "link", "set", port, "master", "bridge"))
                run("ip", "-n", switch, "link", "set", port, "up")
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
            run(*on_host(names[0], "true"))
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            pytest.skip(f"not permitted here: {command}: {error.stderr.strip()}")
        yield names


def take_down(name):
    """Remove a namespace, and first what the job left running in it."""
    for process in run("ip", "netns", "pids", name).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def on_host(name, command):
    """Run a shell command on a host. Daemons with one host name would take two hosts
    for one."""
    script = f"hostname {name}; {command}"
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script]


def received(name):
    """Bytes that came over the cable to a host."""
    status = run("ip", "-n", name, "-json", "-statistics", "link", "show", "eth0")
    return json.loads(status.stdout)[0]["stats64"]["rx"]["bytes"]


def on_all(hosts, directory, *program):
    """Run a program on `RANKS` ranks, as many on each host, and return its stdout."""
    # mpirun starts its daemons on the other hosts by AGENT ADDRESS COMMAND...
    cases = []
    for name, address in zip(hosts, ADDRESSES):
        there = shlex.join(on_host(name, "")[:-1])
        cases.append(f'{address}) exec {there} "hostname {name}; $*" ;;')
    agent = directory / "agent"
    lines = "\n".join(cases)
    agent.write_text(
        f"#!/bin/sh\naddress=$1\nshift\ncase $address in\n{lines}\nesac\n",
        encoding="utf-8",
    )
    agent.chmod(0o700)
    slots = ",".join(f"{address}:{RANKS_EACH}" for address in ADDRESSES)
    mpirun = shlex.join(
        [
            str(MPIRUN),
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", NETWORK),
            *("--host", slots, "-n", str(RANKS), sys.executable, "-m", "mpi4py"),
            *map(str, program),
        ]
    )
    job = run(
        *on_host(hosts[0], mpirun),
        env=environment(),
        cwd=ROOT,
        check=False,
        timeout=LIMIT + 30,
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
    # at least one rank of every host gets each result over the cable, or a message
    for host in hosts:
        assert received(host) > report["message"]


def faulty(hosts, directory, program, *arguments):
    """What the ranks report of a program of tests/faults, by rank."""
    before = [received(host) for host in hosts]
    on_all(hosts, directory, ROOT / "tests" / "faults" / program, directory, *arguments)
    reports = [
        json.loads((directory / f"rank-{rank}.json").read_text())
        for rank in range(RANKS)
    ]
    assert len({report["digest"] for report in reports}) == 1
    assert not any(report["close_warnings"] for report in reports)
    return reports, [received(host) - start for host, start in zip(hosts, before)]


def test_stopped_processes_hold_nobody_up(hosts, tmp_path):
    # a leaf, an inner rank, and one of each under different parents; messages that
    # travel with their announcement, and such that are fetched in pieces
    rounds, widths = 60, (300, 5000, 50_000)
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
    reports, _ = faulty(hosts, tmp_path, "sleeps.py", "3", "400", "40,5000")
    assert max(report["lag"] for report in reports) > 0
    for report in reports:
        assert report["late"]["threads"] == report["early"]["threads"]
        assert report["late"]["files"] == report["early"]["files"]
