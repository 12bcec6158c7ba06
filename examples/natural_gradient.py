"""Newton's steps for logistic regression, from two sums over the batch: ``OᵀO`` and ``Oᵀδ``.

    jaxcoded run -n 4 examples/natural_gradient.py

With natural gradients, Gauss–Newton and stochastic reconfiguration a step solves ``(OᵀO + λ) Δ = Oᵀδ``.
A row of ``O`` is the derivative of one example's output, scaled, and ``δ`` says by how much the
outputs are off. Both sums are linear in the examples, so they travel in one round. Where they are
exact the error is squared from step to step, down to rounding; were one rank's rows left out, it would
stop at what they are worth.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded

LAMBDA = 1.0  # ridge


def data():
    """Digits, and whether each is an 8: float32 ``(1797, 65)``, the last column 1; and ``(1797,)``."""
    x, digit = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    return x.astype(np.float32), (digit == 8).astype(np.float32)


def rows(w, x, y):
    """Of each example: the derivative of its output, and by how much that is off."""
    p = jax.nn.sigmoid(x @ w)
    spread = jnp.sqrt(p * (1 - p))  # of the label, if the model is right
    return spread[:, None] * x, (y - p) / spread


def train(comm, steps=8):
    """Returns the weights, and the norm of the gradient before each step."""
    x, y = data()
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        part = group.batch(len(x))

        @jax.jit
        def step(w, x, y):
            O, off = rows(w, x, y)
            weighted = part.weights[:, None] * O  # coded: once, in each of the two sums
            sums = {"OtO": weighted.T @ O, "Otd": weighted.T @ off}
            sums = jaxcoded.coded_allreduce(
                sums, group, part.weights
            )  # of all examples
            gradient = sums["Otd"] - LAMBDA * w
            metric = sums["OtO"] + LAMBDA * jnp.eye(len(w))
            return w + jnp.linalg.solve(metric, gradient), jnp.linalg.norm(gradient)

        w, norms = jnp.zeros(x.shape[1]), []
        for number in range(steps):
            w, norm = step(w, x[part.indices], y[part.indices])
            norms.append(float(norm))
            if group.rank == 0:
                print(f"step {number}: the gradient has norm {norm:.1e}")
    return w, norms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    w, _ = train(MPI.COMM_WORLD, parser.parse_args().steps)
    x, y = data()
    right = np.mean((x @ w > 0) == y)
    print(f"rank {MPI.COMM_WORLD.rank}: {right:.1%} of the digits told from the others")
