"""Several hosts: network namespaces with addresses and host names of their own, joined by a virtual cable.

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
LIMIT = 120  # seconds the job may take
NETWORK = "10.77.0.0/24"  # exists in the two namespaces only
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def run(*command, check=True, **options):
    return subprocess.run(
        command, capture_output=True, text=True, check=check, **options
    )


@pytest.fixture
def hosts():
    """The names of two hosts that reach each other at `ADDRESSES` and nobody else."""
    if sys.platform != "linux":
        pytest.skip("network namespaces need Linux")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no `{tool}` (packages iproute2 and util-linux)")
    version = run(MPIRUN, "--version", check=False).stdout
    if not re.search(r"Open MPI\S* [5-9]\.", version):
        pytest.skip(f"the options are those of Open MPI 5, not of {version[:60]!r}")

    names = tuple(f"jaxcoded-{os.getpid()}-{number}" for number in (1, 2))
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                stack.callback(take_down, name)
            # the cable goes when the namespaces go
            run(
                *("ip", "-n", names[0], "link", "add", "eth0", "type", "veth"),
                *("peer", "name", "eth0", "netns", names[1]),
            )
            for name, address in zip(names, ADDRESSES):
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
    """Run a shell command on a host. Daemons with one host name take two hosts for one."""
    script = f"hostname {name}; {command}"
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script]


def received(name):
    """Bytes that came over the cable to a host."""
    status = run("ip", "-n", name, "-json", "-statistics", "link", "show", "eth0")
    return json.loads(status.stdout)[0]["stats64"]["rx"]["bytes"]


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 60)
def test_training_on_two_hosts(hosts, tmp_path):
    # mpirun starts its daemon on another host by AGENT ADDRESS COMMAND...
    agent = tmp_path / "agent"
    there = shlex.join(on_host(hosts[1], "")[:-1])
    agent.write_text(
        f'#!/bin/sh\nshift\nexec {there} "hostname {hosts[1]}; $*"\n', encoding="utf-8"
    )
    agent.chmod(0o700)
    mpirun = shlex.join(
        [
            str(MPIRUN),
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", NETWORK),
            *("--host", ",".join(f"{address}:2" for address in ADDRESSES), "-n", "4"),
            *(
                sys.executable,
                "-m",
                "mpi4py",
                str(ROOT / "tests" / "hosts" / "train.py"),
            ),
        ]
    )
    environment = {
        "JAXCODED_MPIRUN_TIMEOUT": str(LIMIT),
        "PRTE_MCA_prte_if_include": NETWORK,
    }
    job = run(
        *on_host(hosts[0], mpirun),
        env=os.environ | environment,
        cwd=ROOT,
        check=False,
        timeout=LIMIT + 30,
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}"

    report = json.loads(job.stdout.splitlines()[-1])
    assert report["hosts"] == [hosts[0]] * 2 + [hosts[1]] * 2
    # ranks 2 and 3 sent their messages to rank 0 over the cable, and got the results
    for host in hosts:
        assert received(host) > 2 * report["message"]
