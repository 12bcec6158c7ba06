"""Derivatives of sums that a token orders, on any number of devices of each rank.

The model is L(θ) = φ(b), b = Σ_j cos(a + x_j θ), a = Σ_j sin(x_j θ): a sum that depends
on another sum."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import more
from jax.sharding import Mesh, PartitionSpec
from marks import engine_only, several
from reference import BATCH, assert_same_bits, per_example
from test_gradients import DIRECTION, THETA

import jaxcoded
from jaxcoded import coded_sum

pytestmark = [
    engine_only,
    pytest.mark.ranks(2, exhaustive=(4, 7)),
    pytest.mark.devices(2, exhaustive=(4,)),
]

X = 0.1 * per_example(3, seed=20)
SAME = PartitionSpec()
layouts = pytest.mark.parametrize(
    "spec", [PartitionSpec("x"), more(SAME)], ids=["split", "copies"]
)


class Whole:
    """The loss, its gradient and its Hessian along `DIRECTION`, in closed form."""

    def __init__(self, theta):
        angles = X @ theta
        a, da = np.sin(angles).sum(), np.cos(angles) @ X
        ha = -np.einsum("j,jp,jq->pq", np.sin(angles), X, X)
        sin, cos, rows = np.sin(a + angles), np.cos(a + angles), X + da
        b, db = cos.sum(), -sin @ rows
        hb = -np.einsum("j,jp,jq->pq", cos, rows, rows) - sin.sum() * ha
        self.loss, bend = b**2 / 2, np.outer(db, db)
        self.grad = b * db
        self.product = (bend + b * hb) @ DIRECTION


def loss_of(group):
    """(theta, batch, token) -> (loss, token)"""
    first = coded_sum(lambda theta, x: jnp.sin(x @ theta), group)
    second = coded_sum(lambda both, x: jnp.cos(both[0] + x @ both[1]), group)

    def loss(theta, batch, token):
        a = first(theta, batch, token=token)
        b = second((a.value, theta), batch, token=a.token)
        return b.value**2 / 2, b.token

    return loss


def gradient(loss, theta, token):
    (value, token), back = jax.vjp(loss, theta, token)
    grad, token = back((jnp.ones_like(value), token))
    return value, grad, token


def products(loss, theta, token):
    """Return the products of the Hessian with `DIRECTION`, forward over reverse and
    reverse over forward, the slope, and a token.
    """
    along = lambda f: lambda *at: jax.jvp(f, at, (jnp.asarray(DIRECTION), at[1]))

    def slopes(theta, token):
        (_, token), (slope, _) = along(loss)(theta, token)
        return slope, token

    (_, _, token), (slope, forward, _) = along(lambda *at: gradient(loss, *at))(
        theta, token
    )
    again, reverse, token = gradient(slopes, theta, token)
    return slope, again, forward, reverse, token


def scanned(loss):
    """Return a scan over two losses, only one of which counts."""

    def both(theta, token):
        def body(carry, k):
            value, token = loss(theta, carry[1])
            return (carry[0] + k * value, token), None

        start = jnp.zeros_like(theta[0]), token
        return jax.lax.scan(body, start, jnp.array([0.0, 1.0]))[0]

    return both


FORMS = {
    "plain": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
}


def together(f, batch, spec):
    """Return ``f`` of (theta, batch, token) on all devices of this rank."""
    specs = jax.tree.map(lambda leaf: spec if np.ndim(leaf) else SAME, batch)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(SAME, specs, SAME), out_specs=SAME)
    )


def of(f, group, form="plain"):
    loss = loss_of(group)
    return lambda theta, batch, token: f(
        FORMS[form](lambda *at: loss(at[0], batch, at[1])), theta, token
    )


def read(group):
    return group.batch(X, multiple=jax.device_count())


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@layouts
@pytest.mark.parametrize("form", ["plain", "scan", more("jit"), more("checkpoint")])
def test_derivatives(comm, group, form, spec):
    batch, whole = read(group), Whole(THETA)
    first = together(of(gradient, group, form), batch, spec)
    value, grad, token = first(THETA, batch, jnp.float32(0))
    close(value, whole.loss)
    close(grad, whole.grad)
    second = together(of(products, group, form), batch, spec)
    *out, _ = second(THETA, batch, token)
    slope = whole.grad @ DIRECTION
    for actual, exact in zip(out, (slope, slope, whole.product, whole.product)):
        close(actual, exact)
    assert_same_bits(comm, (value, grad, out))


@layouts
@pytest.mark.parametrize("form", ["plain", more("checkpoint"), more("jit")])
def test_one_order(group, form, spec):
    """In XLA's compiled program each call of the engine depends on the previous one."""
    batch = read(group)

    def all_(loss, theta, token):
        value, grad, token = gradient(loss, theta, token)
        return value, grad, products(loss, theta, token)

    program = together(of(all_, group, form), batch, spec)
    text = program.lower(THETA, batch, jnp.float32(0)).compile().as_text()
    assert (rounds := calls_in_order(text)) >= 4 + 8 + 8
    before = group.rounds
    jax.block_until_ready(program(THETA, batch, jnp.float32(0)))
    assert group.rounds == before + 4 + 8 + 8 <= before + rounds


def calls_in_order(text):
    """Return the number of the engine's calls in a program, and check that each depends
    on the previous one.
    """
    needs, calls = {}, []
    for line in text[text.index("ENTRY") :].splitlines():
        if not (found := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)):
            continue
        name, rest = found.groups()
        operands = re.findall(r"%([\w.-]+)", rest.split(", metadata")[0])
        needs[name] = set().union(*(needs.get(each, ()) for each in operands))
        if 'custom_call_target="jaxcoded' in rest:
            assert needs[name].issuperset(calls[-1:]), (calls[-1:], line)
            calls.append(name)
            needs[name].add(name)
    return len(calls)


@layouts
def test_descent_with_a_late_rank(comm, group, spec):
    """The rank is late in some rounds, forward or backward, and ends with the same
    bits.
    """
    batch = read(group)
    step = together(of(gradient, group), batch, spec)
    theta, expected, token = jnp.asarray(THETA), THETA, jnp.float32(0)
    for number in range(6):
        if comm.rank == comm.size - 1 and number % 2:
            time.sleep(0.2)
        _, grad, token = step(theta, batch, token)
        theta = theta - 0.01 * grad
        expected = expected - 0.01 * Whole(expected).grad
    close(theta, expected)
    assert_same_bits(comm, theta)


def test_outside_of_jit(group):
    """Derivatives outside of jit work on one device."""
    batch, whole = group.batch(X), Whole(THETA)
    loss = loss_of(group)
    value, grad, _ = gradient(
        lambda *at: loss(at[0], batch, at[1]), jnp.asarray(THETA), jnp.float32(0)
    )
    close(value, whole.loss)
    close(grad, whole.grad)


@layouts
def test_derivatives_from_outside(group, spec):
    """The loss uses all devices inside; its derivative is taken outside."""
    batch, loss = read(group), loss_of(group)
    inside = together(loss, batch, spec)

    @jax.jit
    def outside(theta, token):
        return gradient(lambda *at: inside(at[0], batch, at[1]), theta, token)

    value, grad, _ = outside(THETA, jnp.float32(0))
    close(value, Whole(THETA).loss)
    close(grad, Whole(THETA).grad)


@layouts
def test_together_with_other_calls(group, spec):
    """Calls that are not differentiated pass on the tokens of derivatives, and run
    once, also under `jax.checkpoint`.
    """
    batch, loss = read(group), loss_of(group)
    losses = jaxcoded.coded_value_and_grad(
        lambda theta, x: x @ theta, group, mean=False
    )

    def with_others(loss, theta, token):
        def of(theta, token):
            lag, _, token = group.lag(token=token)
            value, token = loss(theta, token)
            still = jax.lax.stop_gradient(theta)
            (total, _), _, token = losses(still, batch, token=token)
            received, _, token = jaxcoded.tree_bcast(still, group, token=token)
            return value + 0 * (total + received.sum() + lag), token

        return gradient(jax.checkpoint(of), theta, token)

    def all_(theta, batch, token):
        return with_others(lambda *at: loss(at[0], batch, at[1]), theta, token)

    program, before = together(all_, batch, spec), group.rounds
    value, grad, _ = jax.block_until_ready(program(THETA, batch, jnp.float32(0)))
    assert group.rounds == before + 6
    close(value, Whole(THETA).loss)
    close(grad, Whole(THETA).grad)


@several
@layouts
def test_cotangents_that_differ(comm, transport, spec):
    """Each rank computes something different after the sum: all get an error."""
    mine = 1.0 + comm.rank

    def own(loss, theta, token):
        def of(theta, token):
            value, token = loss(theta, token)
            return value * mine, token

        return gradient(of, theta, token)

    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        batch = read(group)
        step = together(of(own, group), batch, spec)
        with pytest.raises(jax.errors.JaxRuntimeError, match="InconsistentMessages"):
            jax.block_until_ready(step(THETA, batch, jnp.float32(0)))
        comm.Barrier()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_no_token_for_the_derivative(group, dtype):
    """The error comes before anything is sent, and says what works."""
    batch, loss, token = group.batch(X), loss_of(group), jnp.zeros((), dtype)
    value = lambda theta, token: loss(theta, batch, token)[0]
    before = group.rounds
    for derivative in (
        lambda: jax.grad(value)(THETA, token),
        lambda: jax.grad(value, allow_int=True, argnums=(0, 1))(THETA, token),
        lambda: jax.jvp(lambda theta: value(theta, token), (THETA,), (DIRECTION,)),
    ):
        with pytest.raises(NotImplementedError, match=r"grads, token = back\("):
            jax.jit(derivative)()
    with pytest.raises(NotImplementedError, match="in_axes=None"):
        jax.vmap(value, (None, 0))(jnp.asarray(THETA), jnp.zeros(2, dtype))
    assert group.rounds == before


def test_cotangents_in_a_batch(group):
    """Batched cotangents take one round."""
    batch = group.batch(X)
    total = coded_sum(lambda theta, x: x * jnp.sin(x @ theta)[:, None], group)

    @jax.jit
    def jacobian(theta, token):
        def f(theta, token):
            out = total(theta, batch, token=token)
            return out.value, out.token

        (value, token), back = jax.vjp(f, theta, token)
        return jax.vmap(back, ((0, None),))((jnp.eye(len(value)), token))[0]

    expected = np.einsum("j,jp,jq->pq", np.cos(X @ THETA), X, X)
    assert len(X) == BATCH
    close(jacobian(THETA, jnp.float32(0)), expected)
