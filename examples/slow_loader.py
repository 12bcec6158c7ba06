"""Load data slowly on one rank, which does not read the batches that it has missed.

    jaxcoded run -n 4 examples/slow_loader.py

The other ranks continue without this rank, and every step still uses the whole batch.
If a round is decided before a rank calls it, the call returns the existing result, and
does not use the rank's data. ``group.lag()`` is the number of such rounds. So the slow
rank does not load their batches, and catches up.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

x = np.random.default_rng(0).normal(size=(500, 5)).astype(np.float32)
y = x @ np.arange(5, dtype=np.float32)


def losses(w, batch):  # one loss for each example
    x, y = batch
    return (x @ w - y) ** 2


def train(comm, epochs=10, slow=2, seconds=0.1):
    """Return the weights, and the number of batches that this rank has read."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)

        @jax.jit
        def step(w, batch):
            loss, grad = loss_and_grad(w, batch)
            return w - 0.1 * grad, loss

        def load(indices):
            if group.rank == slow:
                time.sleep(seconds)  # a slow disk
            return x[indices], y[indices]

        def nothing(indices):  # returns arrays with the shapes and dtypes of `load`
            return np.zeros((len(indices), 5), x.dtype), np.zeros(len(indices), y.dtype)

        w, read, batches = jnp.zeros(5), 0, 0
        for epoch in range(epochs):
            for part in group.epoch(len(x), 50, seed=0, epoch=epoch):
                behind = group.lag() > 0
                data = (nothing if behind else load)(part.indices)
                w, loss = step(w, part.of(data))
                batches, read = batches + 1, read + (not behind)
        print(f"rank {group.rank}: read {read} of {batches} batches, loss {loss:.1e}")
    return w, read


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--slow", type=int, default=2, help="the rank that is slow")
    args = parser.parse_args()
    train(MPI.COMM_WORLD, args.epochs, args.slow)
