"""A live rank is stuck.

``stuck.py DIRECTORY WAY RANK``, where WAY is one of:

- "lock": a loop in C that holds the interpreter's lock;
- "loop": a loop in Python;
- "device": its jitted step waits for such a loop;
- "stopped": it is stopped;
- "jit": the other ranks wait for it in a jitted step, as no rank may be missing.

The other ranks do `ROUNDS` more rounds, and send SIGUSR1 to the stuck rank and its
parent. At the end the rank is killed; in "jit" it continues.
"""

import logging
import os
import signal
import sys
import time

from harness import PATIENCE, SLOWNESS, Board, Device, Faults, Sums, hang, run

import jaxcoded

FIRST, ROUNDS = 10, 20
STUCK = 0.5 * SLOWNESS  # seconds

directory, way, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
board = Board(directory)
pids = board.comm.allgather(os.getpid())
heard = []
logging.getLogger("jaxcoded").addHandler(
    type(
        "Heard",
        (logging.Handler,),
        {"emit": lambda _, record: heard.append(record.getMessage())},
    )()
)
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(fanout=2, stragglers=int(way != "jit")),
    transport="engine",
    options=jaxcoded.Options(deadline=STUCK if way != "jit" else 60.0),
)
device = Device()
sums = Sums(group, device=device) if way == "device" else Sums(group)
faults = Faults(board)
parent = group.plan.tree.parents[victim]


def stay():
    board.note(FIRST)
    if way == "device":
        device.stuck = True
    else:
        hang(way)


def ask():
    board.say("asks")
    time.sleep(0.5 * SLOWNESS)  # until the other ranks are in the step
    for rank in sorted({victim, parent, 0}):
        os.kill(pids[rank], signal.SIGUSR1)
    time.sleep(1.5 * SLOWNESS)


faults.call_at(victim, FIRST, ask if way == "jit" else stay)
if way == "jit":
    run(board, group, sums, faults, FIRST + 2)
    board.report(digest=sums.digest)
    group.close()
    sys.exit()
run(board, group, sums, faults, FIRST + ROUNDS)
if board.rank == parent:
    until = time.monotonic() + PATIENCE
    while not heard and time.monotonic() < until:
        time.sleep(0.05)
    ask()
board.report(digest=sums.digest, heard=heard)
board.note(1000)
if board.rank == 0:
    board.wait(set(range(board.size)) - {victim}, 1000)
    os.kill(pids[victim], signal.SIGKILL)
group.close(2.0)
