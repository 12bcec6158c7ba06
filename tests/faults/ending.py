"""Processes end in different ways with a round in flight, before their parents have
called it. ``ending.py DIRECTORY``.

Ranks 2 and 3 are below the root, 4 and 5 below rank 1. The root and rank 1 are late,
and need ranks 1 and 6 only. The processes use freed memory again.
"""

import atexit
import sys
import threading
import time

import jax
import numpy as np
import uncounted
from harness import Board, Faults, Sums, close, run

import jaxcoded

FAULT, ROUNDS = 5, 8
SIZE = 3000  # length of a gradient, and of the arrays that later use its memory

kept = []


def use_memory_again():
    kept.extend(np.full(SIZE, 1e30) for _ in range(2000))


def use_memory_of_the_engine():
    use_memory_again()
    board.note(FAULT)


directory = sys.argv[1]
board = Board(directory)
if board.rank in (2, 3, 4, 5):
    atexit.register(use_memory_of_the_engine)  # runs after the engine's end
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.make_plan(7, jaxcoded.Coded(parents=[-1, 0, 0, 0, 1, 1, 1], stragglers=2)),
    transport="engine",
)
sums, faults = Sums(group, (SIZE,)), Faults(board)
start = jax.jit(lambda vector: uncounted.coded_allreduce_start(vector, group))


def end(error, *, thread=False, early=False):
    vector = sums.gradient(FAULT)
    if early:  # runs before the engine's end
        atexit.register(use_memory_again)
    if thread:
        call = threading.Thread(
            target=lambda: uncounted.allreduce(vector, group), daemon=True
        )
        call.start()
        time.sleep(0.5)  # time in which the other thread calls
    else:
        kept.append(jax.block_until_ready(start(vector)))
    board.say("ends")
    raise error


faults.call_at(2, FAULT, lambda: end(SystemExit(0)))
faults.call_at(3, FAULT, lambda: end(RuntimeError("injected into rank 3")))
faults.call_at(4, FAULT, lambda: end(SystemExit(0), early=True))
faults.call_at(5, FAULT, lambda: end(SystemExit(0), thread=True))
for late in (0, 1, 6):
    faults.call_at(late, FAULT, lambda: board.wait((2, 3, 4, 5), FAULT))

run(board, group, sums, faults, ROUNDS)
board.report(digest=sums.digest)
close(board, group)
