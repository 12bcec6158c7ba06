"""Newton steps for logistic regression by Hessian-vector products.

    jaxcoded run -n 4 examples/newton_cg.py

A step solves ``H Δ = g`` for 650 weights without forming ``H``: conjugate gradients
need only products of ``H`` with vectors. ``jax.linearize`` of the gradient gives the
gradient and these products. The gradient takes two rounds, and each product two more.
All sums are exact, so the steps converge up to rounding, whichever rank is late.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.sparse.linalg import cg
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded

LAMBDA = 1.0  # regularisation (ridge)


def data():
    """Return digits with a last column of ones, float32 ``(1797, 65)``, and their
    labels.
    """
    x, digit = load_digits(return_X_y=True)
    return np.hstack([x / 16, np.ones((len(x), 1))]).astype(np.float32), digit


def losses(w, batch):
    x, digit = batch
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, digit)


def train(comm, steps=8):
    """Return the weights, and the norm of the gradient before each step."""
    with jaxcoded.CodedGroup(comm) as group:
        total = jaxcoded.coded_sum(losses, group)

        @jax.jit
        def step(w, batch):
            loss = lambda w: total(w, batch) + LAMBDA / 2 * jnp.sum(w**2)
            gradient, hessian = jax.linearize(jax.grad(loss), w)
            # a fixed number of products instead of a tolerance, so that all ranks call
            # the same rounds
            newton, _ = cg(hessian, gradient, tol=0, maxiter=30)
            return w - newton, jnp.linalg.norm(gradient)

        w, norms, batch = jnp.zeros((65, 10)), [], group.batch(data())
        for number in range(steps):
            w, norm = step(w, batch)
            norms.append(float(norm))
            if group.rank == 0:
                print(f"step {number}: the gradient has norm {norm:.1e}")
    return w, norms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    w, _ = train(MPI.COMM_WORLD, parser.parse_args().steps)
    x, digit = data()
    right = np.mean((x @ w).argmax(1) == digit)
    print(
        f"rank {MPI.COMM_WORLD.rank}: {right:.1%} of the digits are classified correctly"
    )
