"""Some processes are stopped for a while, and the other ranks continue their rounds.

``stopped.py DIRECTORY FANOUT ROUNDS WIDTHS RANKS...``: the RANKS of each argument ("5"
or "1,5") are stopped together, for ROUNDS rounds. Gradients have the lengths WIDTHS
("300,3000").
"""

import sys

from harness import Board, Faults, Sums, close, run, tree, widths

import jaxcoded

directory, fanout, rounds, words, *victims = sys.argv[1:]
rounds = int(rounds)
board = Board(directory)
group = jaxcoded.CodedGroup(board.comm, **tree(fanout), transport="engine")
faults = Faults(board)
first = 20
for ranks in victims:
    faults.stop_at([int(rank) for rank in ranks.split(",")], first, rounds)
    first += rounds + 20
sums = Sums(group, widths(words))
lag = run(board, group, sums, faults, first)
board.report(digest=sums.digest, lag=lag)
close(board, group)
