"""A training script without jaxcoded: `train.py` is the same script with it.

jaxcoded run -n 4 examples/train_mpi4jax.py
"""

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import optax
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.random.default_rng(0).normal(size=(60, 5))
y = x @ np.arange(5.0)
tx = optax.adam(0.1)


def loss(w, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


@jax.jit
def step(w, state, batch):
    local = jax.value_and_grad(loss)(w, batch)
    mean, grads = jax.tree.map(
        lambda a: mpi4jax.allreduce(a, op=MPI.SUM, comm=comm) / comm.size, local
    )
    updates, state = tx.update(grads, state)
    return optax.apply_updates(w, updates), state, mean


w, state = jnp.zeros(5), tx.init(jnp.zeros(5))
for epoch in range(100):
    order = np.random.default_rng([0, epoch]).permutation(60)
    for first in range(0, 60, 20):
        own = order[first : first + 20][comm.rank :: comm.size]
        w, state, mean = step(w, state, (x[own], y[own]))
print(f"rank {comm.rank}: loss {mean:.1e}, w {w.round(2)}")
