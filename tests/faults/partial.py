"""Train with shared work while more ranks than `replicas` are stopped: the other ranks
continue with the part of the batch that they hold.

``partial.py DIRECTORY WAY RANKS...``: each of the RANKS is stopped in the middle of a
block until the other ranks have done `WITHOUT` steps. WAY: blocks are computed in
"jit", or on the "host". The program checks every step.
"""

import hashlib
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
import uncounted
from harness import SLOWNESS, Board, close

import jaxcoded

FAULT, STEPS = 3, 32
WITHOUT = 16  # more steps would take too long, as each step waits until the deadline
BLOCKS, EXAMPLES, WIDTH = 4, 3, 50
NAP = 2e-3  # seconds, in every block
DEADLINE = 3.0 * SLOWNESS  # seconds

directory, way, *victims = sys.argv[1:]
victims = [int(rank) for rank in victims]
board = Board(directory)
pids = board.comm.allgather(os.getpid())
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Shared(blocks=BLOCKS),
    options=jaxcoded.Options(deadline=DEADLINE, on_deadline="approximate"),
    transport="engine",
)
holders = group.plan.placement.holders
batch = len(holders) * EXAMPLES
random = np.random.default_rng(0)
x, y = random.standard_normal((batch, WIDTH)), random.standard_normal(batch)
# examples that only the stopped ranks hold
lost = np.repeat([set(ranks) <= set(victims) for ranks in holders], EXAMPLES)
assert 0 < lost.sum() < batch / 2
state = {"step": 0, "number": 0, "harmless": board.rank not in victims}


def compute(y):
    time.sleep(NAP)
    state["number"] += 1
    if state["step"] >= FAULT and state["number"] == 2 and not state["harmless"]:
        state["harmless"] = True
        board.say(f"stopped in a block of step {state['step']}")
        os.kill(os.getpid(), signal.SIGSTOP)
    return y


def continue_them():
    """Continue the stopped ranks from the root, once the other ranks have done
    `WITHOUT` steps.
    """
    try:
        board.wait(set(range(board.size)) - set(victims), FAULT + WITHOUT)
    finally:
        for rank in victims:
            os.kill(pids[rank], signal.SIGCONT)


def losses(w, batch):
    x, y = batch
    y = jax.pure_callback(compute, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    return (x @ w - y) ** 2


part = group.batch(batch)
coded = jax.jit(jaxcoded.coded_value_and_grad(losses, group, residual=True))


@jax.jit
def finish(sums):
    return uncounted.coded_allreduce(sums, group, residual=True)


def in_jit(w):
    out = coded(w, part.of((x[part.indices], y[part.indices])))
    return np.asarray(out.value[1]), float(out.residual)


def on_the_host(w):
    total, count = np.zeros(WIDTH), 0
    with group.blocks(batch) as blocks:
        for block in blocks:
            rows = block.indices
            off = x[rows] @ w - compute(y[rows])
            total += 2 * off @ x[rows]
            count += len(rows)
    (total, count), residual, _ = finish((total, float(count)))
    return np.asarray(total / count), float(residual)


def gradient(w, there):
    off = x[there] @ w - y[there]
    return 2 * off @ x[there] / there.sum()


w = np.zeros(WIDTH)
everything = np.ones(batch, bool)
partial, bits = 0, hashlib.sha256()
if board.rank == 0:
    threading.Thread(target=continue_them, daemon=True).start()
for step in range(STEPS):
    state |= {"step": step, "number": 0}
    actual, residual = (in_jit if way == "jit" else on_the_host)(w)
    there = everything if residual == 0 else ~lost
    missing = 1 - there.mean()
    assert abs(residual**2 - missing) < 1e-6, (step, residual)
    error = abs(actual - gradient(w, there)).max()
    assert error < 1e-12, f"step {step} is off by {error:.1e}"
    partial += residual > 0
    bits.update(actual.tobytes())
    w = w - 0.01 * actual
    board.note(step + 1)
seen = group.telemetry()
board.report(
    digest=bits.hexdigest(),
    steps=STEPS,
    partial=partial,
    approximate=int(seen.approximate[~seen.loop].sum()),
)
close(board, group, timeout=10.0 * SLOWNESS)
