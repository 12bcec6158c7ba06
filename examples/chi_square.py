"""Fit a histogram of all examples by Gauss–Newton steps for chi-square.

    jaxcoded run -n 4 examples/chi_square.py

How does the progression of diabetes depend on body mass? The model is ``log progression
= a + b · mass + c · noise``. A good model reproduces three histograms of scikit-learn's
442 patients: for lean, average and heavy patients. What a simulated patient adds to the
bins is a smooth function of the parameters, so the histogram has a derivative.
Chi-square is a function of the histogram, not a sum over patients. Let ``s`` be the
simulated histogram, ``J`` its Jacobian, ``d`` the real histogram and ``W`` the weights.
Then the gradient is ``Jᵀ W (s − d)``, and the Gauss–Newton matrix is ``Jᵀ W J``. A fit
without one rank's patients would be biased.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_diabetes

import jaxcoded

EDGES = np.linspace(3, 6, 13)  # edges of the bins, for the logarithm of progression
DRAWS = 20  # simulated patients for each real one


def in_bins(groups, progression):
    """Return how much of each patient falls into each bin of its group, ``(count, 36)``."""
    above = jax.nn.sigmoid((progression[:, None] - EDGES) / 0.05)
    bins = above[:, :-1] - above[:, 1:]
    return (groups[:, :, None] * bins[:, None]).reshape(len(groups), -1)


def patients():
    """Return the simulated patients, float32 ``(8840, 5)``: mass, noise and group. Also
    return the histogram of the real patients, float64 ``(36,)``.
    """
    data = load_diabetes()
    mass = data.data[:, 2] * len(data.data) ** 0.5  # scaled to variance 1
    groups = np.eye(3)[np.digitize(mass, np.quantile(mass, [1 / 3, 2 / 3]))]
    histogram = np.asarray(in_bins(groups, np.log(data.target)), np.float64).sum(0)
    each = np.repeat(np.column_stack([mass, groups]), DRAWS, axis=0)
    noise = np.random.default_rng(0).normal(size=len(each))
    return np.insert(each, 1, noise, axis=1).astype(np.float32), histogram


def simulated(theta, examples):
    """Return what each simulated patient adds to the histogram."""
    mass, noise, groups = examples[:, 0], examples[:, 1], examples[:, 2:]
    return in_bins(groups, theta[0] + theta[1] * mass + theta[2] * noise) / DRAWS


def fit(comm, steps=6):
    """Return the parameters, and chi-square before each step."""
    examples, observed = patients()
    weight = 1 / (observed + 1)  # about 1 / variance of a count
    with jaxcoded.CodedGroup(comm) as group:
        batch = group.batch(examples)
        histogram = jaxcoded.coded_sum(simulated, group)

        @jax.jit
        def step(theta):
            sums = lambda t: histogram(t, batch)
            off, jacobian = sums(theta) - observed, jax.jacfwd(sums)(theta)
            chi_square = off @ (weight * off)
            gradient = jacobian.T @ (weight * off)
            curvature = jacobian.T @ (weight[:, None] * jacobian)
            return theta - jnp.linalg.solve(curvature, gradient), chi_square

        theta, seen = jnp.array([4.5, 0.0, 0.5]), []
        for number in range(steps):
            theta, chi_square = step(theta)
            seen.append(float(chi_square))
            if group.rank == 0:
                print(
                    f"step {number}: chi-square {chi_square:.4g} of {len(observed)} bins"
                )
    return theta, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    theta, _ = fit(MPI.COMM_WORLD, parser.parse_args().steps)
    print(f"rank {MPI.COMM_WORLD.rank}: a, b, c = {np.round(np.float64(theta), 3)}")
