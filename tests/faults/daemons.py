"""Daemon threads that come back from the engine while the interpreter of their process ends.

``daemons.py DIRECTORY``: no round can be called any more by then, and they try it again and
again, so that most of them wait for the interpreter where they come back.
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
# what the first call imports is there before the process ends
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
