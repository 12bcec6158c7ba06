"""Deep canonical correlation of the left and right halves of digits.

    jaxcoded run -n 4 examples/correlation.py

Two networks learn features that appear in both halves. The loss is a function of the
covariances of the two networks' outputs, so a single example has no loss. One sum over
the global batch gives all moments. If each rank used the covariances of its own
examples, the result would depend on the number of ranks.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded

FEATURES = 8  # features of each half
RIDGE = 0.01


def data():
    """Return the left and the right halves of the digits, each float32 ``(1797, 32)``."""
    x = load_digits().images.astype(np.float32) / 16
    return x[:, :, :4].reshape(-1, 32), x[:, :, 4:].reshape(-1, 32)


def start():
    """Return the initial weights of both networks."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": 0.2 * jax.random.normal(keys[0], (2, 32, 64)),
        "out": 0.2 * jax.random.normal(keys[1], (2, 64, FEATURES)),
    }


def moments(params, halves, weights):
    """Return the weighted sum of ``z zᵀ``, where ``z`` is 1 and the features of both
    halves.
    """
    features = jax.vmap(lambda w, v, half: jax.nn.relu(half @ w) @ v)
    left, right = features(params["in"], params["out"], jnp.stack(halves))
    z = jnp.hstack([jnp.ones((len(weights), 1)), left, right])
    return z.T @ (weights[:, None] * z)


def correlation(sums):
    """Return the sum of the squared canonical correlations, at most ``FEATURES``."""
    means = sums / sums[0, 0]  # the first number counts the examples
    c = means[1:, 1:] - jnp.outer(means[0, 1:], means[0, 1:])
    c += RIDGE * jnp.eye(len(c))
    left, right = slice(FEATURES), slice(FEATURES, None)
    predicted = jnp.linalg.solve(c[left, left], c[left, right])
    return jnp.trace(jnp.linalg.solve(c[right, right], c[right, left]) @ predicted)


def train(comm, epochs=20, batch_size=512):
    """Return the parameters, and the correlation before each step."""
    optimizer = optax.adam(0.003)
    with jaxcoded.CodedGroup(comm) as group:
        total = jaxcoded.coded_sum(moments, group, weighted=True)

        @jax.jit
        def step(params, state, batch):
            loss = lambda params: -correlation(total(params, batch))
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, -value

        params, seen = start(), []
        state = optimizer.init(params)
        for epoch in range(epochs):
            for batch in group.epoch(data(), batch_size, seed=0, epoch=epoch):
                params, state, value = step(params, state, batch)
                seen.append(float(value))
            if group.rank == 0:
                print(f"epoch {epoch}: {np.mean(seen[-4:]):.2f} of {FEATURES}")
    return params, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    train(MPI.COMM_WORLD, parser.parse_args().epochs)
