"""The end of a process whose job has ranks that will never end.

``MPI_Finalize`` waits for every rank of the job, also for one that is frozen. So a root
that has left its group without some ranks does not finalize before it knows that the
others will: every rank tells it of its end, and it asks those that have not whether they
are there. An engine answers as long as its process runs, whatever the program does and
also when it has closed the group. Once nobody is left but ranks that do not answer, the
root ends the job. Of ranks that were never in a group of its own it knows nothing, and
waits in ``MPI_Finalize`` as any program does.
"""

import atexit
import contextlib
import os
import sys
import time

import numpy as np
from mpi4py import MPI

_process = os.getpid()
# As in cpp/mpi_wire.h, whose other tags the engine uses.
_END, _QUESTION, _ANSWER = 0, 2, 3

# Of a rank that has not answered for so many seconds nobody hears any more.
_SILENT_SECONDS = 10.0
_ASK_SECONDS = 1.0  # between an answer and the next question
_SAY_SECONDS = 10.0  # after which a root that waits says for whom

# The communicators of this process's groups, by ranks of the world in whose groups it was
# a member: what it tells a root of its end goes over the last one. Not over
# MPI.COMM_WORLD: most roots never ask, and to MPICH a message that nobody has received
# there is an error of MPI_Finalize, though none in a communicator that was never freed.
_roots: dict[int, tuple[MPI.Intracomm, int]] = {}
# Where this rank is the root, with the ranks of the world.
_own: list[tuple[MPI.Intracomm, list[int]]] = []
_absent: set[int] = set()  # ranks of the world that this root gave up
_failed = np.zeros(1, np.uint8)  # whether an exception ends a process of the group: 1
_status = 0  # with which ``python -m mpi4py`` would end the job after this process
_NOTHING = np.empty(0, np.uint8)


def enter(comm: MPI.Intracomm, world: list[int], root: int) -> None:
    """This process belongs to a group with this root.

    Args:
        comm: the group's own, which is never freed.
        world: its ranks as ranks of the world.
        root: in the group.
    """
    if comm.rank != root:
        _roots[world[root]] = comm, root
    elif all(comm is not known for known, _ in _own):
        _own.append((comm, world))


def register() -> None:
    """Before the end of MPI, do what must be done. Whatever is registered later with
    `atexit` comes first."""
    atexit.register(_leave)
    # What `sys.exit` was told is known nowhere else, and is not read back from mpi4py.
    told = getattr(MPI, "_set_abort_status", None)
    if told is None:
        return

    def note(status: int) -> None:
        global _status
        _status = status
        told(status)

    MPI._set_abort_status = note


def give_up(ranks: list[int]) -> None:
    """This root has left a group without these ranks of the world."""
    _absent.update(ranks)


def uncaught() -> BaseException | None:
    """What ends this process, if that is an exception; ``SystemExit`` is none."""
    return getattr(sys, "last_value", None)


def in_words(error: BaseException) -> str:
    """An error and the first line of what it says."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _leave() -> None:
    if os.getpid() != _process:
        return  # a fork
    # an MPI that has noticed a failure does not wait for the failed: nothing to do
    with contextlib.suppress(MPI.Exception):
        _end()


def _end() -> None:
    _failed[0] = uncaught() is not None
    for comm, root in _roots.values():
        comm.Isend(_failed, dest=root, tag=_END).Free()
    if _absent:
        _wait()


def _wait() -> None:
    """Until all other ranks are at their end. Where the rest says nothing, end the job."""
    world = MPI.COMM_WORLD
    members = {rank: (comm, i) for comm, ranks in _own for i, rank in enumerate(ranks)}
    if len(members) < world.size:
        _say(
            f"waits in MPI_Finalize for ranks {sorted(_absent)}, without which it left "
            "its group. If they are frozen it waits for ever: it cannot end a job that "
            "has ranks outside its groups, of which it knows nothing"
        )
        return
    del members[world.rank]
    silent_since: dict[int, float] = {}
    ask_at = dict.fromkeys(members, 0.0)
    say_at = time.monotonic() + _SAY_SECONDS
    while members:
        now = time.monotonic()
        for rank, _ in _received(_ANSWER):
            silent_since.pop(rank, None)
            ask_at[rank] = now + _ASK_SECONDS
        for rank, its in _received(_END):
            _failed[0] |= its
            members.pop(rank, None)
        for rank, (comm, i) in members.items():
            if rank not in silent_since and now >= ask_at[rank]:
                comm.Isend(_NOTHING, dest=i, tag=_QUESTION).Free()
                silent_since[rank] = now
        if members and all(
            now - silent_since.get(rank, now) >= _SILENT_SECONDS for rank in members
        ):
            _say(
                f"ends the job without ranks {sorted(members)}, which do not say "
                "whether they are there: they are frozen or dead"
            )
            sys.stdout.flush()
            world.Abort(_status or int(_failed[0]))
        if now >= say_at:
            _say(f"waits for the end of ranks {sorted(members)}")
            say_at = float("inf")
        time.sleep(1e-2)


def _received(tag: int) -> list[tuple[int, int]]:
    """Ranks of the world that have said this since the last look, and what."""
    out = []
    word = np.zeros(1, np.uint8)
    for comm, ranks in _own:
        status = MPI.Status()
        while comm.Iprobe(tag=tag, status=status):
            comm.Recv(word, source=status.source, tag=tag)
            out.append((ranks[status.source], int(word[0])))
    return out


def _say(words: str) -> None:
    print(f"jaxcoded: rank {MPI.COMM_WORLD.rank} {words}", file=sys.stderr, flush=True)
