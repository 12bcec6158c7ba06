"""A rank whose message is needed is killed, under an MPI that reports deaths.

``announced.py DIRECTORY WHEN FLOATS...``: each number of FLOATS has a group of `PLACES` ranks. The second rank of each
group is killed:

- "before": before it calls a round;
- "at once": after it has announced its message, before its parent fetches the message;
- "known": like "at once", but its parent fetches the message only when it knows of the death.

The survivors report the result of their round, and how often their process then woke
up.
"""

import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
import uncounted
from harness import Board

import jaxcoded

PLACES = 4
IDLE = 2.0  # seconds
KNOWN = 2.0  # seconds until MPI has reported a death
SUM = PLACES * (PLACES + 1) // 2

directory, when, *sizes = sys.argv[1:]
board = Board(directory)
mine, place = divmod(board.rank, PLACES)
comm = board.comm.Split(mine)
pids = comm.allgather(os.getpid())
group = jaxcoded.CodedGroup(
    comm,
    jaxcoded.Coded(stragglers=0),
    transport="engine",
    options=jaxcoded.Options(sections_from=1 << 20),
)
own = np.full(int(sizes[mine]), place + 1.0, np.float32)
assert (uncounted.allreduce(own, group) == SUM).all()


def die_when_announced():
    while True:
        text = group._session.transport.status()
        if "calls round 2" in text and "offered nothing" not in text:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1e-3)


def wake_ups():
    """Return how often the threads of this process have gone to sleep so far."""
    lines = [
        line
        for path in pathlib.Path("/proc/self/task").glob("*/status")
        for line in path.read_text().splitlines()
    ]
    return sum(
        int(line.split()[1])
        for line in lines
        if line.startswith("voluntary_ctxt_switches")
    )


if place == 1:
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die_when_announced, daemon=True).start()
while place == 0 and pathlib.Path(f"/proc/{pids[1]}").exists():
    time.sleep(1e-3)  # the parent comes too late to fetch the message
if place == 0 and when == "known":
    time.sleep(KNOWN)
try:
    total = uncounted.allreduce(own, group)
    outcome = "sum" if (total == SUM).all() else "wrong"
except jaxcoded.TooManyErasures as error:
    outcome = f"{type(error).__name__}: {error}"
before = wake_ups()
time.sleep(IDLE)
board.report(group=mine, outcome=outcome, wake_ups=wake_ups() - before)
board.note(1)
board.wait({rank for rank in range(board.size) if rank % PLACES != 1}, 1)
os._exit(0)  # this test does not cover the end of an MPI with a dead rank
