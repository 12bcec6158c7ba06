"""Evaluate a model exactly although a rank dies: loss, accuracy, confusion matrix.

    jaxcoded run -n 4 --ft examples/evaluation.py --kill 2

A rank adds up its part of all batches, and one round sums the totals of all ranks. The
sum is coded, so it covers all examples even without one rank: here a rank kills itself
in the middle. Counts are whole numbers, so the program rounds them to remove the
rounding error of the code.
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


def data():
    """Return pixels, float32 ``(1797, 64)``, and labels ``(1797,)``."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def model(x, y):
    """Return the mean image of each digit, ``(10, 64)``: the model predicts the digit
    with the nearest mean.
    """
    return np.stack([x[y == digit].mean(axis=0) for digit in range(10)])


@jax.jit
def add(total, means, batch):
    """Return the total plus this rank's part of a batch."""
    (x, y), weights = batch.data, batch.weights
    logits = -jnp.sum((x[:, None] - means) ** 2, axis=2)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    guess = jnp.argmax(logits, axis=1)
    return {
        "loss": total["loss"] + weights @ losses,
        "confusions": total["confusions"].at[y, guess].add(jnp.asarray(weights)),
    }


def evaluate(comm, victim=None):
    """Return the mean loss and the confusion matrix, which has a row for each true digit."""
    x, y = data()
    means = model(x, y)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        total = {"loss": jnp.zeros(()), "confusions": jnp.zeros((10, 10))}
        weights = []
        # without shuffling; the last batch is smaller
        for number, batch in enumerate(group.epoch((x, y), 256)):
            if number == 3 and group.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            total = add(total, means, batch)
            weights.append(batch.weights)
        # over all 1,797 examples
        total = jaxcoded.coded_allreduce(total, group, weights)
        jax.block_until_ready(total)
    return float(total["loss"]) / len(x), np.rint(total["confusions"]).astype(int)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument(
        "--kill", type=int, metavar="RANK", help="the rank that kills itself"
    )
    loss, confusions = evaluate(MPI.COMM_WORLD, parser.parse_args().kill)
    if MPI.COMM_WORLD.rank == 0:
        examples, right = confusions.sum(), confusions.trace()
        print(f"{right} of {examples} right, loss {loss:.6f}")
        np.fill_diagonal(confusions, 0)
        digit, other = np.unravel_index(confusions.argmax(), confusions.shape)
        print(f"most often a {digit} is taken for a {other}, {confusions.max()} times")
