"""Whoever calls the roll dies after it has told a few. ``roll.py DIRECTORY RANKS``: who is told
("1,3", or "" for nobody). The last rank is dead before, and rank 3 knows one round more."""

import os
import signal
import sys
import time

from harness import Board
from mpi4py import MPI

from jaxcoded.group import recovery

SECONDS = 20.0

directory, told = sys.argv[1:]
told = {int(rank) for rank in told.split(",") if rank}
board = Board(directory)
comm = board.comm.Dup()
for it in board.comm, comm:
    it.Set_errhandler(MPI.ERRORS_RETURN)
roll = recovery.Roll(comm, 0)
if board.rank == comm.size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
if board.rank == 0:
    send = roll._send

    def tell_a_few(what, to, tag):
        if tag != recovery._VERDICT or to in told:
            send(what, to, tag)
        if tag == recovery._VERDICT and to == comm.size - 2:
            until = time.monotonic() + 1
            while time.monotonic() < until:
                [request.Test() for request, _ in roll._sent]
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGKILL)

    roll._send = tell_a_few
called = roll.call(lambda said: said, SECONDS, 5 + (board.rank == 3))
smaller = recovery.shrunk(comm, SECONDS)
survivors = recovery.successors(smaller, comm, called.rounds, 0)
board.report(survivors=survivors, size=smaller.size)
os._exit(0)  # the end of such an MPI is not of this test
