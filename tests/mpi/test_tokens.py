"""Calls in the order of a token. The engine uses the token instead of JAX's effect;
mpi4jax ignores it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import engine_only, once
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from together import compilations, finish
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import tree_bcast

pytestmark = pytest.mark.ranks(4)

VECTOR = per_example(5)


@pytest.fixture(scope="module")
def own(group):
    return jnp.asarray(contribution(group, VECTOR))


def test_tokens(comm, group, own):
    """Tokens order several calls in a program and in a loop."""

    @jax.jit
    def program(x, token):
        first, _, token = coded_allreduce(x, group, token=token)
        _, _, token = coded_allreduce({"unused": x[:2]}, group, token=token)

        def step(token, k):
            total, _, token = coded_allreduce(k * x, group, token=token)
            pair, _, token = coded_allreduce(
                (x, k * x), group, divisor=BATCH, token=token
            )
            return token, (total / k, pair[0] * BATCH)

        token, rows = jax.lax.scan(step, token, jnp.arange(1.0, 4))
        return [first, *(row for rows_ in rows for row in rows_)], token

    before = group.rounds
    for value in (0, -7, 2**31 - 1):  # the value has no meaning
        totals, token = finish(program(own, jnp.int32(value)))
        assert (token.shape, token.dtype) == ((), np.int32)
        for total in totals:
            assert_sum(group, total, VECTOR)
        assert_same_bits(comm, totals)
    assert group.rounds == before + 3 * 8
    assert program._cache_size() == 1


@pytest.mark.parametrize("inside", [True, False], ids=["jit", "eager"])
def test_every_collective_takes_a_token(comm, group, own, inside):
    """Every collective takes a token and returns one, so that all calls of a program
    have one order.
    """

    def program(x, token):
        lag, _, token = group.lag(token=token)
        at_root, _, token = coded_reduce(x, group, divisor=BATCH, token=token)
        told, _, token = tree_bcast(
            {"mine": at_root, "who": group.rank}, group, token=token
        )
        total, _, token = coded_allreduce(x, group, token=token)
        later, _, token = group.lag(token=token)
        return lag, at_root, told, total, later, token

    before = group.rounds
    run = jax.jit(program) if inside else program
    lag, at_root, received, total, later, token = finish(run(own, jnp.int32(7)))
    assert group.rounds == before + 3
    root = group.plan.root
    expected = VECTOR / BATCH if group.rank == root else 0 * VECTOR
    assert_sum(group, at_root, expected)
    assert_sum(group, received["mine"], VECTOR / BATCH)
    assert received["who"] == root
    assert_sum(group, total, VECTOR)
    assert_same_bits(comm, (received, total))
    for number in (lag, later, token):
        assert (number.shape, number.dtype) == ((), np.int32)
    if group.rank == root or not group._session.transport.can_lag:
        assert (lag, later) == (0, 0)
    jaxpr = jax.make_jaxpr(program)(own, jnp.int32(7))
    assert bool(jaxpr.effects) != group._session.transport.takes_tokens


def test_tokens_in_control_flow(comm, group, own):
    @jax.jit
    def program(x, token):
        def grow(state):
            number, total, token = state

            def even(token):
                out, _, token = coded_allreduce((x, 2 * x), group, token=token)
                return out[1] / 2, token

            def odd(token):
                out, _, token = coded_allreduce(x, group, token=token)
                return out, token

            add, token = jax.lax.cond(number % 2 == 0, even, odd, token)
            return number + 1, total + add, token

        return jax.lax.while_loop(
            lambda state: state[0] < 4, grow, (0, jnp.zeros_like(x), token)
        )

    before = group.rounds
    _, total, _ = finish(program(own, jnp.int32(0)))
    assert group.rounds == before + 4
    assert_sum(group, total / 4, VECTOR)
    assert_same_bits(comm, total)


def test_tokens_outside_jit(group, own):
    """Calls with tokens outside jit compile nothing again."""
    with compilations() as compiled:
        total, _, token = coded_allreduce(own[:3], group, token=jnp.int32(5))
        assert compiled
        compiled.clear()
        for k in range(3):
            total, _, token = coded_allreduce(k * own[:3], group, token=token)
            assert_sum(group, total, VECTOR[:, :3], k)
        assert len(compiled) <= 1  # for the product


def test_unused_and_equal_calls_with_a_token(group, own):
    """A used token is enough to keep its call."""

    @jax.jit
    def wasteful(x, token):
        for _ in range(3):
            _, _, token = coded_allreduce(x, group, token=token)
        return token

    before = group.rounds
    finish(wasteful(own, jnp.int32(0)))
    assert group.rounds == before + 3


def test_value_and_grad_with_a_token(comm, group):
    x = per_example(3, seed=1)
    part = group.batch(BATCH)
    step = jaxcoded.coded_value_and_grad(lambda w, x: (x @ w) ** 2 / 2, group)

    @jax.jit
    def descend(w, token):
        def body(carry, _):
            w, token = carry
            (loss, grad), _, token = step(w, part.of(x[part.indices]), token=token)
            return (w - 0.1 * grad, token), loss

        return jax.lax.scan(body, (w, token), length=3)

    (w, token), losses = finish(descend(np.ones(3), jnp.int32(0)))
    expected = np.ones(3)
    for loss in losses:
        slope = x @ expected
        np.testing.assert_allclose(loss, (slope**2).mean() / 2, rtol=1e-9)
        expected = expected - 0.1 * (slope @ x) / BATCH
    np.testing.assert_allclose(w, expected, rtol=1e-9)
    assert token.dtype == np.int32
    assert_same_bits(comm, w)


def test_optax_carries_a_token(comm, group):
    """Training also continues from a saved state with an old token."""
    part = group.batch(10)
    grad = jnp.float64((part.weights * part.indices).sum())
    tx = optax.chain(
        jaxcoded.optax.sum_gradients(group, divisor=10, carry_token=True),
        optax.sgd(1.0),
    )
    state = tx.init(grad)
    assert state[0].token == 0
    assert state[0].token.dtype == np.int32
    kept = jax.tree.map(lambda leaf: leaf + 12345, state)
    update = jax.jit(tx.update)
    for number in range(5):
        before = kept if number == 3 else state
        updates, state = update(grad, before, grad, weights=part.weights)
        np.testing.assert_allclose(updates, -4.5, rtol=1e-9)
        assert_same_bits(comm, updates)
    assert update._cache_size() == 1


@once
@pytest.mark.parametrize(
    ("token", "got"),
    [
        (np.int64(0), r"int64\[\]"),
        (0.0, r"float64\[\]"),
        (np.zeros(1, np.int32), r"int32\[1\]"),
        (np.bool_(False), r"bool\[\]"),
    ],
)
def test_tokens_of_a_wrong_kind(group, own, token, got):
    message = rf"token must be an int32 number .*, got {got}"
    for collective in (coded_allreduce, coded_reduce, tree_bcast):
        with pytest.raises(TypeError, match=message):
            collective(own, group, token=token)
    with pytest.raises(TypeError, match=message):
        group.lag(token=token)


@engine_only
def test_transformations_that_take_no_token(group, own):
    token = jnp.int32(0)
    total = lambda x: coded_allreduce(x, group, token=token)[0].sum()
    differentiated = "a call with a token cannot be differentiated; leave the token out"
    with pytest.raises(NotImplementedError, match=differentiated):
        jax.grad(total)(own)
    with pytest.raises(NotImplementedError, match=differentiated):
        jax.jit(lambda x: jax.jvp(total, (x,), (x,)))(own)
    with pytest.raises(NotImplementedError, match=differentiated):
        jax.linear_transpose(total, own)(1.0)
    batched = "a call with a token cannot be batched by vmap; leave the token out"
    with pytest.raises(NotImplementedError, match=batched):
        jax.vmap(total)(jnp.stack([own, own]))
    with pytest.raises(NotImplementedError, match=batched):
        jax.vmap(lambda t: coded_allreduce(own, group, token=t))(jnp.zeros(2, "int32"))
    with pytest.raises(NotImplementedError, match="token cannot be batched by vmap"):
        jax.vmap(lambda t: group.lag(token=t))(jnp.zeros(2, "int32"))
