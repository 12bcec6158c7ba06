"""A rank has too little memory to take a sum that is decided, see `memory.cpp`.

``little_memory_done.py DIRECTORY VICTIM``: VICTIM has too little memory to take the sum
of the third step. Each rank adds its results to its state, and reports the errors of
its steps.
"""

import ctypes
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import uncounted
from harness import Board, close

import jaxcoded
from jaxcoded.transport.engine import _engine

STEPS, LACKS = 6, 3
VECTORS = 24  # bytes: the addresses of three vectors

jax.config.update("jax_enable_x64", True)
board, victim = Board(sys.argv[1]), int(sys.argv[2])
group = jaxcoded.CodedGroup(
    board.comm, jaxcoded.Coded(stragglers=0), transport="engine"
)
memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
total = board.size * (board.size + 1) // 2
errors = {}
for step in range(1, STEPS + 1):
    mine = board.rank + 1.0
    own = [np.full(4, mine, dtype) for dtype in (np.float32, np.float64)]
    own.append(jnp.full(4, mine, jnp.bfloat16))
    try:
        handle = jax.block_until_ready(uncounted.coded_allreduce_start(own, group))
        # wait until the round is decided
        while _engine.decided(group._session.index) < step:
            time.sleep(0.01)
        if board.rank == victim and step == LACKS:
            memory.refuse_bytes(VECTORS)
        out = jax.block_until_ready(jaxcoded.coded_allreduce_done(handle))
        assert all((np.asarray(each, float) == total).all() for each in out)
    except RuntimeError as error:
        errors[step] = str(error)
    memory.refuse_bytes(0)
board.report(errors=errors)
close(board, group)
