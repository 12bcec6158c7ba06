"""Save checkpoints with orbax on one rank, and read them on a different number of ranks.

    jaxcoded run -n 4 examples/orbax_checkpoint.py build/checkpoints --stop-after 10
    jaxcoded run -n 3 examples/orbax_checkpoint.py build/checkpoints --stop-after 20

To JAX every rank is process 0 of 1, so with orbax all ranks would write the same files.
All ranks have the same state, bit for bit. So only the root saves the state. Only the
root reads it, and sends it to the other ranks, which need no access to the files. The
order of an epoch does not depend on the number of ranks. So a checkpoint contains only
the state and the number of finished batches. The example needs orbax-checkpoint and
scikit-learn, which the extra ``examples`` installs.
"""

import argparse
import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def losses(params, batch):  # one loss for each example
    x, y = batch
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def train(comm, folder, epochs=5, stop_after=None):
    """Train from the newest checkpoint, or from the beginning. Return the parameters,
    and the number of finished batches.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    tx = optax.adam(3e-3)
    with contextlib.ExitStack() as stack:
        group = jaxcoded.CodedGroup(comm, jaxcoded.Shared())
        stack.enter_context(group)
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)

        @jax.jit
        def step(params, state, batch):
            loss, grads = loss_and_grad(params, batch)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state, loss

        params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
        state, done = tx.init(params), jnp.zeros((), int)
        if group.rank == 0:
            manager = ocp.CheckpointManager(pathlib.Path(folder).absolute())
            stack.enter_context(manager)
            if (newest := manager.latest_step()) is not None:
                like = ocp.args.StandardRestore((params, state, done))
                params, state, done = manager.restore(newest, args=like)
        params, state, done = jaxcoded.tree_bcast((params, state, done), group)
        first = done = int(done)
        per_epoch = len(group.epoch(len(images), 256))
        last = epochs * per_epoch if stop_after is None else stop_after
        if group.rank == 0 and done >= last:
            print(f"nothing left to do: {done} batches are done")
        for done in range(first + 1, last + 1):
            number, batch = divmod(done - 1, per_epoch)
            if batch == 0 or done == first + 1:
                epoch = group.epoch((images, labels), 256, seed=0, epoch=number)
            params, state, loss = step(params, state, epoch[batch])
            if group.rank == 0 and (done % 5 == 0 or done == last):
                args = ocp.args.StandardSave((params, state, jnp.int32(done)))
                manager.save(done, args=args)  # saves while the next step runs
                print(f"{done} batches done on {group.size} ranks: loss {loss:.4f}")
    return params, done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stop-after", type=int, metavar="BATCHES")
    args = parser.parse_args()
    train(MPI.COMM_WORLD, args.folder, args.epochs, args.stop_after)
