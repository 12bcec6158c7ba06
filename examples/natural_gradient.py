"""Newton steps for logistic regression from two sums, ``OᵀO`` and ``Oᵀδ``.

    jaxcoded run -n 4 examples/natural_gradient.py

A step of natural gradients, Gauss–Newton or stochastic reconfiguration solves ``(OᵀO +
λ) Δ = Oᵀδ``. A row of ``O`` is the scaled derivative of one example's output, and ``δ``
holds the errors of the outputs. Neither sum depends on the other, so one round forms
both. With exact sums each step squares the error, until only rounding is left. Without
one rank's rows the error would not converge to zero.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded

LAMBDA = 1.0  # regularisation (ridge)


def data():
    """Return digits, float32 ``(1797, 65)`` with a last column of ones, and whether
    each digit is an 8, ``(1797,)``.
    """
    x, digit = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    return x.astype(np.float32), (digit == 8).astype(np.float32)


def rows(w, x, y):
    """Return the derivative of each example's output, and the output's error."""
    p = jax.nn.sigmoid(x @ w)
    spread = jnp.sqrt(p * (1 - p))  # standard deviation of the label in the model
    return spread[:, None] * x, (y - p) / spread


def train(comm, steps=8):
    """Return the weights, and the norm of the gradient before each step."""
    x, y = data()
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        part = group.batch(len(x))

        @jax.jit
        def step(w, x, y):
            O, off = rows(w, x, y)
            # each sum contains the weights once
            weighted = part.weights[:, None] * O
            sums = {"OtO": weighted.T @ O, "Otd": weighted.T @ off}
            sums = jaxcoded.coded_allreduce(
                sums, group, part.weights
            )  # the sums over all examples
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
    print(
        f"rank {MPI.COMM_WORLD.rank}: {right:.1%} of the digits are classified correctly"
    )
