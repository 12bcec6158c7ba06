"""Take steps along the gradient of a function of a sum; a rank is killed or stopped
between the sum and its gradient.

``composing.py DIRECTORY STRATEGY SIGNAL``: the last rank gets the signal, SIGKILL or
SIGSTOP, in the middle of step `FAULT`. The program checks every step.
"""

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from harness import Board, close

import jaxcoded

FAULT, STEPS = 3, 12
STRATEGIES = {
    "shared": jaxcoded.Shared(),
    "coded": jaxcoded.Coded(stragglers=1),
}

directory, strategy, name = sys.argv[1:]
board = Board(directory)
victim = board.size - 1
pids = board.comm.allgather(os.getpid())
group = jaxcoded.CodedGroup(board.comm, STRATEGIES[strategy])
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6))
state = {"step": 0, "harmless": board.rank != victim}


def between(sums):
    """Run a callback between the sum and its gradient."""
    if state["step"] == FAULT and not state["harmless"]:
        state["harmless"] = True
        board.say(f"gets {name} between the sum and its gradient")
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.01)
    return np.zeros((), sums.dtype)


def values(w, x):
    return jnp.tanh(x @ w)[:, None] * x


def outer(sums, here=lambda s: 0):
    sums += here(jax.lax.stop_gradient(sums))  # adds 0, but the gradient waits for it
    return jnp.sum((sums / len(x) - 0.3) ** 2)


total = jaxcoded.coded_sum(values, group)
batch = group.batch(x)
like = jax.ShapeDtypeStruct((), np.float64)
here = lambda sums: jax.pure_callback(between, like, sums)
step = jax.jit(jax.grad(lambda w: outer(total(w, batch), here)))
exact = jax.jit(jax.grad(lambda w: outer(values(w, x).sum(0))))


def continue_it():
    """Continue the stopped rank from the root, once the other ranks have done steps
    without it. The other ranks may have done these steps before the rank is stopped, so
    the root sends the signal again and again.
    """
    board.wait(range(victim), FAULT + 4)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pids[victim], signal.SIGCONT)
            time.sleep(0.1)


w, bits = jnp.asarray(rng.normal(size=6)), hashlib.sha256()
if board.rank == 0 and name == "SIGSTOP":
    threading.Thread(target=continue_it, daemon=True).start()
for number in range(STEPS):
    state["step"] = number
    actual = np.asarray(step(w))
    error = abs(actual - exact(w)).max()
    assert error < 1e-12, f"step {number} is off by {error:.1e}"
    bits.update(actual.tobytes())
    w = w - 0.1 * actual
    board.note(number + 1)
board.report(digest=bits.hexdigest(), steps=STEPS)
close(board, group)
