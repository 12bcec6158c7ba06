"""A chain of optax with everything in it: gradients are accumulated over two batches, summed
over the ranks once, clipped, and given to Adam; with a moving average of the parameters.

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py examples/optax_chain.py

The sum comes first in the chain: clipping is not linear, and the norm is to be that of the whole
batch. Accumulating is linear, so it can come before, and half of the rounds are saved.
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

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

images, labels = load_digits(return_X_y=True)  # 1,797 of 8 × 8 pixels, in one order
images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
x, y = images[:1500], labels[:1500]


def logits(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


group = jaxcoded.CodedGroup(MPI.COMM_WORLD, stragglers=1)
tx = optax.MultiSteps(
    optax.chain(
        jaxcoded.optax.coded_allreduce(group),
        optax.clip_by_global_norm(0.5),
        optax.adam(3e-3),
    ),
    every_k_schedule=2,
)


def local_mean(params, batch, weights):
    """This rank's part of the mean loss of a batch. It means nothing until it is summed."""
    x, y = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)
    # by the number of examples that the batch has, of a smaller last one, too
    return weights @ losses / weights.examples


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def step(params, average, state, batch, weights):
    updates, state = tx.update(jax.grad(local_mean)(params, batch, weights), state)
    params = optax.apply_updates(params, updates)
    return params, optax.incremental_update(params, average, 0.05), state


random = np.random.default_rng(0)
params = {
    "w1": jnp.asarray(random.normal(0, 1 / 8, (64, 64)), jnp.float32),
    "b1": jnp.zeros(64),
    "w2": jnp.asarray(random.normal(0, 1 / 8, (64, 10)), jnp.float32),
    "b2": jnp.zeros(10),
}
average, state = jax.tree.map(jnp.array, params), tx.init(params)
for epoch in range(epochs):
    for indices, weights in group.epoch(len(x), 128, seed=0, epoch=epoch):
        params, average, state = step(
            params, average, state, (x[indices], y[indices]), weights
        )

losses = optax.softmax_cross_entropy_with_integer_labels(logits(average, x), y)
right = np.argmax(logits(average, images[1500:]), axis=1) == labels[1500:]
print(f"rank {group.rank}: loss {losses.mean():.6f}, accuracy {right.mean():.4f}")
group.close()
