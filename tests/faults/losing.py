"""MPI loses one message of the engine and reports an error, see `refusing.c`.

``losing.py DIRECTORY WHICH RANK NUMBER [ROUNDS]``: of the messages that a rank sends or receives, or that ask for a piece or
bring a piece, the one with this NUMBER is lost. Rounds that fail end on all ranks, and sums are right.
"""

import ctypes
import os
import sys

import numpy as np
from harness import Board, close
from uncounted import allreduce

import jaxcoded

BEFORE = 5

board = Board(sys.argv[1])
which, rank, number = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rounds = int(sys.argv[5]) if len(sys.argv) > 5 else 20
tree = jaxcoded.Coded(parents=(-1, 0, 0, 1), stragglers=0)
# in many rounds of many pieces each, pieces get the number of a lost one
options = jaxcoded.Options(piece_bytes=1024) if rounds > 20 else None
group = jaxcoded.CodedGroup(board.comm, tree, transport="engine", options=options)
mpi = ctypes.CDLL(os.environ["LD_PRELOAD"])
total = board.size * (board.size + 1) // 2
errors = {}
for step in range(1, rounds + 1):
    if step == BEFORE and board.rank == rank:
        getattr(mpi, f"lose_{which}")(number)
    own = np.full(100 if step % 2 else 10_000, (board.rank + 1.0) * step)
    try:
        out = np.asarray(allreduce(own, group))
    except jaxcoded.CodedError as error:
        errors[step] = str(error)
    else:
        assert (out == total * step).all(), f"round {step} is of another one"
board.report(errors=errors, lost=mpi.has_lost())
close(board, group)
