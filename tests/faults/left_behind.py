"""The root leaves without rank 4, which is stopped, and its program ends. Then rank 3
continues rank 4, which makes a call. ``left_behind.py DIRECTORY``.
"""

import atexit
import os
import signal
import sys

from harness import SLOWNESS, Board, Faults, Sums, close, run
from jax.errors import JaxRuntimeError

import jaxcoded
from jaxcoded.transport import ending

FAULT, ROUNDS = 20, 60
VICTIM, WAKER = 4, 3
AT_ITS_END = 1000  # number of rounds that the root notes at its end
ending.SILENT_SECONDS = 20 * SLOWNESS

board = Board(sys.argv[1])
if board.rank == 0:
    atexit.register(board.note, AT_ITS_END)  # runs after the engine's end
victim = board.comm.allgather(os.getpid())[VICTIM]
group = jaxcoded.CodedGroup(
    board.comm, jaxcoded.Coded(stragglers=1), transport="engine"
)
sums, faults = Sums(group, (100,)), Faults(board)
faults.stop_at([VICTIM], FAULT)
try:
    run(board, group, sums, faults, ROUNDS)
except JaxRuntimeError as error:
    board.report(error=str(error))
else:
    board.report(digest=sums.digest)
close(board, group, timeout=1.0)
if board.rank == WAKER:
    board.wait([0], AT_ITS_END)
    os.kill(victim, signal.SIGCONT)
