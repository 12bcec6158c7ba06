"""Fit a histogram of all examples by Gauss–Newton steps for chi-square.

    jaxcoded run -n 4 examples/chi_square.py

Each of 20,000 objects adds to the bins of its observed brightness, smoothly, so that
the histogram has a derivative. Three parameters describe how brightness depends on
size. Chi-square is a function of the histogram, not a sum over objects. With the
Jacobian ``J`` of the sum ``s`` its gradient is ``Jᵀ W (s − d)``, and the Gauss–Newton
matrix is ``Jᵀ W J``. A fit without one rank's objects would be biased.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

EDGES = np.linspace(-4, 4, 17)
TRUTH = np.array([0.8, -0.3, 0.6])


def objects(count=20_000):
    """Return the size of each object and a standard normal number: float32 ``(count,
    2)``.
    """
    return np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)


def bins(theta, examples):
    """Return how much of each object falls into each bin, ``(count, 16)``."""
    size, noise = examples[:, 0], examples[:, 1]
    brightness = theta[0] * size + theta[1] * size**2 + theta[2] * noise
    above = jax.nn.sigmoid((brightness[:, None] - EDGES) / 0.1)
    return above[:, :-1] - above[:, 1:]


def fit(comm, steps=8):
    """Return the parameters, and chi-square before each step."""
    x = objects()
    observed = np.asarray(bins(TRUTH, x), np.float64).sum(0)
    weight = 1 / (observed + 1)  # one over the variance of a count
    with jaxcoded.CodedGroup(comm) as group:
        batch = group.batch(x)
        histogram = jaxcoded.coded_sum(bins, group)

        @jax.jit
        def step(theta):
            sums = lambda t: histogram(t, batch)
            off, jacobian = sums(theta) - observed, jax.jacfwd(sums)(theta)
            chi_square = off @ (weight * off)
            gradient = jacobian.T @ (weight * off)
            curvature = jacobian.T @ (weight[:, None] * jacobian)
            return theta - jnp.linalg.solve(curvature, gradient), chi_square

        theta, seen = jnp.array([0.5, 0.0, 1.0]), []
        for number in range(steps):
            theta, chi_square = step(theta)
            seen.append(float(chi_square))
            if group.rank == 0:
                print(f"step {number}: chi-square {chi_square:.3g}")
    return theta, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    theta, _ = fit(MPI.COMM_WORLD, parser.parse_args().steps)
    print(f"rank {MPI.COMM_WORLD.rank}: {np.round(theta, 3)}, and {TRUTH} is right")
