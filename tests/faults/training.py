"""A small training, in which a process is stopped for longer than results are kept.

``training.py DIRECTORY TOKENS RANKS...``: the RANKS of each argument are stopped, one
argument after the other. With "4,1" both are stopped, and rank 4 continues first. With
TOKENS "yes" tokens order the rounds.
"""

import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import EXAMPLES, Board, Faults, close

import jaxcoded

FEATURES, STOPPED, BETWEEN, EVERY = 400, 150, 40, 24
PAUSE = 3e-3  # seconds, on average

directory, tokens, *victims = sys.argv[1:]
board = Board(directory)
# 64 rounds are kept at least, whatever their size
group = jaxcoded.CodedGroup(
    board.comm,
    jaxcoded.Coded(fanout=2),
    transport="engine",
    options=jaxcoded.Options(history_bytes=1),
)
faults = Faults(board)
random = np.random.default_rng(5)
steps = BETWEEN
for ranks in victims:
    for i, rank in enumerate(ranks.split(","), 1):
        faults.stop_at([int(rank)], steps, i * STOPPED)
        # when the rank comes back, other ranks are somewhat late
        for number in range(steps + i * STOPPED, steps + i * STOPPED + BETWEEN):
            for other in range(1, board.size):
                faults.sleep_at(other, number, random.exponential(PAUSE))
    steps += i * STOPPED + BETWEEN

optimizer = optax.adam(1e-2)
truth = np.random.default_rng(1).standard_normal(FEATURES)


def batch_of(step):
    """Return the global batch of a step, equal on all ranks."""
    random = np.random.default_rng(step)
    x = random.standard_normal((EXAMPLES, FEATURES))
    return x, x @ truth + random.standard_normal(EXAMPLES)


def loss(params, batch):
    x, y = batch
    return (x @ params["weight"] + params["bias"] - y) ** 2


def updated(state, grads):
    params, moments, step = state
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, step + 1


coded = jaxcoded.coded_value_and_grad(loss, group)


@jax.jit
def coded_step(state, batch, token):
    if tokens == "yes":
        (_, grads), _, token = coded(state[0], batch, token=token)
    else:
        _, grads = coded(state[0], batch)
    return updated(state, grads), token


@jax.jit
def plain_step(state, batch):
    return updated(state, jax.grad(lambda params: loss(params, batch).mean())(state[0]))


def start():
    params = {"weight": jnp.zeros(FEATURES), "bias": jnp.zeros(())}
    return params, optimizer.init(params), jnp.zeros((), jnp.int32)


def error_of(state, expected):
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected))
    return max(float(abs(mine - right).max()) for mine, right in pairs)


part = group.batch(EXAMPLES)
state = expected = start()
token, done, known, resynced = jnp.int32(0), 0, 0, []
while done < steps:
    faults.before(done + 1)
    x, y = batch_of(done)
    lag = group.lag()
    try:
        with jaxcoded.errors.translated():
            state_after, token = coded_step(
                state, part.of((x[part.indices], y[part.indices])), token
            )
            jax.block_until_ready(state_after)
    except jaxcoded.Desynchronized:
        time.sleep(20 * PAUSE)  # the rank does not continue at once
        state, token = group.resync(state), jnp.int32(0)
        resynced.append([done, int(state[2])])
        done = int(state[2])
        board.say(f"continues at step {done}")
    else:
        state, done = state_after, done + 1
        group.snapshot(state, every=EVERY)
        board.note(done)
    while known < done:
        expected, known = plain_step(expected, batch_of(known)), known + 1
    error = error_of(state, expected)
    assert error < 1e-9, (
        f"after step {done} rank {board.rank}, {lag} rounds late, is off by {error}; "
        f"it has resynced at {resynced}"
    )

bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
board.report(digest=hashlib.sha256(bits).hexdigest(), resynced=resynced)
close(board, group)
