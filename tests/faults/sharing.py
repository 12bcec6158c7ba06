"""Train with shared work, and let faults hit ranks in the middle of a block.

``sharing.py DIRECTORY WAY WIDTH RANKS...``, where gradients have WIDTH floats and each
of the RANKS has a fault, the WAY:

- "stopped": in a block, until the other ranks have done `WITHOUT` steps;
- "killed": in a block;
- "uncaught": a block raises an exception that ends the program;
- "closes", "continues": the rank catches the exception and closes the group, or does
  the next step;
- "exits", "ends": the rank does fewer steps, and exits, or ends and closes the group.

The program checks every step.
"""

import hashlib
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np
from harness import SLOWNESS, Board, close

import jaxcoded
from jaxcoded.transport import ending

FAULT, WITHOUT, STEPS = 6, 15, 36
BATCH = 50
NAP = 2e-3  # seconds, in every block
STOPPED = 2.0  # seconds, at least
ending.SILENT_SECONDS = 4.0 * SLOWNESS

directory, way, width, *victims = sys.argv[1:]
width, victims = int(width), [int(rank) for rank in victims]
board = Board(directory)
pids = board.comm.allgather(os.getpid())
group = jaxcoded.CodedGroup(
    board.comm, jaxcoded.Shared(replicas=2, blocks=4), transport="engine"
)
random = np.random.default_rng(0)
x = random.standard_normal((BATCH, width))
y = random.standard_normal(BATCH)


class Blocks:
    """Apply this rank's fault while it computes a block."""

    def __init__(self):
        self.step = self.number = 0
        self.harmless = board.rank not in victims

    def begin(self, step):
        self.step, self.number = step, 0

    def __call__(self, y):
        time.sleep(NAP)
        self.number += 1
        # this rank's vector then has one block, which no other rank will use
        if self.step >= FAULT and self.number == 2 and not self.harmless:
            self.harmless = True
            befall()
        return y


def befall():
    board.say(f"{way} in a block of step {blocks.step}")
    match way:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "uncaught" | "closes" | "continues":
            raise RuntimeError(f"injected into rank {board.rank}")


def stopped(rank):
    stat = pathlib.Path(f"/proc/{pids[rank]}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def continue_them():
    """Continue the stopped ranks from the root, once the other ranks have done
    `WITHOUT` steps.
    """
    while not all(map(stopped, victims)):
        time.sleep(0.01)
    start, first = time.monotonic(), board.done(0)
    others = set(range(board.size)) - set(victims)
    try:
        board.wait(others, first + WITHOUT)
        time.sleep(max(0, start + STOPPED - time.monotonic()))
        board.report(without=board.done(0) - max(map(board.done, victims)))
    finally:
        for rank in victims:
            os.kill(pids[rank], signal.SIGCONT)


blocks = Blocks()


def losses(w, batch):
    x, y = batch
    y = jax.pure_callback(blocks, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    return (x @ w - y) ** 2


part = group.batch(BATCH)
local = x[part.indices], y[part.indices]
coded = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
bits = hashlib.sha256()


def right(w):
    off = x @ w - y
    return (off**2).mean(), 2 * off @ x / BATCH


def checked(step, w):
    """Do and check a step; return the parameters after it."""
    blocks.begin(step)
    actual = jax.block_until_ready(coded(w, part.of(local)))
    for mine, expected in zip(actual, right(w)):
        error = abs(np.asarray(mine) - expected).max()
        assert error < 1e-12, f"step {step} is off by {error:.1e}"
        bits.update(np.asarray(mine).tobytes())
    board.note(step)
    return w - 10 / width * np.asarray(actual[1])


def trained():
    w, most_lag = np.zeros(width), 0
    for step in range(1, STEPS + 1):
        if step == FAULT and board.rank in victims:
            match way:
                case "exits":
                    board.say("exits")
                    sys.exit(0)
                case "ends":
                    return w, most_lag
        most_lag = max(most_lag, group.lag())
        try:
            w = checked(step, w)
        except jax.errors.JaxRuntimeError as error:
            if f"injected into rank {board.rank}" not in str(error):
                raise
            match way:
                case "uncaught":
                    raise
                case "closes":
                    return w, most_lag
            w = w - 10 / width * right(w)[1]
            bits.update(b"its own")
    return w, most_lag


jax.block_until_ready(checked(0, np.zeros(width)))  # compiles
if way == "stopped" and board.rank == 0:
    threading.Thread(target=continue_them, daemon=True).start()
try:
    w, lag = trained()
    board.report(
        digest=bits.hexdigest(),
        lag=lag,
        weights=hashlib.sha256(w.tobytes()).hexdigest(),
        steps=board.done(board.rank),
    )
    close(board, group, timeout=10.0 * SLOWNESS)
finally:
    board.say("leaves the program")
