"""More ranks are late than a parent tolerates: it waits, names them, and continues.

``waits.py DIRECTORY``: first ranks 1 and 2 sleep, the root's children. Then ranks 3 and
4 sleep, the children of rank 1, while the root continues without rank 1. Finally rank 1
stops the root, and continues the root after a report that the root does not answer.
"""

import logging
import os
import signal
import sys

from harness import SLOWNESS, Board, Faults, Sums, close, run

import jaxcoded

SECONDS, DEADLINE = 1.0 * SLOWNESS, 0.2 * SLOWNESS


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())
        if board.rank == 1 and "does not answer" in self.messages[-1]:
            os.kill(root, signal.SIGCONT)


def stop_the_root():
    """Stop the root before it calls round 25, even if this rank is late."""
    os.kill(root, signal.SIGSTOP)
    board.note(25)


board = Board(sys.argv[1])
root = board.comm.bcast(os.getpid())
heard = Heard()
logging.getLogger("jaxcoded").addHandler(heard)
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(fanout=2),
    transport="engine",
    options=jaxcoded.Options(deadline=DEADLINE),
)
sums, faults = Sums(group), Faults(board)
# compilation also takes long, and must not count
run(board, group, sums, faults, 5)
board.comm.Barrier()
heard.messages.clear()
for late, number in ((1, 10), (2, 10), (3, 20), (4, 20)):
    faults.sleep_at(late, number, SECONDS)
faults.call_at(1, 25, stop_the_root)
faults.call_at(0, 25, lambda: board.wait({1}, 25))
lag = run(board, group, sums, faults, 30, first=6)
board.report(digest=sums.digest, lag=lag, heard=heard.messages)
close(board, group)
