"""Ranks open and close groups one after the other, without a common start. ``starts.py
DIRECTORY FANOUT GROUPS``.
"""

import sys
import time

import numpy as np
from harness import Board, Faults, Sums, run

import jaxcoded

PAUSE = 5e-3  # seconds, on average
WIDTHS = 20, 300, 3000, 50_000

directory, fanout, groups = sys.argv[1], *map(int, sys.argv[2:])
board = Board(directory)
random = np.random.default_rng(board.rank)
faults = Faults(board)
digests = []
for number in range(groups):
    time.sleep(random.exponential(PAUSE))
    group = jaxcoded.CodedGroup(
        board.comm, jaxcoded.Coded(fanout=fanout), transport="engine"
    )
    time.sleep(random.exponential(PAUSE))
    sums = Sums(group, [WIDTHS[number % len(WIDTHS)]])
    run(board, group, sums, faults, 3)
    digests.append(sums.digest)
    group.close()
board.report(digest=digests)
