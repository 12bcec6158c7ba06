"""Ranks make sure that they mean the same before they rely on it."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
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


def differences(answers: Sequence[str]) -> list[str]:
    """The first item of each answer in which they differ; "nothing" where one has none.
    Items are what stands between commas outside of brackets, and before an "of". (The
    engine says the same, see ``cpp/difference.h``.)

    Example:
        >>> from jaxcoded.transport.agreement import differences
        >>> differences(["sum of f8[2, 3], halved", "sum of f8[2, 4], halved"])
        ['f8[2, 3]', 'f8[2, 4]']
        >>> differences(["sum of a, b, c", "sum of a, c"])
        ['b', 'nothing']
    """
    items = [_items(answer) for answer in answers]
    shortest = min(map(len, items))
    alike = [len(set(column)) == 1 for column in zip(*items)]
    first = alike.index(False) if False in alike else shortest
    alike = [len(set(column)) == 1 for column in zip(*map(reversed, items))]
    alike = [*alike[: shortest - first], False]
    last = alike.index(False)
    return [its[first] if first + last < len(its) else "nothing" for its in items]


def _items(answer: str) -> list[str]:
    out, depth, start, named = [], 0, 0, False
    for i, letter in enumerate(answer):
        depth += (letter in "[({") - (letter in "])}")
        name = not named and answer.startswith(" of ", i)
        if not depth and (name or answer.startswith(", ", i)):
            out.append(answer[start:i])
            start = i + (4 if name else 2)
            named = named or name
    return [*out, answer[start:]]


def disagreement(comm: MPI.Intracomm, words: str, what: str) -> str | None:
    """Compare what the ranks of a communicator say. Collective.

    One all-reduce of 16 bytes while they agree.

    Args:
        comm: the communicator.
        words: what this rank is about to do.
        what: what it is where ranks differ.

    Returns:
        ``None`` if all ranks said the same; else, on every rank, in what they differ, and
        who said what.

    Example:
        >>> from jaxcoded.transport.agreement import disagreement
        >>> from mpi4py import MPI
        >>> disagreement(MPI.COMM_SELF, "round 1", "ranks differ") is None
        True
    """
    digest = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
    extremes = np.array([digest, -digest], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, extremes, op=MPI.MAX))
    if extremes[0] == -extremes[1]:
        return None
    ranks = comm.allgather(words)
    answers = list(dict.fromkeys(ranks))
    who = []
    for answer in answers:
        its = [str(rank) for rank, other in enumerate(ranks) if other == answer]
        who.append(f"rank{'s' * (len(its) > 1)} {', '.join(its)}")
    first = ", ".join(f"{it} at {at}" for it, at in zip(differences(answers), who))
    return "; ".join([f"{first}: {what}", *map(": ".join, zip(who, answers))])


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
