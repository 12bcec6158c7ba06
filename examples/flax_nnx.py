"""Train a Flax NNX model on handwritten digits.

    jaxcoded run -n 4 examples/flax_nnx.py

``nnx.split`` splits the model into its parameters, a pytree, and the rest. The ranks
sum the gradients of the parameters. The example needs Flax and scikit-learn, which the
extra ``examples`` installs.
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


class Network(nnx.Module):
    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.classes = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images):
        hidden = nnx.relu(self.convolution(images))
        return self.classes(hidden.reshape(len(images), -1))


def train(comm, epochs=10):
    """Return the trained model and the loss of the last batch."""
    x, y = load_digits(return_X_y=True)  # 1,797 images of 8 × 8, alike on all ranks
    x, y = (x[:1500] / 16).reshape(-1, 8, 8, 1).astype(np.float32), y[:1500]
    model = Network(nnx.Rngs(0))  # the same on all ranks
    rest, params = nnx.split(model)

    def losses(params, batch):  # one loss for each example
        images, labels = batch
        logits = nnx.merge(rest, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    with jaxcoded.CodedGroup(comm, jaxcoded.Shared()) as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)
        tx = optax.adam(3e-3)

        @jax.jit
        def step(params, state, batch):
            loss, grads = loss_and_grad(params, batch)  # over the whole batch
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state, loss

        state = tx.init(params)
        for epoch in range(epochs):
            # 11 batches of 128, and one of 92
            for batch in group.epoch((x, y), 128, seed=0, epoch=epoch):
                params, state, loss = step(params, state, batch)
            if group.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}")
    nnx.update(model, params)
    return model, float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    model, loss = train(MPI.COMM_WORLD, parser.parse_args().epochs)
    images, labels = load_digits(return_X_y=True)
    logits = model((images[1500:] / 16).reshape(-1, 8, 8, 1))
    right = np.mean(np.argmax(logits, axis=1) == labels[1500:])
    print(f"rank {MPI.COMM_WORLD.rank}: loss {loss:.6f}, accuracy {right:.4f}")
