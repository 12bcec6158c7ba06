"""Do a few coded training steps, checked on every rank; `tests/test_hosts.py` runs this
on several hosts.

Print one line of JSON: the host of every rank, and how often each rank woke up per second before the first step.
"""

import json
import pathlib
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

jax.config.update("jax_enable_x64", True)

STEPS, EXAMPLES, WIDTH = 5, 12, 50_000  # one gradient is 400 kB


def loss(params, batch):
    x, y = batch
    return (params[x] - y) ** 2 / 2 + 1e-3 * (params**2).sum()


def gradient_by_hand(params, x, y):
    gradient = 2e-3 * EXAMPLES * params
    np.add.at(gradient, x, params[x] - y)
    return gradient


def switches():
    """Return how often the threads of this process have gone to sleep."""
    counted = "voluntary_ctxt_switches:"
    return sum(
        int(line.removeprefix(counted))
        for status in pathlib.Path("/proc/self/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith(counted)
    )


def awakenings(seconds):
    """Return the wake-ups per second of an idle group."""
    comm.Barrier()
    before, start = switches(), time.monotonic()
    time.sleep(seconds)
    return (switches() - before) / (time.monotonic() - start)


comm = MPI.COMM_WORLD
random = np.random.default_rng(0)
params = expected = random.normal(size=WIDTH)
with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=1)) as group:
    idle = comm.allgather(awakenings(1.0))
    step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=False))
    part = group.batch(EXAMPLES)
    for number in range(STEPS):
        x, y = random.integers(WIDTH, size=EXAMPLES), random.normal(size=EXAMPLES)
        erasures = jnp.arange(comm.size) == 1 + number % (comm.size - 1)
        _, grads = step(
            params, part.of((x[part.indices], y[part.indices])), erasures=erasures
        )
        params = params - 0.1 * np.asarray(grads)
        expected = expected - 0.1 * gradient_by_hand(expected, x, y)
np.testing.assert_allclose(params, expected, rtol=1e-9, atol=1e-12)
replicas = set(comm.allgather(params.tobytes()))
assert len(replicas) == 1, "parameters differ between ranks"

hosts = comm.gather(socket.gethostname())
if comm.rank == 0:
    print(
        json.dumps(
            {"hosts": hosts, "awakenings": idle, "message": params.nbytes * STEPS}
        )
    )
