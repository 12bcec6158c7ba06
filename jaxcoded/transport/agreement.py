"""Check that ranks agree before they rely on it, and exchange values."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError, GroupMismatch

T = TypeVar("T")
LONGEST = 16 << 20  # most bytes of a rank's answer
# How many characters of a long text are shown: at its beginning; at its end, which may
# contain an error; and before and after a difference.
_FIRST, _LAST, _BEFORE, _AFTER = 120, 240, 20, 60
_WHY = "has a rank died, or do ranks run different builds of jaxcoded?"


class Unreadable(CodedError):
    """An answer cannot be read or is missing: a rank may have died without an error."""


def check_communicator(comm: object) -> None:
    """Raise a TypeError unless ``comm`` is an mpi4py intra-communicator."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(
            "comm must be an mpi4py intra-communicator such as MPI.COMM_WORLD, "
            f"got {comm!r}"
        )


def plain(value: Any) -> Any:
    """Convert an argument so that equal values of different types become the same
    value. A list, a tuple and an array become the same, and so do 3, 3.0 and
    ``np.float32(3)``."""
    if hasattr(value, "tolist"):  # a value of NumPy or JAX
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def differences(answers: Sequence[str]) -> list[str]:
    """Return the first differing item of each answer, or "nothing" if an answer has no
    such item. Items are separated by commas, and by the first "of", outside of
    brackets. (The engine does the same, see ``cpp/difference.h``.)
    """
    items = [_items(answer) for answer in answers]
    first = len(os.path.commonprefix(items))
    last = len(os.path.commonprefix([row[first:][::-1] for row in items]))
    return [row[first] if first + last < len(row) else "nothing" for row in items]


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
    """Compare the descriptions of all ranks, by one all-reduce of 16 bytes if they
    agree. Collective.

    Return ``None`` if all descriptions are the same. Otherwise return a text on every
    rank. It has the difference, what the difference means (``what``), and each rank's
    description.
    """
    digest = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
    extremes = np.array([digest, -digest], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, extremes, op=MPI.MAX))
    if extremes[0] == -extremes[1]:
        return None
    ranks = gathered(comm, words)
    # If the descriptions are the same after all, a rank's death has disturbed the
    # reduction.
    return in_words(ranks, what) if len(set(ranks)) > 1 else None


def check_same(comm: MPI.Intracomm, words: str, what: str) -> None:
    """Raise a GroupMismatch on every rank unless all descriptions are the same; see
    `disagreement`. Collective."""
    if (mismatch := disagreement(comm, words, what)) is not None:
        raise GroupMismatch(mismatch)


def in_words(texts: Sequence[str], what: str) -> str:
    """Return a text that has the difference between descriptions, what the difference
    means (``what``), and each description."""
    answers = list(dict.fromkeys(texts))
    who = []
    for answer in answers:
        ranks = [str(rank) for rank, other in enumerate(texts) if other == answer]
        who.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    different = _excerpts(differences(answers))
    first = ", ".join(f"{item} at {at}" for item, at in zip(different, who))
    wholes = map(_shortened, answers)
    return "; ".join([f"{first}: {what}", *map(": ".join, zip(who, wholes))])


def _excerpts(items: Sequence[str]) -> list[str]:
    """Shorten long items to their beginning and the place of their first difference."""
    at = len(os.path.commonprefix(list(items)))
    if at <= _FIRST:
        return [*map(_shortened, items)]
    start, end = at - _BEFORE, at + _AFTER
    return [
        f"{item[:_BEFORE]} ... {item[start:end]}" + " ..." * (len(item) > end)
        for item in items
    ]


def _shortened(words: str) -> str:
    """Return a text, without its middle if it is long. The ends identify the text."""
    if len(words) <= _FIRST + _LAST:
        return words
    return f"{words[:_FIRST]} ... {words[-_LAST:]}"


def on_all(
    comm: MPI.Intracomm, step: Callable[[], T], undo: Callable[[T], object]
) -> list[T]:
    """Call ``step``, which must succeed on all ranks. Return the results of all ranks,
    which are JSON values, by rank. Collective.

    If ``step`` fails on some ranks, raise a CodedError on every rank. Ranks on which it
    succeeded then first call ``undo`` with their result.
    """
    outcome: list[T] = []
    failure: Exception | None = None
    try:
        outcome = [step()]
    except Exception as error:  # noqa: BLE001  # other ranks wait for an answer
        failure = error
    words = failure and f"{type(failure).__name__}: {failure}"
    all_ = gathered(comm, (outcome, words))
    errors = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(all_) if words]
    if errors:
        for made in outcome:
            undo(made)
        raise CodedError("; ".join(errors)) from failure
    return [outcome[0] for outcome, _ in all_]


def gathered(comm: MPI.Comm, value: Any) -> list[Any]:
    """Return each rank's value, a JSON value, by rank. Tuples become lists. Collective.
    Raise `Unreadable` if a rank's value cannot be read, or is longer than 16 MiB. All
    ranks raise it unless a rank has died.

    JSON needs no common classes on the ranks, unlike pickle: unpickling an unknown
    class would raise an unclear error, or run unknown code.
    """
    own = _bytes(value)
    # Begin with zeros, so that data that does not arrive is invalid JSON.
    lengths = np.zeros(comm.size, np.int64)
    # This call blocks: while the engine's thread ran, Open MPI 5.0 once lost a
    # non-blocking gather between hosts.
    comm.Allgather(np.array([len(own)], np.int64), lengths)
    for rank, length in enumerate(lengths.tolist()):
        _check_length(rank, length)
    ends = np.cumsum(lengths)
    everything = np.zeros(int(ends[-1]), np.uint8)
    where = lengths.tolist(), (ends - lengths).tolist()
    comm.Allgatherv(own, [everything, where, MPI.BYTE])
    parts = np.split(everything, ends[:-1])
    return [_parsed(rank, part) for rank, part in enumerate(parts)]


def broadcast(comm: MPI.Intracomm, value: Any, root: int = 0) -> Any:
    """Return the root's value on all ranks. Raise the errors of `gathered`.
    Collective."""
    own = _bytes(value if comm.rank == root else None)
    length = np.array([len(own)], np.int64)
    wait(comm.Ibcast(length, root))
    _check_length(root, int(length[0]))
    data = own if comm.rank == root else np.zeros(int(length[0]), np.uint8)
    wait(comm.Ibcast(data, root))
    return _parsed(root, data)


def _bytes(value: Any) -> np.ndarray:
    return np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)


def _check_length(rank: int, length: int) -> None:
    if not 0 <= length <= LONGEST:
        raise Unreadable(
            f"the answer of rank {rank} has {length} bytes, more than {LONGEST}: {_WHY}"
        )


def _parsed(rank: int, data: np.ndarray) -> Any:
    try:
        return json.loads(data.tobytes())
    except (ValueError, RecursionError):
        raise Unreadable(
            f"the answer of rank {rank} cannot be read: {data[:80].tobytes()!r}: {_WHY}"
        ) from None


def wait(request: MPI.Request) -> None:
    """Wait without spinning: the awaited rank may need this core."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause * 1.5 + 2e-6, 1e-3)
