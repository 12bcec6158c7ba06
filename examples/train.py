"""A training script with jaxcoded: `train_mpi4jax.py` is the same script without it.

jaxcoded run -n 4 --ft examples/train.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import jaxcoded

group = jaxcoded.CodedGroup(MPI.COMM_WORLD)
x = np.random.default_rng(0).normal(size=(60, 5))
y = x @ np.arange(5.0)
tx = optax.adam(0.1)


def loss(w, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


loss_and_grad = jaxcoded.coded_value_and_grad(loss, group)


@jax.jit
def step(w, state, batch):
    mean, grads = loss_and_grad(w, batch)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(w, updates), state, mean


w, state = jnp.zeros(5), tx.init(jnp.zeros(5))
for epoch in range(100):
    for batch in group.epoch((x, y), batch_size=20, seed=0, epoch=epoch):
        w, state, mean = step(w, state, batch)
print(f"rank {group.rank}: loss {mean:.1e}, w {w.round(2)}")
group.close()
