"""A rank with children is stopped, and does not take what one of them has sent it. How often does that one look?

``polling.py DIRECTORY``: reports how many times in a second the rank went to sleep while its program slept.
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
        # each call has words of its own, which ranks tell each other, and which are too long for MPI to send at once
        layers = {f"layer{i}": np.ones((3 + i, number)) for i in range(4)}
        jax.block_until_ready(coded_allreduce(layers, group))
        board.note(number)


def sleeps():
    """Of all threads of this process, so far."""
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
    time.sleep(SECONDS)  # for naps to grow
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
