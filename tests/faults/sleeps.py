"""Ranks sleep in random rounds, in each round at most as many children of a parent as
it tolerates. ``sleeps.py DIRECTORY FANOUT ROUNDS WIDTHS``.
"""

import sys

import numpy as np
from harness import Board, Faults, Sums, close, resources, run, tree, widths

import jaxcoded

LONGEST = 20e-3  # seconds
SHARE = 0.1  # fraction of rounds in which a parent lacks children

directory, fanout, rounds, words = sys.argv[1:]
rounds = int(rounds)
board = Board(directory)
group = jaxcoded.CodedGroup(board.comm, **tree(fanout), transport="engine")
sums, faults = Sums(group, widths(words)), Faults(board)
random = np.random.default_rng(7)
for number in range(1, rounds + 1):
    for coding, parent in zip(group.plan.codings, range(group.size)):
        if coding is not None and random.random() < SHARE:
            children = random.permutation(group.plan.coded_children(parent))
            for child in children[: coding.code.stragglers]:
                faults.sleep_at(int(child), number, random.uniform(0, LONGEST))


def measure(name):
    """Measure after all ranks have caught up, so that nothing is kept for late ranks."""
    board.comm.Barrier()
    board.report(**{name: resources()})


early = rounds // 4
lag = run(board, group, sums, faults, early)
measure("early")
lag = max(lag, run(board, group, sums, faults, rounds, early + 1))
measure("late")
formed = group.statistics()["formed_bytes"]
board.report(digest=sums.digest, lag=lag, formed=formed)
close(board, group)
