"""One live rank stops entering the all-reduce: the program of jax#38503, with a group.

Without a group all other ranks wait for ever, without an error or a warning, as the
stuck rank is not dead.

``alive_but_stuck.py DIRECTORY WHY``: the last rank is stuck, and the group puts it out.
WHY may also name the reason why the group cannot put the
rank out: its process belongs to "another namespace", "another user" or "another host".
Then the rank continues later.
"""

import errno
import sys

import numpy as np
import uncounted
from harness import SLOWNESS, Board, close, hang

import jaxcoded
from jaxcoded.group.membership import roll
from jaxcoded.group.process import Process

STEPS, STALL_STEP, ELEMENTS = 10, 5, 64 * 1024
DEADLINE, COMES = 4.0 * SLOWNESS, 2.0 * SLOWNESS  # seconds
GAVE_UP, FAILED_TOO = 100, 200  # numbers on the board

directory, why = sys.argv[1:]
board = Board(directory)
last = board.size - 1
stalls = board.rank == last
if why == "another namespace" and stalls:
    own = Process.own()._replace(numbers="of a container")
    Process.own = lambda: own
if why == "another namespace":
    roll.REPORTED = 0.1  # so that no rank takes the waiting caller for a stuck rank
if why == "another user":
    Process.kill = lambda _: errno.EPERM
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(stragglers=0),
    options=jaxcoded.Options(deadline=DEADLINE, on_deadline="raise"),
)
said, step = [], 0
while step < STEPS:
    if step == STALL_STEP and stalls and not said:
        if not why:
            hang("sleep")
        board.wait(range(last), GAVE_UP)
    try:
        mine = np.full(ELEMENTS, group.rank + 1.0)
        total = uncounted.allreduce(mine, group)
        assert total.tolist() == [sum(range(1, group.size + 1))] * ELEMENTS
        step += 1
    except jaxcoded.DeadlineExceeded as error:
        said.append(str(error))
        try:
            group = group.recovered(timeout=COMES, put_out=True)
        except jaxcoded.CodedError as error:
            said.append(str(error))
            board.note(FAILED_TOO if stalls else GAVE_UP)
            board.wait({last}, FAILED_TOO)
board.report(said=said, size=group.size)
close(board, group)
