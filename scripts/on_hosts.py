"""Run a job on several simulated hosts on this machine.

    python scripts/on_hosts.py --hosts 4 --rate 100mbit -- .venv/bin/python -m mpi4py program.py

A host is a network namespace with an address and a host name; a bridge in another
namespace joins them. The job is an ordinary multi-host mpirun over TCP. The script
needs Linux, root, Open MPI 5, `ip` and `unshare`, and with a rate `tc`.
"""

import argparse
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
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
MPIRUN = ROOT / "scripts" / "mpirun"
BESIDE = pathlib.Path(sys.executable).with_name("mpirun")
NETWORK = "10.77.0.0/24"  # this network exists only in the namespaces


class Unavailable(Exception):
    """This machine cannot make such hosts; the text says why."""


def environment(limit: float) -> dict[str, str]:
    """Return the environment of a job that may take ``limit`` seconds."""
    added = {
        "JAXCODED_MPIRUN_TIMEOUT": str(limit),
        "PRTE_MCA_prte_if_include": NETWORK,
        # MPI does not know that hosts share the cores: two ranks that poll for messages have occupied both cores for a
        # minute
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    if BESIDE.exists():
        added["JAXCODED_MPIRUN"] = str(BESIDE)
    return os.environ | added


def run(
    *command: object, check: bool = True, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its output."""
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=check, **options
    )


def addresses(count: int) -> list[str]:
    """Return the addresses of ``count`` hosts."""
    return [f"10.77.0.{number}" for number in range(1, count + 1)]


@contextlib.contextmanager
def network(
    count: int, rate: str = "", *, both_ways: bool = False
) -> Iterator[tuple[str, ...]]:
    """Make ``count`` hosts that reach only each other, at their `addresses`; yield their names. Each host sends at most
    at a ``rate`` such as ``100mbit``; with ``both_ways`` it also receives at most at this rate.

    Raises:
        Unavailable: this machine does not allow it.
    """
    if sys.platform != "linux":
        raise Unavailable("network namespaces need Linux")
    if os.geteuid() != 0:
        raise Unavailable("making network namespaces needs root")
    for tool in ("ip", "unshare", *["tc"] * bool(rate)):
        if shutil.which(tool) is None:
            raise Unavailable(
                f"there is no `{tool}` (packages iproute2 and util-linux)"
            )
    version = run(MPIRUN, "--version", check=False, env=environment(60)).stdout
    if not re.search(r"Open MPI\S* [5-9]\.", version):
        raise Unavailable(f"the options belong to Open MPI 5, not to {version[:60]!r}")
    prefix = f"jaxcoded-{os.getpid()}"
    names = tuple(f"{prefix}-{number}" for number in range(1, count + 1))
    switch = f"{prefix}-switch"
    with contextlib.ExitStack() as stack:
        try:
            for name in (switch, *names):
                run("ip", "netns", "add", name)
                stack.callback(take_down, name)
            # deleting the namespaces deletes cables and bridge
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            for name, address in zip(names, addresses(count)):
                port = f"port{address.rpartition('.')[2]}"
                run(
                    *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                    *("peer", "name", "eth0", "netns", name),
                )
                run("ip", "-n", switch, "link", "set", port, "master", "bridge")
                run("ip", "-n", switch, "link", "set", port, "up")
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
                ends = [(name, "eth0"), (switch, port)]  # both ends of a cable send
                for end, device in ends[: (1 + both_ways) * bool(rate)]:
                    run(
                        *("tc", "-n", end, "qdisc", "replace", "dev", device, "root"),
                        *("tbf", "rate", rate, "burst", "256kb", "latency", "50ms"),
                    )
            run(*on_host(names[0], "true"))
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            raise Unavailable(
                f"not permitted here: {command}: {error.stderr.strip()}"
            ) from error
        yield names


def take_down(name: str) -> None:
    """Remove a namespace, after ending the job's processes in it."""
    for process in run("ip", "netns", "pids", name).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def on_host(name: str, command: str) -> list[str]:
    """Run a shell command on a host, under a separate host name: MPI's daemons would confuse hosts with equal names."""
    script = f"hostname {name}; {command}"
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script]


def received(name: str) -> int:
    """Return the bytes that a host has received over its cable."""
    status = run("ip", "-n", name, "-json", "-statistics", "link", "show", "eth0")
    return int(json.loads(status.stdout)[0]["stats64"]["rx"]["bytes"])


def cable(name: str, *, whole: bool) -> None:
    """Cut a host's cable, or reconnect it."""
    prefix, _, number = name.rpartition("-")
    state = "up" if whole else "down"
    run("ip", "-n", f"{prefix}-switch", "link", "set", f"port{number}", state)


def job(
    hosts: Sequence[str],
    directory: pathlib.Path,
    ranks: int,
    *command: object,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the mpirun command that starts ``command`` with these options on ``ranks`` ranks, about equally many on
    each host. Write a file for mpirun to the directory.
    """
    each = [len(range(number, ranks, len(hosts))) for number in range(len(hosts))]
    slots = ",".join(
        f"{address}:{n}" for address, n in zip(addresses(len(hosts)), each) if n
    )
    mpirun = shlex.join(
        [
            sys.executable,
            str(MPIRUN),
            *("--prtemca", "plm_ssh_agent", str(agent(hosts, directory))),
            *("--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", NETWORK),
            *("--host", slots, *options),
            *("-n", str(ranks), *map(str, command)),
        ]
    )
    return on_host(hosts[0], mpirun)


def agent(hosts: Sequence[str], directory: pathlib.Path) -> pathlib.Path:
    """Write a replacement of ssh for mpirun to the directory; return its path."""
    # mpirun starts its daemons on the other hosts by AGENT ADDRESS COMMAND...
    cases = []
    for name, address in zip(hosts, addresses(len(hosts))):
        prefix = shlex.join(on_host(name, "")[:-1])
        cases.append(f'{address}) exec {prefix} "hostname {name}; $*" ;;')
    path = directory / "agent"
    lines = "\n".join(cases)
    path.write_text(
        f"#!/bin/sh\naddress=$1\nshift\ncase $address in\n{lines}\nesac\n",
        encoding="utf-8",
    )
    path.chmod(0o700)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--each", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rate", default="", help="of a host's cable, as 100mbit")
    parser.add_argument("--both-ways", action="store_true", help="also to the host")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        network(args.hosts, args.rate, both_ways=args.both_ways) as hosts,
    ):
        ranks = args.each * args.hosts
        started = job(hosts, pathlib.Path(directory), ranks, *args.command)
        done = subprocess.run(started, env=environment(args.limit), check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
