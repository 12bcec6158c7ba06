"""Test each use of JAX briefly, for versions of JAX with which the full tests do not run.

`scripts/with_jax` starts it on two ranks. It compiles, orders, differentiates and
batches calls, with both transports if mpi4jax is installed. At the end it prints the
versions.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import jaxcoded
from jaxcoded import coded_allreduce

comm = MPI.COMM_WORLD
# one number of each example, which is summed
EXAMPLES = np.arange(6.0, dtype=np.float32)
TOTAL = EXAMPLES.sum()


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def sums(group, own, weights):
    """Sum with an effect and with a token, inside and outside of jit, in a loop and
    batched.
    """
    reduce = jax.jit(lambda x: coded_allreduce(x, group, weights))
    for form in (
        reduce,
        jax.vmap(reduce),
        lambda x: coded_allreduce(x, group, weights),
    ):
        same(form(jnp.stack([own, 2 * own])), [TOTAL, 2 * TOTAL])

    @jax.jit
    def loop(x):
        def add(token, k):
            out = coded_allreduce(k * x, group, weights, token=token)
            return out.token, out.value

        return jax.lax.scan(add, jnp.int32(0), jnp.arange(1.0, 4))[1]

    same(loop(own), TOTAL * np.arange(1, 4))

    @jax.jit
    def unread(x):
        coded_allreduce(x, group, weights)
        return x

    before = group.rounds
    jax.block_until_ready(unread(own))
    jaxcoded.effects_barrier()
    assert group.rounds == before + 1, "a round was dropped"


def derivatives(group):
    batch = group.batch(EXAMPLES)
    total = jaxcoded.coded_sum(lambda w, x: jnp.sin(w * x), group)

    def square(w):
        return total(w, batch) ** 2

    def spread(w):
        mine = batch.weights @ jnp.sin(jaxcoded.spread(w, group) * batch.data)
        return coded_allreduce(mine, group, batch.weights) ** 2

    def plain(w):
        return jnp.sum(jnp.sin(w * EXAMPLES)) ** 2

    slope, bend = jax.grad(plain)(0.3), jax.hessian(plain)(0.3)
    same(jax.jit(jax.hessian(square))(0.3), bend)
    same(jax.jvp(square, (0.3,), (1.0,))[1], slope)
    for form in (square, jax.checkpoint(square), spread):
        before = group.rounds
        same(jax.jit(jax.grad(form))(0.3), slope)
        jaxcoded.effects_barrier()
        assert group.rounds == before + 2, "a round was run again"


def training(group):
    """Fit least squares by `coded_value_and_grad` and by the optax transformation."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    part = group.batch(len(x))
    start = jnp.ones(3)

    def losses(w, x):
        return (x @ w - 1) ** 2

    def mean(w):
        return losses(w, x).mean()

    loss, grad = jax.value_and_grad(mean)(start)
    step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
    for got, wanted in zip(
        step(start, part.of(x[part.indices])), (loss, grad), strict=True
    ):
        same(got, wanted)

    def ours(w):
        return part.weights @ losses(w, x[part.indices])

    link = jaxcoded.optax.sum_gradients(group, divisor=len(x), carry_token=True)
    optimizer = optax.chain(link, optax.sgd(0.5))

    @jax.jit
    def update(w, state):
        return optimizer.update(jax.grad(ours)(w), state, w, weights=part.weights)[0]

    same(update(start, optimizer.init(start)), -0.5 * grad)


def refused(group, own, weights):
    """Check that errors are raised, and that a later round succeeds."""
    reduce = jax.jit(lambda x, gone: coded_allreduce(x, group, weights, erasures=gone))
    everybody = np.ones(comm.size, bool)
    try:
        jax.block_until_ready(reduce(own, everybody))
    except jax.errors.JaxRuntimeError as error:
        assert "TooManyErasures" in str(error), error
    else:
        sys.exit("too many erasures were not refused")
    same(reduce(own, ~everybody), TOTAL)


def main():
    if sys.argv[1:]:  # the expected version
        assert jax.__version__ == sys.argv[1], jax.__version__
    transports = ["engine"]
    if importlib.util.find_spec("mpi4jax"):
        transports.append("mpi4jax")
    for transport in transports:
        with jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=0), transport=transport
        ) as group:
            part = group.batch(len(EXAMPLES))
            own = part.weights @ EXAMPLES[part.indices]
            sums(group, own, part.weights)
            derivatives(group)
            training(group)
            if comm.size > 1:
                refused(group, own, part.weights)
    if comm.rank == 0:
        print(
            f"JAX {jax.__version__}, Python {sys.version.split()[0]}, {' and '.join(transports)}: passed"
        )


main()
