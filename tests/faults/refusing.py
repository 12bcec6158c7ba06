"""Ranks whose MPI does not take each third message, and does not receive each third piece of a vector, see `refusing.c`.

``refusing.py DIRECTORY``: the sum of each round is of other numbers, so that one shows where a rank is in another round.
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
