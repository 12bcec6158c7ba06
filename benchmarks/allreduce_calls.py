"""The all-reduces that ``allreduce.py`` compares.

The right sum is known: example ``e`` of a global batch has the gradient ``NUMBERS[e] · v`` for one vector ``v``. Each
rank encodes, or adds up, the gradients of its examples.
"""

import functools
import itertools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded
from jaxcoded import baselines, kernels

comm = MPI.COMM_WORLD
NUMBERS = np.random.default_rng(0).uniform(0.5, 1.5, 4 * comm.size)


class Collective(NamedTuple):
    """An all-reduce.

    Attributes:
        share: a function from ``v``, float32 ``(size,)``, to this rank's operand.
        prepare: a function that takes an operand, and returns a function without arguments. That function makes a call,
            waits for it and returns the result.
        code: the name of the codes in its plan.
        factor: the ratio of the result and ``v``.
    """

    share: Callable[[jax.Array], Any]
    prepare: Callable[[Any], Callable[[], Any]]
    code: str = ""
    factor: float = NUMBERS.sum()


def uncoded(prepare):
    """Return an all-reduce in which every example belongs to one rank."""
    own = float(NUMBERS[comm.rank :: comm.size].sum())
    return Collective(lambda v: own * v, prepare)


def coded(group, prepare):
    """Return an all-reduce in which every rank encodes its assignment, as
    `jaxcoded.coded_value_and_grad` does.
    """
    plan = group.plan
    part = group.batch(len(NUMBERS))
    row = NUMBERS[part.indices] @ part.weights.reshape(len(part.indices), -1)
    code = ", ".join(sorted({each.code.name for each in plan.codings if each}))
    if not plan.encoded:
        return Collective(lambda v: kernels.encode(v[None], row), prepare, code)
    multiple = plan.padding_multiple
    return Collective(
        lambda v: kernels.encode(v[None], row[None], multiple=multiple), prepare, code
    )


def alone(prepare):
    """Return twice the vector, without communication."""
    return Collective(jnp.array, prepare, factor=2)


def donated(call):
    """Return a call whose result is the operand of the next one, in the same memory."""
    jitted = jax.jit(call, donate_argnums=0)

    def prepare(x):
        def run():
            nonlocal x
            x = jitted(x).block_until_ready()
            return x

        return run

    return prepare


def kept(call):
    """Return a call that uses the same operand every time."""
    jitted = jax.jit(call)
    return lambda x: lambda: jitted(x).block_until_ready()


def with_token(group, donate=True):
    """Return a call ordered by a token. Messages of slices are shorter than sums, and
    not donated.
    """
    donate = donate and not group.plan.encoded
    weights = group.batch(len(NUMBERS)).weights

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else 1)
    def jitted(x, token):
        summed = jaxcoded.coded_allreduce(x, group, weights, token=token)
        # returning a named tuple from a jitted function takes JAX longer; in a step the tuple stays inside
        return summed.value, summed.token

    def prepare(x):
        token = jnp.int32(0)

        def run():
            nonlocal x, token
            out, token = jitted(x, token)
            out.block_until_ready()
            x = out if donate else x
            return out

        return run

    return prepare


def bare(x):
    """Sum by mpi4py on NumPy arrays, without JAX."""
    x = np.array(x)
    out = np.zeros_like(x)

    def run():
        comm.Allreduce(x, out)
        return out

    return run


def on_numpy(group):
    """Return a sum by the engine on NumPy arrays, in place and without XLA."""

    weights = group.batch(len(NUMBERS)).weights

    def prepare(x):
        x = np.array(x)
        return lambda: jaxcoded.host.allreduce(x, group, weights, out=x)

    return prepare


def psum():
    """Return ``jax.lax.psum`` over all processes, by JAX's collectives on the CPU."""
    mesh = jax.make_mesh((comm.size,), ("ranks",))
    spec = jax.sharding.PartitionSpec("ranks")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )

    def prepare(x):
        shards = jax.make_array_from_process_local_data(
            sharding, np.asarray(x)[None], (comm.size, x.size)
        )
        return lambda: total(shards).block_until_ready()

    return prepare


def start_gloo():
    """Join the processes in one JAX runtime with gloo's collectives."""
    address = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(comm.bcast(address), comm.size, comm.rank)


def fits(fanout, stragglers, slices):
    """Return whether every parent of the tree has enough children for this code."""
    try:
        plan = jaxcoded.make_plan(
            comm.size,
            jaxcoded.Coded(fanout=fanout, stragglers=stragglers, slices=slices),
        )
    except ValueError:
        return False
    parents = (rank for rank in range(comm.size) if plan.tree.children[rank])
    return all(
        plan.strategy.parameters(plan.tree, rank) == (stragglers, slices)
        for rank in parents
    )


def compared(fanout, closing):
    """Return all all-reduces by name, in the order of their calls.

    Args:
        fanout: fan-out of the coded trees.
        closing: the ``contextlib.ExitStack`` that closes the groups.
    """

    def group(stragglers, slices=1, transport="engine"):
        return closing.enter_context(
            jaxcoded.CodedGroup(
                comm,
                jaxcoded.Coded(fanout=fanout, stragglers=stragglers, slices=slices),
                transport=transport,
            )
        )

    def effect(group):
        weights = group.batch(len(NUMBERS)).weights
        return lambda x: jaxcoded.coded_allreduce(x, group, weights)

    start_gloo()
    out = {
        "2 x, alone": alone(donated(lambda x: 2 * x)),
        "2 x, alone, not donated": alone(kept(lambda x: 2 * x)),
        "mpi4py Allreduce": uncoded(bare),
        "mpi4jax.allreduce": uncoded(kept(lambda x: baselines.allreduce(x, comm))),
        "psum over gloo": uncoded(psum()),
        "ring": uncoded(kept(lambda x: baselines.ring_allreduce(x, comm))),
        "master-worker": uncoded(
            kept(lambda x: baselines.master_worker_allreduce(x, comm))
        ),
    }
    engines = {
        (s, m): group(s, m)
        for m, s in itertools.product((1, 2), (0, 1, 2))
        if fits(fanout, s, m)
    }
    for (s, m), engine in engines.items():
        name = f"engine, s={s}" + f", m={m}" * (m > 1)
        out[f"{name}, token"] = coded(engine, with_token(engine))
        if s < 2 and m == 1:
            out[name] = coded(engine, donated(effect(engine)))
    # collectives that are further columns of the table
    s = int((1, 1) in engines)
    engine, reference = engines[s, 1], group(s, transport="mpi4jax")
    more = {
        f"engine, s={s}, token, not donated": (
            engine,
            with_token(engine, donate=False),
        ),
        f"engine, s={s}, numpy": (engine, on_numpy(engine)),
        f"mpi4jax transport, s={s}": (reference, kept(effect(reference))),
    }
    return out | {name: coded(*each) for name, each in more.items()}
