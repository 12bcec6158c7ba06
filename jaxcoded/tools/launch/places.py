"""The command-line options for mpirun and hosts, for commands that start ranks."""

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import click

from jaxcoded.tools.launch import launcher

# Variables from which mpirun itself learns hosts. Slurm, PBS, LSF and Grid Engine set them, or the user sets them to
# name a file.
OTHERS = (
    *("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"),
    *("HYDRA_HOST_FILE", "PRTE_MCA_prte_default_hostfile"),
    "OMPI_MCA_orte_default_hostfile",
)
# A name that mpirun and ssh cannot mistake for an option, and a number. In Open MPI,
# a:auto means as many ranks as a has cores.
_PLACES = re.compile(r"[^\s:-][^\s:]*(:(\d{1,9}|\*|auto))?", re.ASCII)

# The option for the number of ranks, with all names that it has in different mpiruns.
RANKS = ("ranks", "-n", "--ranks", "-np", "--np")
# The most ranks of a job. Some mpirun reads 2**32 + 1 as 1, and the simulator needs 2 GB for this many
# ranks.
MOST_RANKS = 2_000_000
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")  # 2(x3) means 2, 2, 2


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options ``hosts``, ``hostfile`` and ``mpirun``."""
    for option in (
        click.option(
            "--mpirun",
            metavar="COMMAND",
            help="The mpirun to use. Default: $JAXCODED_MPIRUN, or the mpirun beside this Python, or the one on the "
            "PATH.",
        ),
        click.option(
            "--hostfile",
            metavar="FILE",
            help="A file that lists hosts, in the format that the MPI reads.",
        ),
        click.option(
            "--hosts",
            help="Hosts, and how many ranks on each: a:2,b:2. Default: the hosts of the Slurm job, otherwise this "
            "host.",
        ),
    ):
        command = option(command)
    return command


@dataclasses.dataclass(frozen=True)
class Places:
    """Where to start ranks."""

    asked: list[str]  # the hosts that the user has named, with their numbers of ranks
    # ``"a:2,b:2"``: the hosts that the user has named, or the Slurm job's; ``None``: the hosts in the file, or this
    # host
    hosts: str | None
    hostfile: str | None  # a file of hosts

    @property
    def away(self) -> bool:
        """Return whether ranks may be on other hosts."""
        return self.hosts is not None or self.hostfile is not None

    @property
    def sure(self) -> bool:
        """Return whether all ranks certainly start on this host."""
        return not self.away and not mpirun_finds_hosts()

    @property
    def names(self) -> tuple[str, ...] | None:
        """Return the names of the hosts with ranks: no names if only this host has ranks, and ``None`` if the names
        are unknown."""
        if not self.away:
            return ()
        if self.hosts is None:
            return None
        return tuple(each.partition(":")[0] for each in self.hosts.split(","))


def chosen(ranks: int, hosts: str | None, hostfile: str | None) -> Places:
    """Return where to start this many ranks: on the given hosts or, if none are given, on the Slurm job's hosts. Raise
    a ValueError if a host's name is invalid, if the hosts have too few places, or if the file cannot be read."""
    asked = launcher.listed(hosts, hostfile)
    if hosts is not None:
        _check(ranks, hosts)
    elif hostfile is None:
        hosts = of_slurm()
    return Places(asked, hosts, hostfile)


def _check(ranks: int, hosts: str) -> None:
    for each in hosts.split(","):
        if not _PLACES.fullmatch(each):
            raise ValueError(
                f"--hosts {hosts}: {each!r} must be a host, such as a, or a host with its number of ranks, such as a:2"
            )
    counts = [re.fullmatch(r"[^:]+:(\d+)", each) for each in hosts.split(",")]
    room = sum(int(count[1]) for count in counts if count)
    # a host without a number accepts any number of ranks
    if all(counts) and room < ranks:
        fewer = f", or say -n {room}" if room else ""
        raise ValueError(
            f"--hosts {hosts} has room for {room} of {ranks} ranks: give more hosts, or more places on them{fewer}"
        )


def mpirun_finds_hosts() -> bool:
    """Return whether mpirun may find other hosts by itself if none are given."""
    return any(name in os.environ for name in OTHERS)


def of_slurm() -> str | None:
    """Return the hosts of this process's Slurm job with their numbers of tasks:
    ``"a:2,b:2"``. Return ``None`` if there is no Slurm job, or if it has only this
    host.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return None
    try:
        done = launcher.asked("scontrol", "show", "hostnames", listed)
    except (OSError, subprocess.SubprocessError):
        # scontrol is missing or fails, for example in a container
        return None
    names = done.stdout.split()
    if done.returncode or names in ([], [os.environ.get("SLURMD_NODENAME")]):
        return None
    tasks: list[str] = []
    for each in os.environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        if match := _TASKS.fullmatch(each):
            # One entry more than there are hosts suffices to show a mismatch.
            tasks += [match[1]] * min(int(match[2] or 1), len(names) + 1)
    if len(tasks) != len(names):
        return ",".join(names)
    return ",".join(f"{name}:{count}" for name, count in zip(names, tasks))
