"""Train on several devices per rank: sharded in each process, coded across processes.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 jaxcoded run -n 4 examples/hsdp.py

Every device holds its shard of the parameters and of the optimizer's state, and
computes its part of the rank's examples (docs/devices.md). The example needs
scikit-learn, which the extra ``examples`` installs.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
from sklearn.datasets import load_digits

import jaxcoded


def initial():
    rng = np.random.default_rng(0)
    shapes = {"in": (64, 128), "out": (128, 10)}
    return {
        name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def losses(shards, batch):  # the losses of this device's examples
    x, y = batch
    params = {  # gather whole parameters from the shards
        name: jax.lax.all_gather(shard, "fsdp", tiled=True)
        for name, shard in shards.items()
    }
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def split(tree):
    """Return the specs of a tree: arrays are split along the first axis, and numbers
    are replicated.
    """
    return jax.tree.map(lambda leaf: P("fsdp") if np.ndim(leaf) else P(), tree)


def train(comm, epochs=5):
    """Return the shards of the parameters, and the loss of the last batch."""
    x, y = load_digits(return_X_y=True)  # 1,797 images of 8 × 8, alike on all ranks
    x, y = (x[:1500] / 16).astype(np.float32), y[:1500]
    mesh = Mesh(np.array(jax.local_devices()), ("fsdp",))
    tx = optax.adam(3e-3)
    # shared work needs one device per process
    strategy = jaxcoded.Coded() if comm.size > 2 else jaxcoded.Uncoded()
    with jaxcoded.CodedGroup(comm, strategy, transport="engine") as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)

        def step(params, state, batch, token):
            (loss, grads), _, token = loss_and_grad(params, batch, token=token)
            updates, state = tx.update(grads, state)  # each device updates its shard
            return optax.apply_updates(params, updates), state, loss, token

        def batches(epoch):
            return group.epoch((x, y), 128, seed=0, epoch=epoch, multiple=mesh.size)

        params = jax.device_put(initial(), NamedSharding(mesh, P("fsdp")))
        state = tx.init(params)
        step = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P("fsdp"), split(state), split(batches(0)[0]), P()),
                out_specs=(P("fsdp"), split(state), P(), P()),
            ),
            donate_argnums=(0, 1),
        )
        token = jnp.int32(0)  # orders the rounds, from step to step
        for epoch in range(epochs):
            for batch in batches(epoch):
                params, state, loss, token = step(params, state, batch, token)
            if group.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}")
        jax.block_until_ready(token)
    return params, float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    params, loss = train(MPI.COMM_WORLD, parser.parse_args().epochs)
    images, labels = load_digits(return_X_y=True)
    guess = np.argmax(logits(jax.device_get(params), images[1500:] / 16), axis=1)
    right = np.mean(guess == labels[1500:])
    print(f"rank {MPI.COMM_WORLD.rank}: loss {loss:.6f}, accuracy {right:.4f}")
