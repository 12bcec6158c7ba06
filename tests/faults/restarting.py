"""Train from the latest checkpoint on. ``restarting.py DIRECTORY VICTIM [whole]``: rank VICTIM is killed after `KILLED`
steps; with -1 no rank is killed. With "whole" the other ranks end with an error at the
next checkpoint.
"""

import os
import pathlib
import signal
import sys

import numpy as np
import uncounted
from harness import EXAMPLES, Board

import jaxcoded

STEPS, EVERY, KILLED, WIDTH = 20, 5, 12, 40

directory, victim = pathlib.Path(sys.argv[1]), int(sys.argv[2])
whole = sys.argv[3:] == ["whole"]
board = Board(directory)
kept = directory / "checkpoint.npz"
step, w = 0, np.zeros(WIDTH)
if kept.exists():
    checkpoint = np.load(kept)
    step, w = int(checkpoint["step"]), checkpoint["w"]
began, loaded = step, w
# the group is opened only now: the other ranks do not wait for a late rank, which would then find the checkpoint that
# they write
group = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded())
x = np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH))
part = group.batch(EXAMPLES)


def gradient(w, x, weights):
    return 2 * (weights * (x @ w - 1)) @ x / EXAMPLES


while step < STEPS:
    if step == KILLED and group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    mine = gradient(w, x[part.indices], np.asarray(part.weights, float))
    w = w - 1e-2 * uncounted.allreduce(mine, group)
    step += 1
    if step % EVERY == 0 and group.rank == 0:
        np.savez(directory / "new.npz", step=step, w=w)
        (directory / "new.npz").rename(kept)  # atomic: no reader sees a partial file
    if step % EVERY == 0 and whole:
        group = group.recovered()
        if group.size < board.size:
            raise RuntimeError(f"{group.size} of {board.size} ranks are left")
alone = [np.zeros(WIDTH)]
for _ in range(STEPS):
    alone.append(alone[-1] - 1e-2 * gradient(alone[-1], x, np.ones(EXAMPLES)))
errors = abs(loaded - alone[began]).max(), abs(w - alone[STEPS]).max()
board.report(began=began, size=group.size, errors=errors)
group.close()
