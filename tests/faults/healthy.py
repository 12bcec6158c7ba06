"""A root that has closed its group does not end ranks that still work.

``healthy.py DIRECTORY WHO``: rank 3 closes late. If WHO is "outside", rank 4 is in none
of the root's groups and ends late. If WHO is "atexit" or "raise", rank 3 runs an
`atexit` function, registered before the first group, when the other ranks end. Rank 4
is then stopped for ever. With "raise", rank 3 fails.
"""

import atexit
import sys
import time

from harness import SLOWNESS, Board, Faults, Sums, close, run

import jaxcoded
from jaxcoded.transport import ending

TIMEOUT, SECONDS = 0.5, 8.0 * SLOWNESS
ending.SILENT_SECONDS = 2.0 * SLOWNESS

directory, who = sys.argv[1:]
board = Board(directory)
faults = Faults(board)
outside = who == "outside" and board.rank == 4
comm = board.comm.Split(int(outside), board.rank)
exits = who in ("atexit", "raise")


def write():
    """Write a checkpoint."""
    time.sleep(SECONDS)
    board.report(end=True)


if exits and board.rank == 3:
    atexit.register(write)
if outside:
    time.sleep(SECONDS)
else:
    group = jaxcoded.CodedGroup(comm, jaxcoded.Coded(fanout=2), transport="engine")
    sums = Sums(group)
    if exits:
        faults.stop_at([4], 3)
    run(board, group, sums, faults, 5)
    if not exits:
        comm.Barrier()
        if board.rank == 3:
            write()
    close(board, group, timeout=TIMEOUT)
if exits and board.rank == 3:
    if who == "raise":
        raise RuntimeError("injected into rank 3")
else:
    board.report(end=True)
