"""Find hosts that `ssh` cannot reach, since mpirun starts its daemons by ssh."""

import concurrent.futures
import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Sequence

from jaxcoded.tools.launch import launcher, places

_SECONDS = 10  # seconds to connect
_AT_A_TIME = 32
# Variables that name a command other than ssh, for Open MPI and MPICH
_OWN = re.compile(r"(PRTE|OMPI)_MCA_.*_(ssh|rsh)_agent|HYDRA_LAUNCHER(_EXEC)?")


def failure(hosts: Sequence[str]) -> tuple[str, str] | None:
    """Return which hosts `ssh` cannot reach, and the remedy. Return None if it reaches all hosts, or if mpirun does not
    use ssh."""
    if places.mpirun_finds_hosts() or any(map(_OWN.fullmatch, os.environ)):
        return None
    names = {re.split(r"[\s:]", each)[0] for each in hosts}
    others = sorted(name for name in names if not _is_here(name))
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        failures = zip(others, pool.map(_failure, others))
        away = {name: words for name, words in failures if words}
    if not away:
        return None
    listed = ", ".join(f"{name} ({words})" for name, words in away.items())
    remedy = (
        f"`ssh {next(iter(away))} true` must succeed without a question: check the hosts' names, their sshd and your "
        "keys (docs/several-hosts.md)"
    )
    return f"ssh does not reach {listed}", remedy


def _is_here(name: str) -> bool:
    """Return whether a name belongs to this host, for which mpirun needs no ssh."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an impossible name
        return False
    for family, kind, _, _, address in addresses:
        with (
            # this error means that the address belongs to another host
            contextlib.suppress(OSError),
            socket.socket(family, kind) as line,
        ):
            line.bind(address)
            return True
    return False


def _failure(name: str) -> str:
    """Return why ssh cannot reach a host, or an empty text if it can."""
    patience = f"ConnectTimeout={_SECONDS}"
    try:
        job = launcher.asked(
            *("ssh", "-o", "BatchMode=yes", "-o", patience, "--", name, "true"),
            seconds=3 * _SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:g} s"
    except OSError:
        return "the command ssh cannot be run: install it"
    if job.returncode == 0:
        return ""
    lines = job.stderr.strip().splitlines() or [f"status {job.returncode}"]
    return lines[-1].removeprefix("ssh: ").strip()
