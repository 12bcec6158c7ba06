"""Read batches in advance with grain, and save its iterator's state in a checkpoint.

    jaxcoded run -n 4 examples/grain_loader.py

The batches of an epoch are a random-access source for grain. Its threads read this
rank's part of the next batches while the rank computes the current batch. Grain's worker
processes cannot be used, as they are not part of MPI. The example needs grain and
scikit-learn, which the extra ``examples`` installs.
"""

import argparse

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def losses(params, batch):  # one loss for each example
    x, y = batch
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def train(comm, epochs=5):
    """Return the parameters, and the loss of the last batch."""
    images, labels = load_digits(return_X_y=True)

    def load(part):
        pixels = (images[part.indices] / 16).astype(np.float32)
        return part.of((pixels, labels[part.indices]))

    with jaxcoded.CodedGroup(comm, jaxcoded.Shared()) as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)

        @jax.jit
        def step(params, batch):
            loss, grads = loss_and_grad(params, batch)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

        def read(epoch):
            batches = group.epoch(len(images), 256, seed=0, epoch=epoch)
            data = grain.MapDataset.source(batches).map(load)
            ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
            return iter(data.to_iter_dataset(ahead))

        params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
        for epoch in range(epochs):
            reading = read(epoch)
            for batch in reading:
                params, loss = step(params, batch)
                where = reading.get_state()  # position of the next batch
            if group.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, the loader is at {where}")
    return params, float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    train(MPI.COMM_WORLD, parser.parse_args().epochs)
