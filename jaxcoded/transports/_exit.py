"""The end of a process whose job has ranks that will never end.

``MPI_Finalize`` waits for every rank of the job, also for one that is frozen. So a root
that has closed its group without some ranks does not finalize: once all others are at
their end, it ends the job.
"""

import atexit
import contextlib
import os
import sys
import time

import numpy as np
from mpi4py import MPI

_process = os.getpid()
_TAG = 0  # the engine uses the others

# The communicators of this process's groups, by ranks of the world in whose groups it was
# a member: what it tells a root of its end goes over the last one. Not over
# MPI.COMM_WORLD: most roots never ask, and to MPICH a message that nobody has received
# there is an error of MPI_Finalize, though none in a communicator that was never freed.
_roots: dict[int, tuple[MPI.Intracomm, int]] = {}
# Where this rank is the root, with the ranks of the world.
_own: list[tuple[MPI.Intracomm, list[int]]] = []
_absent: dict[
    int, float
] = {}  # ranks that this root gave up, and for how long it waits


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


def give_up(ranks: list[int], seconds: float) -> None:
    """This root has closed a group without these ranks of the world."""
    _absent.update(dict.fromkeys(ranks, seconds))


def _leave() -> None:
    if os.getpid() != _process:
        return  # a fork
    # an MPI that has noticed a failure does not wait for the failed: nothing to do
    with contextlib.suppress(MPI.Exception):
        _end()


def _end() -> None:
    world = MPI.COMM_WORLD
    nothing = np.empty(0, np.uint8)
    for comm, root in _roots.values():
        comm.Isend(nothing, dest=root, tag=_TAG).Free()
    if not _absent:
        return
    waited_for = set(range(world.size)) - {world.rank}
    until = time.monotonic() + max(_absent.values())
    while waited_for and time.monotonic() < until:
        ended = _ended(nothing)
        waited_for -= ended
        if ended:
            continue
        if waited_for <= set(_absent) and until - time.monotonic() > _GRACE:
            until = time.monotonic() + _GRACE
        else:
            time.sleep(1e-3)
    if waited_for:
        print(
            f"jaxcoded: rank {world.rank} ends the job without ranks "
            f"{sorted(waited_for)}, which are frozen, dead or far behind",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        world.Abort(0)


def _ended(nothing: np.ndarray) -> set[int]:
    """Ranks of the world that have told of their end since the last look."""
    ended = set()
    for comm, ranks in _own:
        status = MPI.Status()
        while comm.Iprobe(tag=_TAG, status=status):
            comm.Recv(nothing, source=status.source, tag=_TAG)
            ended.add(ranks[status.source])
    return ended


# Ranks that were given up may have come back since, and be about to end.
_GRACE = 1.0
