"""Ranks that take their time to the end are not ended by a root that has closed its group.

``healthy.py DIRECTORY WHO``: rank 3 comes to its own close late. If WHO is "outside", rank
4 is in none of the root's groups, and comes to its end late.
"""

import sys
import time

from harness import Board, Faults, Sums, close, run

import jaxcoded
from jaxcoded.transport import ending

TIMEOUT, SECONDS = 0.5, 8.0
ending._SILENT_SECONDS = 2.0

directory, who = sys.argv[1:]
board = Board(directory)
faults = Faults(board)
outside = who == "outside" and board.rank == 4
comm = board.comm.Split(int(outside), board.rank)
if outside:
    time.sleep(SECONDS)
else:
    group = jaxcoded.CodedGroup(comm, fanout=2, transport="engine")
    sums = Sums(group)
    run(board, group, sums, faults, 5)
    comm.Barrier()
    if board.rank == 3:  # it writes a checkpoint
        time.sleep(SECONDS)
    close(board, group, timeout=TIMEOUT)
board.report(end=True)
