"""Compare derivatives through the collectives with the whole batch's derivatives in NumPy.

The model is L(θ) = φ(Σ_j g_j(θ)), so that the sum must be exact before the nonlinear φ.
Reverse mode gives one rank's coded contribution, which one more round makes exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import SIZE, once, slices
from reference import BATCH, contribution, per_example
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import tree_bcast
from jaxcoded.collectives import allreduce
from jaxcoded.plan import atoms

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]

A = per_example(4, 3, seed=10)
THETA = np.random.default_rng(11).standard_normal(3)
DIRECTION = np.random.default_rng(12).standard_normal(3)

# The sum as if its parameters were spread over the ranks.
transposable = functools.partial(coded_allreduce, transposes=True)


def phi(total):
    return jnp.sum(jnp.log(jnp.cosh(total))) + total[0] * total[1]


def partial_sum(theta, examples, weights):
    """Return ``Σ_j w_j g_j(θ)``."""
    return weights @ jnp.sin(examples @ theta)


class Whole:
    """L(θ) and its derivatives in closed form, for some examples with weights."""

    def __init__(self, theta, examples=A, weights=None):
        weights = np.ones(BATCH) if weights is None else weights
        angles = examples @ theta
        self.total = weights @ np.sin(angles)
        self.jacobian = np.einsum("j,ji,jip->ip", weights, np.cos(angles), examples)
        bend = np.einsum(
            "j,ji,jip,jiq->ipq", -weights, np.sin(angles), examples, examples
        )
        swap = np.eye(4)[[1, 0]]
        self.outer = np.tanh(self.total)
        self.outer[:2] += swap @ self.total
        outer_hessian = np.diag(1 - np.tanh(self.total) ** 2)
        outer_hessian[:2] += swap
        self.loss = np.log(np.cosh(self.total)).sum() + self.total[0] * self.total[1]
        self.grad = self.jacobian.T @ self.outer
        self.hessian = self.jacobian.T @ outer_hessian @ self.jacobian
        self.hessian += np.einsum("i,ipq->pq", self.outer, bend)


@pytest.fixture(scope="module")
def coded(group):
    """Return the same loss, computed by the group."""
    part = group.batch(BATCH)

    def loss(theta):
        return phi(
            transposable(partial_sum(theta, A[part.indices], part.weights), group)
        )

    return loss


@pytest.fixture(scope="module")
def close(group):
    tolerance = 1e-12 * group.plan.amplification
    return lambda actual, expected: np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance
    )


def exact_grad(loss, group):
    return lambda theta: transposable(jax.grad(loss)(theta), group)


def test_value_and_gradient(group, coded, close):
    value, local = jax.jit(jax.value_and_grad(coded))(THETA)
    whole = Whole(THETA)
    close(value, whole.loss)
    # before the last round the gradient depends, linearly, on this rank's examples
    # alone
    part = group.batch(BATCH)
    close(local, Whole(THETA, A[part.indices], part.weights).jacobian.T @ whole.outer)
    close(coded_allreduce(local, group), whole.grad)


def layers(loss):
    """Return the loss for each of three layers, in a scan."""
    return lambda theta: jax.lax.scan(
        lambda total, k: (total + loss(k * theta), None), 0.0, jnp.arange(1.0, 4)
    )[0]


@pytest.mark.parametrize("policy", [None, "nothing_saveable", "everything_saveable"])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint(group, coded, close, policy, inside):
    """Every policy keeps the sum's result: no round is repeated."""
    policy = policy and getattr(jax.checkpoint_policies, policy)
    remat = lambda f: jax.checkpoint(f, policy=policy)
    loss = layers(remat(coded)) if inside else remat(layers(coded))
    before = group.rounds
    value, grad = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(THETA))
    jax.effects_barrier()
    assert group.rounds == before + 3
    expected = jax.jit(jax.value_and_grad(layers(coded)))(THETA)
    close(value, expected[0])
    close(grad, expected[1])


def test_vmap_of_gradient(group, coded, close):
    thetas = np.stack([THETA, DIRECTION])
    grads = jax.jit(jax.vmap(exact_grad(coded, group)))(thetas)
    close(grads, [Whole(theta).grad for theta in thetas])


def test_descent_inside_scan(group, coded, close):
    """Descend with ``grad`` in a ``scan`` in ``jit``."""
    grad = exact_grad(coded, group)
    step = lambda theta, _: (theta - 0.01 * grad(theta), None)
    reached = jax.jit(lambda theta: jax.lax.scan(step, theta, length=4)[0])(THETA)
    theta = THETA
    for _ in range(4):
        theta = theta - 0.01 * Whole(theta).grad
    close(reached, theta)


def test_gradient_through_scan(group, close):
    """The carry is equal on all ranks; θ enters every step's round."""
    part = group.batch(BATCH)

    def loss(theta):
        def step(carry, k):
            local = partial_sum(k * theta, A[part.indices], part.weights)
            return jnp.tanh(carry) + transposable(local, group), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(4), jnp.arange(1.0, 4))[0])

    carry, jacobian = np.zeros(4), np.zeros((4, 3))
    for k in range(1, 4):
        whole = Whole(k * THETA)
        slope = 1 - np.tanh(carry) ** 2
        jacobian = slope[:, None] * jacobian + k * whole.jacobian
        carry = np.tanh(carry) + whole.total
    close(jax.jit(exact_grad(loss, group))(THETA), jacobian.sum(0))


def test_jvp(coded, close):
    value, slope = jax.jit(lambda t, v: jax.jvp(coded, (t,), (v,)))(THETA, DIRECTION)
    close(value, Whole(THETA).loss)
    close(slope, Whole(THETA).grad @ DIRECTION)


def forward_over_reverse(grad, reduce, loss):
    return jax.jvp(grad, (THETA,), (DIRECTION,))[1]


def reverse_over_reverse(grad, reduce, loss):
    return reduce(jax.grad(lambda theta: grad(theta) @ DIRECTION)(THETA))


def reverse_over_forward(grad, reduce, loss):
    slope = lambda theta: jax.jvp(loss, (theta,), (DIRECTION,))[1]
    return reduce(jax.grad(slope)(THETA))


@pytest.mark.parametrize(
    "product", [forward_over_reverse, reverse_over_reverse, reverse_over_forward]
)
def test_hessian_vector_product(group, coded, close, product):
    reduce = lambda x: coded_allreduce(x, group)
    actual = jax.jit(lambda: product(exact_grad(coded, group), reduce, coded))()
    close(actual, Whole(THETA).hessian @ DIRECTION)


@pytest.mark.parametrize("erasures", [None, np.zeros(SIZE, bool)])
def test_transpose_is_the_identity(group, erasures):
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
    cotangent = jax.tree.map(lambda x: x * (group.rank + 2), tree)

    def half(tree):
        return transposable(tree, group, divisor=2, erasures=erasures)

    before = group.rounds
    (back,) = jax.linear_transpose(half, tree)(cotangent)
    jax.tree.map(lambda b, c: np.testing.assert_array_equal(b, c / 2), back, cotangent)
    assert group.rounds == before


def test_transpose_of_the_transpose_is_a_round(group, close):
    twice = jax.linear_transpose(
        lambda ct: jax.linear_transpose(lambda x: transposable(x, group), ct)(ct)[0],
        np.ones(3),
    )
    close(twice(contribution(group, A[:, 0]))[0], A[:, 0].sum(0))


def test_some_leaves_are_constant(group, close):
    """Each dtype has a message: here the float32 message has no derivative."""
    own = contribution(group, {"moving": A[:, 0], "still": A[:, 1]})
    still = np.asarray(own["still"], np.float32)

    def loss(moving):
        total = transposable({"moving": moving, "still": still, "one": 1.0}, group)
        return jnp.sum(total["moving"] ** 2) + jnp.sum(total["still"])

    close(jax.jit(jax.grad(loss))(own["moving"]), 2 * A[:, 0].sum(0))


def test_forward_mode_of_reduce_and_bcast(group, close):
    own = jnp.asarray(contribution(group, A[:, 0]))
    _, total = jax.jvp(lambda x: coded_reduce(x, group), (own,), (2 * own,))
    at_root = group.rank == group.plan.root
    close(total, 2 * A[:, 0].sum(0) * at_root)
    mine = jnp.full(3, group.rank + 1.0)
    _, first = jax.jvp(lambda x: tree_bcast(x, group), (mine,), (2 * mine,))
    np.testing.assert_array_equal(first, np.full(3, 2.0))


def test_forward_mode_of_bcast_with_integers(group):
    """Integers have no tangent, so none is sent."""
    mine = jnp.full(3, group.rank + 1.0)

    def first(x):
        return tree_bcast({"x": x, "step": jnp.arange(3) + group.rank}, group)["x"]

    _, tangent = jax.jvp(first, (mine,), (2 * mine,))
    np.testing.assert_array_equal(tangent, np.full(3, 2.0))


@once
def test_residual_of_an_exact_sum_does_not_move(comm, transport):
    """The residual is 0, where the norm has no derivative."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as uncoded:
        residual = lambda x: coded_allreduce(x, uncoded, residual=True)[1]
        value, tangent = jax.jvp(residual, (np.ones(3),), (np.ones(3),))
        lost = jnp.full_like(atoms.deviation(uncoded.plan)[0], jnp.nan)
        assert jnp.isnan(allreduce.residual_of(uncoded.plan, lost))
    assert (float(value), float(tangent)) == (0.0, 0.0)


@pytest.mark.parametrize("collective", [coded_reduce, tree_bcast])
def test_no_transpose(group, collective):
    with pytest.raises(
        NotImplementedError, match=rf"{collective.__name__}.*no transpose"
    ):
        jax.jit(jax.grad(lambda x: jnp.sum(collective(x, group))))(np.ones(3))


def around(f):
    return jax.value_and_grad(f)(THETA)


def of_jit(f):
    return jax.grad(jax.jit(f))(THETA)


def pulled_back(f):
    value, back = jax.vjp(f, THETA)
    return back(jnp.ones_like(value))


def linearized(f):
    return jax.linear_transpose(jax.linearize(f, THETA)[1], THETA)(1.0)


def checkpointed(f):
    return jax.jit(jax.grad(jax.checkpoint(f)))(THETA)


def of_each(f):
    return jax.vmap(jax.grad(f))(np.stack([THETA, DIRECTION]))


@pytest.mark.parametrize(
    "derive", [around, of_jit, pulled_back, linearized, checkpointed, of_each]
)
def test_reverse_mode_through_the_sum(group, derive):
    """An error is raised, because the result would be the gradient of a different function on every rank."""
    part = group.batch(BATCH)

    def loss(theta):
        return phi(
            coded_allreduce(partial_sum(theta, A[part.indices], part.weights), group)
        )

    with pytest.raises(NotImplementedError) as error:
        derive(loss)
    assert "coded_value_and_grad" in str(error.value)
    assert "jaxcoded.spread(params, group)" in str(error.value)


def test_reverse_mode_through_coded_value_and_grad(group):
    """The call already returns the gradient. A gradient of its loss would be one rank's part, so an error is raised."""
    part = group.batch(BATCH)
    whole = jaxcoded.coded_value_and_grad(lambda w, x: (x - w) ** 2, group, mean=False)
    with pytest.raises(
        NotImplementedError,
        match=r"coded_value_and_grad\(<lambda>, line \d+\) of .*reverse",
    ):
        jax.grad(lambda w: whole(w, part.of(A[part.indices, 0, 0]))[0])(1.0)


def test_a_metric_next_to_the_loss(group, close):
    """A metric has no cotangent."""
    part = group.batch(BATCH)

    def loss(theta):
        local = partial_sum(theta, A[part.indices], part.weights)
        return jnp.sum(local), coded_allreduce(local, group)

    for derive in (lambda f: f, jax.jit):
        (_, total), local = derive(jax.value_and_grad(loss, has_aux=True))(THETA)
        close(total, Whole(THETA).total)
        close(coded_allreduce(local, group), Whole(THETA).jacobian.sum(0))


@slices
def test_no_transpose_with_slices(comm, transport):
    """No rank has a transpose, not even the root, whose message is as long as the
    gradient.
    """
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2), transport=transport
    ) as sliced:
        message = contribution(sliced, A[:, 0])

        def loss(message):
            return jnp.sum(coded_allreduce(message, sliced))

        with pytest.raises(NotImplementedError, match="slices"):
            jax.jit(jax.grad(loss))(message)
        # forward mode is one more round
        _, total = jax.jvp(lambda m: coded_allreduce(m, sliced), (message,), (message,))
        tolerance = 1e-12 * sliced.plan.amplification
        np.testing.assert_allclose(
            total, A[:, 0].sum(0), rtol=tolerance, atol=tolerance
        )
