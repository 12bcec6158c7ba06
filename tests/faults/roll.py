"""The rank that calls the roll dies after it has told only some ranks the result.

``roll.py DIRECTORY WHAT RANKS``: it tells RANKS ("1,3", or "" for none) to make a new
group without the dead last rank ("regroup"). If no rank is dead, it tells them to keep the old group ("stay"). Rank 3
has done one round more.
"""

import os
import signal
import sys
import time

from harness import Board
from mpi4py import MPI

from jaxcoded.group.membership import channel, messages, recovery
from jaxcoded.group.membership.pending import pending
from jaxcoded.group.membership.roll import Roll
from jaxcoded.group.process import Process
from jaxcoded.transport.agreement import gathered

SECONDS = 20.0

directory, what, told = sys.argv[1:]
told = {int(rank) for rank in told.split(",") if rank}
kind = messages.Regroup if what == "regroup" else messages.Stay
board = Board(directory)
comm = board.comm.Dup()
for it in board.comm, comm:
    it.Set_errhandler(MPI.ERRORS_RETURN)
processes = [Process(*fields) for fields in gathered(comm, Process.own())]
roll = Roll(comm, processes, 0)
last = comm.size - 1
if what == "regroup" and board.rank == last:
    os.kill(os.getpid(), signal.SIGKILL)
if board.rank == 0:
    say = roll._from_caller.say

    def tell_a_few(to, message):
        verdict = isinstance(message, kind)
        if not verdict or to in told:
            say(to, message)
        if verdict and to == (last - 1 if what == "regroup" else last):
            until = time.monotonic() + 1
            while time.monotonic() < until:
                [request.Test() for request, _ in channel._sent]
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGKILL)

    roll._from_caller.say = tell_a_few
stayed = 0
while not roll.call(SECONDS, False):  # a rank that is told to stay comes again
    stayed += 1
shrinking = pending(comm.Shrink)
roll.wait(shrinking, SECONDS, SECONDS, False)
smaller = shrinking.result(0.0)
known = True, 5 + (board.rank == 3)
survivors, _, behind = recovery.successors(smaller, comm, 0, known)
board.report(survivors=survivors, size=smaller.size, stayed=stayed, behind=behind)
os._exit(0)  # this test does not cover the end of an MPI with a dead rank
