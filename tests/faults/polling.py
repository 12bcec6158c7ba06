"""A stopped parent does not receive its child's message: how often does the child poll?

``polling.py DIRECTORY``: report how often per second the child's threads went to sleep
while its program slept.
"""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
from harness import Board, close
from uncounted import coded_allreduce

import jaxcoded

STOPPED, CHILD, SECONDS = 1, 4, 3

board = Board(sys.argv[1])
tree = jaxcoded.Coded(parents=(-1, 0, 0, 0, STOPPED))
group = jaxcoded.CodedGroup(board.comm, tree, transport="engine")
pids = board.comm.allgather(os.getpid())


def sums(numbers):
    for number in numbers:
        # the calls have different, long descriptions, which ranks exchange; MPI cannot
        # send them at once
        layers = {f"layer{i}": np.ones((3 + i, number)) for i in range(4)}
        jax.block_until_ready(coded_allreduce(layers, group))
        board.note(number)


def sleeps():
    """Return how often the threads of this process have gone to sleep so far."""
    return sum(
        int(line.split()[1])
        for status in pathlib.Path("/proc/self/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


sums(range(1, 3))
board.comm.Barrier()
if board.rank == 0:
    os.kill(pids[STOPPED], signal.SIGSTOP)
    board.note(3)
if board.rank != STOPPED:
    board.wait([0], 3)
    sums(range(4, 7))
    time.sleep(SECONDS)  # until the pauses have grown
    before, since = sleeps(), time.monotonic()
    time.sleep(SECONDS)
    board.report(sleeps=(sleeps() - before) / (time.monotonic() - since))
    board.note(7)
    if board.rank == 0:
        board.wait({0, 2, 3, CHILD}, 7)
        os.kill(pids[STOPPED], signal.SIGCONT)
else:
    board.wait([0], 3)
    sums(range(4, 7))
close(board, group)
