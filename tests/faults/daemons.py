"""Daemon threads return from the engine while the interpreter of their process ends.

``daemons.py DIRECTORY``: the threads call rounds again and again, although the group
accepts none any more. Most of them then wait for the interpreter as they return.
"""

import contextlib
import sys
import threading

import numpy as np
import uncounted
from harness import Board

import jaxcoded

THREADS, WIDTH = 8, 10

board = Board(sys.argv[1])
group = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded(), transport="engine")
# the first call imports modules, which must happen before the process ends
uncounted.allreduce(np.ones(WIDTH), group)
called = threading.Barrier(THREADS + 1)


def call():
    called.wait()
    while True:
        with contextlib.suppress(jaxcoded.CodedError):
            uncounted.allreduce(np.ones(WIDTH), group)


for _ in range(THREADS):
    threading.Thread(target=call, daemon=True).start()
called.wait()
board.report(end=True)
