"""Train an Equinox model on handwritten digits in epochs of minibatches.

    jaxcoded run -n 4 examples/equinox_digits.py

The example needs Equinox and scikit-learn, which the extra ``examples`` installs.
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def train(comm, epochs=10):
    """Return the trained model and the loss of the last batch."""
    x, y = load_digits(return_X_y=True)  # 1,797 images of 8 × 8, alike on all ranks
    x, y = (x[:1500] / 16).astype(np.float32), y[:1500]
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    # the parameters, and the rest of the model
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def losses(params, batch):  # one loss for each example
        images, labels = batch
        logits = jax.vmap(eqx.combine(params, rest))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    with jaxcoded.CodedGroup(comm, jaxcoded.Shared()) as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)
        tx = optax.adam(3e-3)

        @eqx.filter_jit
        def step(params, state, batch):
            loss, grads = loss_and_grad(params, batch)  # over the whole batch
            updates, state = tx.update(grads, state)
            return eqx.apply_updates(params, updates), state, loss

        state = tx.init(params)
        for epoch in range(epochs):
            # 11 batches of 128, and one of 92
            for batch in group.epoch((x, y), 128, seed=0, epoch=epoch):
                params, state, loss = step(params, state, batch)
            if group.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}")
    return eqx.combine(params, rest), float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    model, loss = train(MPI.COMM_WORLD, parser.parse_args().epochs)
    images, labels = load_digits(return_X_y=True)
    logits = jax.vmap(model)(images[1500:] / 16)
    right = np.mean(np.argmax(logits, axis=1) == labels[1500:])
    print(f"rank {MPI.COMM_WORLD.rank}: loss {loss:.6f}, accuracy {right:.4f}")
