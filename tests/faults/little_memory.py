"""One rank's engine has too little memory now and then, see `memory.cpp`.

``little_memory.py DIRECTORY WAY VICTIM``: each round sums different numbers, so that a
wrong sum shows a rank in a different round. WAY: rounds are "called", or "started".
Each rank reports the rounds with too little memory. The last `CLEAN` rounds have
enough.
"""

import ctypes
import os
import resource
import sys

import numpy as np
import uncounted
from harness import Board, close

import jaxcoded

ROUNDS, CLEAN = 40, 6
EVERY_VECTOR, EVERY_OTHER = 3, 997  # one of this many requests for memory fails
GROWTH = 1.16  # factor of the vectors' lengths, so that freed memory rarely fits

directory, way, victim = sys.argv[1:]
# the engine then takes ordinary memory instead of shared memory
resource.setrlimit(resource.RLIMIT_AS, (1 << 46, -1))
board = Board(directory)
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(stragglers=0),
    transport="engine",
    options=jaxcoded.Options(sections_from=1 << 40),
)
memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
total = board.size * (board.size + 1) // 2


def summed(x):
    if way == "called":
        return uncounted.allreduce(x, group)
    handle = uncounted.coded_allreduce_start(x, group)
    return jaxcoded.coded_allreduce_done(handle)


failed = []
for number in range(1, ROUNDS + 1):
    little = board.rank == int(victim) and number <= ROUNDS - CLEAN
    memory.little_memory(*((EVERY_VECTOR, EVERY_OTHER) if little else (0, 0)))
    floats = int(2000 * GROWTH**number)
    own = np.full(floats, (board.rank + 1.0) * number, np.float32)
    try:
        out = np.asarray(summed(own))
    except RuntimeError as error:
        words = f"rank {victim} has too little memory for this call"
        assert words in str(error), f"round {number}: {error}"
        failed.append(number)
    else:
        assert (out == total * number).all(), f"round {number} is of another one"
    board.note(number)
board.report(failed=failed)
close(board, group)
