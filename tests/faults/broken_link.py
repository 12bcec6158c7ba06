"""MPI loses all messages from one rank to another and reports this, see `refusing.c`.

``broken_link.py DIRECTORY FROM TO``: the link breaks in round 5. The code can do without rank 1.
"""

import ctypes
import os
import sys

import numpy as np
from harness import Board, close
from uncounted import allreduce

import jaxcoded

board = Board(sys.argv[1])
sender, receiver = map(int, sys.argv[2:])
tree = jaxcoded.Coded(parents=(-1, 0, 0, 0), stragglers=1)
options = jaxcoded.Options(deadline=3, on_deadline="raise")
group = jaxcoded.CodedGroup(board.comm, tree, transport="engine", options=options)
mpi = ctypes.CDLL(os.environ["LD_PRELOAD"])
# of the sum of 12 examples, each of which is 1
share = float(np.sum(group.batch(12).weights))
errors = {}
for step in range(1, 21):
    if step == 5 and board.rank == sender:
        mpi.lose_to(receiver)
    try:
        out = np.asarray(allreduce(np.full(100, share * step), group))
    except jaxcoded.CodedError as error:
        errors[step] = str(error)
        if board.rank == 1 and isinstance(error, jaxcoded.DeadlineExceeded):
            break
    else:
        assert np.allclose(out, 12 * step), f"round {step} is of another one"
board.report(errors=errors, rounds=step, lost=mpi.all_lost())
close(board, group, timeout=10)
