"""The part of a process's end that only Python knows. The rest is in ``cpp/end_of_job.h``."""

import sys
from collections.abc import Callable

from mpi4py import MPI

# A rank that has not answered for this long counts as lost.
SILENT_SECONDS = 10.0

_status = 0  # with which ``python -m mpi4py`` would end the job after this process
_tell_mpi4py: Callable[[int], None] | None = getattr(MPI, "_set_abort_status", None)


def register() -> None:
    """Note what `sys.exit` is told, which is not read back from mpi4py."""
    if _tell_mpi4py is not None:
        MPI._set_abort_status = _note


def _note(status: int) -> None:
    global _status
    _status = status
    assert _tell_mpi4py is not None
    _tell_mpi4py(status)


def status() -> int:
    """Return the status with which ``python -m mpi4py`` would end the job after this process."""
    return _status


def engine_ends_the_job() -> None:
    """And mpi4py does not, which would before `MPI_Finalize`."""
    if _status and _tell_mpi4py is not None:
        _tell_mpi4py(0)


def failure() -> str:
    """Why this process ends, in words; empty if it ends as it should. What `sys.exit` was told
    is known under ``python -m mpi4py`` alone."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        return in_words(error)
    return f"SystemExit: {_status}" if _status else ""


def told() -> set[str]:
    """What Python has printed of the error that ends this process, and of those that it came
    from."""
    error: BaseException | None = getattr(sys, "last_value", None)
    texts = set()
    while error is not None:
        texts.add(str(error))
        error = error.__cause__ or error.__context__
    return texts


def in_words(error: BaseException) -> str:
    """An error and the first line of what it says."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}".removesuffix(": ")
