"""MPI refuses to send every third message and to receive every third piece, see `refusing.c`.

``refusing.py DIRECTORY``: each round sums different numbers, so that a wrong sum shows
a rank in a different round.
"""

import ctypes
import os
import sys

import numpy as np
from harness import Board, close
from uncounted import allreduce

import jaxcoded

ROUNDS = 40

board = Board(sys.argv[1])
tree = jaxcoded.Coded(parents=(-1, 0, 0, 1), stragglers=0)
group = jaxcoded.CodedGroup(board.comm, tree, transport="engine")
mpi = ctypes.CDLL(os.environ["LD_PRELOAD"])
mpi.refuse_each(3)
total = board.size * (board.size + 1) // 2
for number in range(1, ROUNDS + 1):
    own = np.full(100 if number % 2 else 10_000, (board.rank + 1.0) * number)
    out = np.asarray(allreduce(own, group))
    assert (out == total * number).all(), f"round {number} is of another one"
    board.note(number)
board.report(rounds=ROUNDS, refused=mpi.refused())
close(board, group)
