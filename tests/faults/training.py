"""A little training, in which a process is stopped for longer than results are kept.

``training.py DIRECTORY TOKENS RANKS...``: each of the RANKS is stopped, one after the
other. Those of "4,1" are stopped together, and rank 4 goes on first. With TOKENS "yes"
tokens order the rounds.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import EXAMPLES, Board, Faults, close

import jaxcoded

FEATURES, STOPPED, BETWEEN, EVERY = 400, 150, 30, 8

directory, tokens, *victims = sys.argv[1:]
board = Board(directory)
# at least 64 rounds are kept, whatever their size
group = jaxcoded.CodedGroup(board.comm, fanout=2, transport="engine", history_bytes=1)
faults = Faults(board)
steps = BETWEEN
for ranks in victims:
    for i, rank in enumerate(ranks.split(","), 1):
        faults.stop_at([int(rank)], steps, i * STOPPED)
    steps += i * STOPPED + BETWEEN

optimizer = optax.adam(1e-2)
truth = np.random.default_rng(1).standard_normal(FEATURES)


def batch_of(step):
    """The global batch of a step, equal on all ranks."""
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


coded = jaxcoded.coded_value_and_grad(loss, group, mean=True)


@jax.jit
def coded_step(state, batch, weights, token):
    if tokens == "yes":
        (_, grads), token = coded(state[0], batch, weights, token=token)
    else:
        _, grads = coded(state[0], batch, weights)
    return updated(state, grads), token


@jax.jit
def plain_step(state, batch):
    return updated(state, jax.grad(lambda params: loss(params, batch).mean())(state[0]))


def start():
    params = {"weight": jnp.zeros(FEATURES), "bias": jnp.zeros(())}
    return params, optimizer.init(params), jnp.zeros((), jnp.int32)


indices, weights = group.assignment(EXAMPLES)
state, token, done, resynced = start(), jnp.int32(0), 0, []
while done < steps:
    faults.before(done + 1)
    x, y = batch_of(done)
    try:
        state_after, token = coded_step(state, (x[indices], y[indices]), weights, token)
        jax.block_until_ready(state_after)
    except jax.errors.JaxRuntimeError as error:
        if "jaxcoded.Desynchronized:" not in str(error):
            raise
        state, token = group.resync(state), jnp.int32(0)
        resynced.append([done, int(state[2])])
        done = int(state[2])
        board.say(f"continues at step {done}")
        continue
    state, done = state_after, done + 1
    group.snapshot(state, every=EVERY)
    board.note(done)

expected = start()
for step in range(steps):
    expected = plain_step(expected, batch_of(step))
error = max(
    float(abs(mine - right).max())
    for mine, right in zip(jax.tree.leaves(state), jax.tree.leaves(expected))
)
bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
board.report(digest=hashlib.sha256(bits).hexdigest(), error=error, resynced=resynced)
close(board, group)
