"""The root becomes silent. ``root.py DIRECTORY WAY``: it is "stopped" until the round has failed on all other ranks, or
"killed", with fault-tolerant MPI.
"""

import os
import signal
import sys

import jax
from harness import Board, Faults, Sums, run

import jaxcoded

FAULT, DEADLINE = 5, 2.0

directory, way = sys.argv[1:]
board = Board(directory)
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(fanout=2),
    transport="engine",
    options=jaxcoded.Options(deadline=DEADLINE, on_deadline="raise"),
)
sums, faults = Sums(group), Faults(board)
pids = board.comm.allgather(os.getpid())
others = range(1, board.size)
# compilation also takes long
run(board, group, sums, faults, FAULT - 1)
board.wait(range(board.size), FAULT - 1)
faults.signal_at(0, FAULT, signal.SIGSTOP if way == "stopped" else signal.SIGKILL)
try:
    run(board, group, sums, faults, FAULT, FAULT)
except jax.errors.JaxRuntimeError as error:
    board.report(error=str(error))
board.note(FAULT)
if board.rank == 1:
    board.wait(others, FAULT)
    if way == "stopped":
        os.kill(pids[0], signal.SIGCONT)
if way == "killed":
    board.wait(others, FAULT)
    os._exit(0)  # this test does not cover the end of an MPI with a dead rank
