"""Ranks make sure that they mean the same before they rely on it."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError

T = TypeVar("T")


def check_communicator(comm: object) -> None:
    """Raise a TypeError unless ``comm`` is an mpi4py intra-communicator."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(
            "comm must be an mpi4py intra-communicator such as MPI.COMM_WORLD, "
            f"got {comm!r}"
        )


def plain(value: Any) -> Any:
    """An argument in words that are the same for equal values of different kinds: a list,
    a tuple and an array; 3, 3.0 and ``np.float32(3)``.

    Example:
        >>> import numpy as np
        >>> from jaxcoded.transport.agreement import plain
        >>> plain((1, 2.5)) == plain(np.array([1, 2.5]))
        True
    """
    if hasattr(value, "tolist"):  # of numpy or JAX
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def disagreement(comm: MPI.Intracomm, words: str) -> str | None:
    """Compare what the ranks of a communicator say. Collective.

    One all-reduce of 16 bytes while they agree.

    Args:
        comm: the communicator.
        words: what this rank is about to do.

    Returns:
        ``None`` if all ranks said the same; else, on every rank, who said what.

    Example:
        >>> from jaxcoded.transport.agreement import disagreement
        >>> from mpi4py import MPI
        >>> disagreement(MPI.COMM_SELF, "round 1") is None
        True
    """
    digest = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
    extremes = np.array([digest, -digest], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, extremes, op=MPI.MAX))
    if extremes[0] == -extremes[1]:
        return None
    ranks = comm.allgather(words)
    said = []
    for answer in dict.fromkeys(ranks):
        who = [str(rank) for rank, other in enumerate(ranks) if other == answer]
        said.append(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {answer}")
    return "; ".join(said)


def on_all(
    comm: MPI.Intracomm, step: Callable[[], T], undo: Callable[[T], object]
) -> list[T]:
    """Take a step of this rank's own that all ranks rely on. Collective.

    Args:
        comm: the communicator.
        step: what to do.
        undo: called with what the step gave, where it succeeded but another rank's did
            not.

    Returns:
        What it gave, by rank.

    Raises:
        CodedError: it failed on some rank. Raised on every rank.

    Example:
        >>> from jaxcoded.transport.agreement import on_all
        >>> from mpi4py import MPI
        >>> on_all(MPI.COMM_SELF, lambda: "opened", undo=print)
        ['opened']
    """
    outcome: list[T] = []
    failure: Exception | None = None
    try:
        outcome = [step()]
    except Exception as error:  # noqa: BLE001  # the others wait for an answer
        failure = error
    all_ = comm.allgather((outcome, failure and f"{type(failure).__name__}: {failure}"))
    said = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(all_) if words]
    if said:
        for made in outcome:
            undo(made)
        raise CodedError("; ".join(said)) from failure
    return [outcome[0] for outcome, _ in all_]


def wait(request: MPI.Request) -> None:
    """Wait without spinning: a rank that waits here may share its core with the one it
    waits for."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause * 1.5 + 2e-6, 1e-3)
