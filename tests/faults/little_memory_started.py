"""A rank's engine lacks the memory for one more started round, see `memory.cpp`.

``little_memory_started.py DIRECTORY VICTIM``: all rounds are started before the first
result is asked for. Each rank reports the rounds that fail.
"""

import ctypes
import os
import sys

import jax
import numpy as np
import uncounted
from harness import Board, close

import jaxcoded

ROUNDS = 40
BLOCK = 512  # bytes, in which a deque grows

board, victim = Board(sys.argv[1]), int(sys.argv[2])
group = jaxcoded.CodedGroup(
    board.comm, jaxcoded.Coded(stragglers=0), transport="engine"
)
memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
total = board.size * (board.size + 1) // 2
failed, handles = [], {}


def note(number, error):
    assert "too little memory" in str(error), f"round {number}: {error}"
    failed.append(number)


for number in range(1, ROUNDS + 1):
    own = np.full(4, (board.rank + 1.0) * number, np.float32)
    memory.refuse_bytes(BLOCK if board.rank == victim and number > 2 else 0)
    try:
        handles[number] = jax.block_until_ready(
            uncounted.coded_allreduce_start(own, group)
        )
    except RuntimeError as error:
        note(number, error)
memory.refuse_bytes(0)
for number, handle in handles.items():
    try:
        out = np.asarray(jaxcoded.coded_allreduce_done(handle))
    except RuntimeError as error:
        note(number, error)
    else:
        assert (out == total * number).all(), f"round {number} is of another one"
# no rank closes the group before the other ranks have their errors
board.comm.Barrier()
board.report(failed=sorted(failed))
close(board, group)
