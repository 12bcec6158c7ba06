"""Train, and continue after the death of ranks, even of the root.

    jaxcoded run -n 5 --ft examples/recovered.py --kill 40:2 --kill 90:0
    jaxcoded run -n 5 --ft examples/recovered.py --kill 40:2 --kill 90:0 --replace

The loss equals that of a run without deaths. All ranks call `recovered` after the same
steps, and after a failed step. Then they repeat the failed step: the live ranks use the
same batch, and get the same sum. With --replace new ranks replace the dead ranks. New
ranks run this program from its beginning, and get the state from the other ranks.
"""

import argparse
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded
from jaxcoded.errors import translated

STEPS, EVERY, BATCH = 150, 25, 100
TRIES = 5  # failed tries before the program gives up

tx = optax.sgd(0.2, momentum=0.9)


def losses(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["in"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y)


def beginning():
    random = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(random.normal(size=(64, 32)) / 8, jnp.float32),
        "out": jnp.asarray(random.normal(size=(32, 10)) / 6, jnp.float32),
    }
    return params, tx.init(params)


def make_step(group, x, y):
    """Return a group's step: a function of the step's number, the parameters and the
    optimizer's state.
    """
    loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)
    batches = len(group.epoch(len(x), BATCH))

    @jax.jit  # no donation: a failed step is repeated with the same arguments
    def compiled(params, state, batch):
        loss, grads = loss_and_grad(params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    def step(number, params, state):
        epoch, number = divmod(number, batches)
        batch = group.epoch((x, y), BATCH, seed=0, epoch=epoch)[number]
        return compiled(params, state, batch)

    return step


def train(comm, steps=STEPS, kill=(), replace=False):
    """Return the parameters.

    Args:
        kill: pairs of a step and a rank that kills itself before this step. Ranks that
            join later ignore these pairs.
        replace: whether new ranks replace dead ranks.
    """
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    # after a minute a step fails instead of waiting for a frozen rank
    options = jaxcoded.Options(deadline=60.0, on_deadline="raise")
    group, rank, full = jaxcoded.CodedGroup.joining(), "new", comm.size
    if group is None:
        rank = comm.rank
        group = jaxcoded.CodedGroup(comm, jaxcoded.Shared(), options=options)
    stepping, number, failed = None, 0, 0
    params, state = beginning()
    while number < steps:
        try:
            with translated():
                # all ranks call this after the same step, or after a failed step
                if failed or (number and number % EVERY == 0):
                    group = group.recovered(put_out=True)
                    if replace and group.size < full:
                        group = group.extended(full - group.size)
                if group is not stepping or not group.alike:
                    stepping, step = group, make_step(group, x, y)
                    own = number, full, params, state
                    roots = jaxcoded.tree_bcast(own, group)
                    number, full, params, state = jax.block_until_ready(roots)
                    number, full = int(number), int(full)
                    now = f"rank {group.rank} of {group.size}"
                    print(
                        f"rank {rank} continues at step {number} as {now}", flush=True
                    )
                if (number, rank) in kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                new = step(number, params, state)
                params, state, loss = jax.block_until_ready(new)
        except jaxcoded.CodedError as error:
            failed += 1
            print(f"rank {rank}, step {number}: {error}", flush=True)
            if failed > TRIES:
                raise
            continue
        number, failed = number + 1, 0
        if group.rank == 0 and number % EVERY == 0:
            line = f"step {number} of {steps}, loss {loss:.4f}, {group.size} ranks"
            print(line, flush=True)
    group.close()
    return params


def faults(text):
    step, rank = text.split(":")
    return int(step), int(rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument(
        "--kill", type=faults, action="append", default=[], metavar="STEP:RANK"
    )
    parser.add_argument("--replace", action="store_true")
    arguments = parser.parse_args()
    train(MPI.COMM_WORLD, kill=arguments.kill, replace=arguments.replace)
