"""An optax chain: accumulate, sum over the ranks, clip, Adam, and average.

    jaxcoded run -n 4 examples/optax_chain.py

The sum must come before the clipping, which is not linear and needs the norm of the
whole batch's gradient. Accumulation is linear, so it can come before the sum. With two
batches for each sum this saves half of the rounds.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def initial():
    random = np.random.default_rng(0)
    return {
        "w1": jnp.asarray(random.normal(0, 1 / 8, (64, 64)), jnp.float32),
        "b1": jnp.zeros(64),
        "w2": jnp.asarray(random.normal(0, 1 / 8, (64, 10)), jnp.float32),
        "b2": jnp.zeros(10),
    }


def losses(params, batch):  # one loss for each example
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def local_mean(params, batch):
    """Return this rank's part of a batch's mean loss. The sum of all ranks' parts
    is the mean loss.
    """
    # divide by the batch's number of examples; the last batch is smaller
    weights = batch.weights
    return weights @ losses(params, batch.data) / weights.examples


def train(comm, epochs=10):
    """Return the moving average of the parameters."""
    x, y = load_digits(return_X_y=True)  # 1,797 images of 8 × 8, alike on all ranks
    x, y = (x[:1500] / 16).astype(np.float32), y[:1500]
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        tx = optax.MultiSteps(
            optax.chain(
                jaxcoded.optax.sum_gradients(group),
                optax.clip_by_global_norm(0.5),
                optax.adam(3e-3),
            ),
            every_k_schedule=2,
        )

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params, average, state, batch):
            grads = jax.grad(local_mean)(params, batch)
            updates, state = tx.update(grads, state, params, weights=batch.weights)
            params = optax.apply_updates(params, updates)
            return params, optax.incremental_update(params, average, 0.05), state

        params, average = initial(), initial()
        state = tx.init(params)
        for epoch in range(epochs):
            for batch in group.epoch((x, y), 128, seed=0, epoch=epoch):
                params, average, state = step(params, average, state, batch)
            if group.rank == 0:
                loss = losses(average, (x, y)).mean()
                print(
                    f"epoch {epoch}: loss {loss:.4f} over all examples, averaged parameters"
                )
    return average


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    train(MPI.COMM_WORLD, parser.parse_args().epochs)
