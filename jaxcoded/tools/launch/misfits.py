"""Find environment variables that keep MPI from starting.

Environment modules, schedulers and other MPIs set variables for MPI. Which variables fit depends on the MPI, its
build and the machine. So this module starts MPI with and without the variables.
"""

import os
import re
import tempfile
import time
from collections.abc import Collection

from jaxcoded.tools.launch import job, launcher

_SECONDS = 30.0  # seconds for a start of MPI without any of the variables
# Some variables make a start hang. With variables it may take this many times as long as without, or this many seconds.
_SLOWER, _LEAST = 5.0, 5.0
_PROGRAM = ["-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
_RANKS = 2
# On a machine under load, mpirun may fail once with variables that fit, or be slow. So the second try may take
# this many times as long as the first.
_TRIES = 1, 4
# Variables with settings of an MPI. Each of them may be wrong by itself.
_SETTING = re.compile(
    "(OMPI|PRTE|PMIX)_MCA_.+|(OPAL|PRTE|PMIX|PMIX_INSTALL)_PREFIX"
    "|(UCX|FI|HYDRA|MPICH|MPIR_CVAR|I_MPI)_.+"
)
# Variables that describe a scheduler's job to mpirun. Mpirun reads all variables of one kind together; ranks read
# none of them.
_JOB = re.compile("(SLURM|PBS|LSB|FLUX|PMIX|PMI)_.+")
_SHOWN = 4  # the most variables of one kind to show


def suspects(*, of_ranks: bool = False) -> dict[str, list[str]]:
    """Return the environment variables that may keep MPI from starting, by kind. The variables of one kind are
    either all right or all wrong. With ``of_ranks``, leave out variables that only mpirun reads.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(os.environ):
        if _SETTING.fullmatch(name):
            kinds[name] = [name]
        elif not of_ranks and (match := _JOB.fullmatch(name)):
            kinds.setdefault(f"${{!{match[1]}_*}}", []).append(name)
    return kinds


def listed(kinds: Collection[list[str]]) -> str:
    """Return a text that lists variables with their values."""
    texts = []
    for names in kinds:
        texts += [f"{name}={os.environ[name]}" for name in names[:_SHOWN]]
        if (more := len(names) - _SHOWN) > 0:
            texts.append(f"{more} more of {names[0].partition('_')[0]}")
    return ", ".join(texts)


def blame(mpirun: launcher.Launcher, *, begun: bool = False) -> tuple[str, str] | None:
    """Return which variables keep MPI from starting, and what to do. Return ``None`` if MPI starts with all variables,
    or does not start even without any. ``begun`` tells whether mpirun has started ranks of the job that has failed."""
    kinds = suspects(of_ranks=begun)
    every = {name for names in kinds.values() for name in names}
    began = time.monotonic()
    if not kinds or not _starts(mpirun, every, _SECONDS):
        return None
    seconds = min(_SECONDS, max(_LEAST, _SLOWER * (time.monotonic() - began)))
    if _starts(mpirun, set(), seconds):
        return None
    # If two variables are wrong only together, all variables are named.
    wrong = [
        kind
        for kind, names in kinds.items()
        if not _starts(mpirun, every - {*names}, seconds)
    ] or list(kinds)
    variables = listed([kinds[kind] for kind in wrong])
    remedy = f"unset {' '.join(wrong)}"
    if not {*wrong} <= every:  # a scheduler has set some of these variables
        remedy += ", if this command is not part of the scheduler's job"
    return (
        f"MPI does not start with {variables} in the environment, but starts without",
        remedy,
    )


def _starts(
    mpirun: launcher.Launcher, without: Collection[str], seconds: float
) -> bool:
    """Return whether MPI starts on this host without these variables. The first try takes up to ``seconds``."""
    command, environment = launcher.command(
        mpirun, _RANKS, ["-P", *_PROGRAM], named=False
    )
    kept = {name: environment[name] for name in environment if name not in without}
    with tempfile.TemporaryFile("w+") as ignored:
        return any(
            not job.play(
                command, kept, seconds=min(_SECONDS, longer * seconds), output=ignored
            ).status
            for longer in _TRIES
        )
