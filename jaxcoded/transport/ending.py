"""What only Python knows about how this process ends. ``cpp/end_of_job.h`` does the rest."""

import sys
from collections.abc import Callable

from mpi4py import MPI

# A rank that has not answered for this long counts as lost.
SILENT_SECONDS = 10.0

_status = 0  # the status with which ``python -m mpi4py`` would end the job
_tell_mpi4py: Callable[[int], None] | None = getattr(MPI, "_set_abort_status", None)


def register() -> None:
    """Record the argument of `sys.exit`, which mpi4py keeps but does not return."""
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
    """Let the engine end the job in place of mpi4py, which would end it before
    `MPI_Finalize`."""
    if _status and _tell_mpi4py is not None:
        _tell_mpi4py(0)


def failure() -> str:
    """Return why this process ends, or an empty text if it ends normally. The argument
    of `sys.exit` is known only under ``python -m mpi4py``.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        return in_words(error)
    return f"SystemExit: {_status}" if _status else ""


def error_texts() -> set[str]:
    """Return the texts of the error that ends this process, and of its causes."""
    error: BaseException | None = getattr(sys, "last_value", None)
    texts = set()
    while error is not None:
        texts.add(str(error))
        error = error.__cause__ or error.__context__
    return texts


def in_words(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}".removesuffix(": ")
