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
_TAG = 32_749  # on MPI.COMM_WORLD, after everything else

_roots: set[int] = set()  # ranks of the world that this rank tells of its end
_absent: dict[
    int, float
] = {}  # ranks that this root gave up, and for how long it waits


def enter(root: int) -> None:
    """This process belongs to a group whose root is this rank of the world."""
    if not _roots:
        # registered late, so it runs before mpi4py finalizes
        atexit.register(_leave)
    _roots.add(root)


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
    for root in _roots - {world.rank}:
        world.Isend(nothing, dest=root, tag=_TAG).Free()
    if not _absent:
        return
    waited_for = set(range(world.size)) - {world.rank}
    until = time.monotonic() + max(_absent.values())
    while waited_for and time.monotonic() < until:
        status = MPI.Status()
        if world.Iprobe(tag=_TAG, status=status):
            world.Recv(nothing, source=status.source, tag=_TAG)
            waited_for.discard(status.source)
        elif waited_for <= set(_absent) and until - time.monotonic() > _GRACE:
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


# Ranks that were given up may have come back since, and be about to end.
_GRACE = 1.0
