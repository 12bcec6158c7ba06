"""Batch normalisation over the global batch: the loss is a function of sums.

    jaxcoded run -n 4 examples/batch_norm.py

Two sums give the mean and the variance of the batch. A third sum, which depends on
both, gives the loss. JAX differentiates `jaxcoded.coded_sum` like any function. So the
gradient equals the gradient in one process with the whole batch, whichever rank is
late. If each rank used the statistics of its own examples, the model would differ.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def data():
    """Return digits, float32 ``(1797, 64)``, and their labels."""
    x, digit = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), digit


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": 0.2 * jax.random.normal(keys[0], (64, 32)),
        "scale": jnp.ones(32),
        "shift": jnp.zeros(32),
        "out": 0.2 * jax.random.normal(keys[1], (32, 10)),
    }


def moments(params, batch):
    """Return the hidden values of each example, and their squares."""
    hidden = batch[0] @ params["in"]
    return {"sum": hidden, "squares": hidden**2}


def losses(given, batch):
    params, mean, variance = given
    x, digit = batch
    normal = (x @ params["in"] - mean) / jnp.sqrt(variance + 1e-5)
    hidden = jax.nn.relu(normal * params["scale"] + params["shift"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["out"], digit
    )


def mean_loss(params, batch, count, over):
    """Return the mean loss; ``over(f)(params, batch)`` is the sum of ``f`` over the
    whole batch of ``count`` examples.
    """
    sums = over(moments)(params, batch)
    mean = sums["sum"] / count
    variance = sums["squares"] / count - mean**2
    return over(losses)((params, mean, variance), batch) / count


def train(comm, epochs=3, batch_size=256):
    """Return the parameters, and the loss of each step."""
    optimizer = optax.adam(0.01)
    with jaxcoded.CodedGroup(comm) as group:

        @jax.jit
        def step(params, state, batch):
            loss, grads = jax.value_and_grad(mean_loss)(
                params,
                batch,
                batch.weights.examples,
                lambda f: jaxcoded.coded_sum(f, group),
            )
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, loss

        params, seen = start(), []
        state = optimizer.init(params)
        for epoch in range(epochs):
            for batch in group.epoch(
                data(), batch_size=batch_size, seed=0, epoch=epoch
            ):
                params, state, loss = step(params, state, batch)
                seen.append(float(loss))
            if group.rank == 0:
                print(f"epoch {epoch}: loss {np.mean(seen[-8:]):.3f}")
    return params, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    train(MPI.COMM_WORLD, parser.parse_args().epochs)
