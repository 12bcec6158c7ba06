"""Compare 50 coded training steps with 50 steps of plain JAX on the whole batch, and
test the optax transformation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import not_alone, once
from reference import random_erasures
from together import wait_for_all

import jaxcoded

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]

STEPS, EXAMPLES, BATCH, FEATURES, CLASSES = 50, 300, 24, 6, 3
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(1e-2),
}


def classifier(params, batch):
    """Return the cross entropy of a small MLP with a scalar leaf, for each example."""
    x, label = batch
    hidden = jnp.tanh(x @ params["layers"][0])
    logits = params["scale"] * (hidden @ params["layers"][1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def per_example_loss(params, batch):
    """Return the loss of one network per optimizer, all in one pytree and independent
    of each other.
    """
    return sum(classifier(network, batch) for network in params.values())


def make_optimizer(params):
    labels = {
        name: jax.tree.map(lambda _, name=name: name, params[name]) for name in params
    }
    return optax.partition(OPTIMIZERS, labels)


def make_params(dtype):
    random = np.random.default_rng(1)

    def network():
        layers = random.normal(size=(FEATURES, 8)), random.normal(size=(8, CLASSES))
        return {"layers": layers, "scale": np.ones(())}

    params = {name: network() for name in OPTIMIZERS}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_batches(dtype):
    """Return a different batch of the same size for each step."""
    random = np.random.default_rng(2)
    x = random.normal(size=(EXAMPLES, FEATURES)).astype(dtype)
    label = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(axis=1)
    for _ in range(STEPS):
        chosen = random.choice(EXAMPLES, size=BATCH, replace=False)
        yield x[chosen], label[chosen]


def coded_value_and_grad_step(group, tx):
    value_and_grad = jaxcoded.coded_value_and_grad(per_example_loss, group)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, erasures):
        _, grads = value_and_grad(params, batch, erasures=erasures)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx


def chain_step(group, tx):
    tx = optax.chain(jaxcoded.optax.sum_gradients(group, divisor=BATCH), tx)

    def weighted_loss(params, batch, weights):
        losses = per_example_loss(params, batch)
        return jnp.sum(weights.astype(losses.dtype) * losses)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, erasures):
        local = jax.grad(weighted_loss)(params, batch.data, batch.weights)
        updates, state = tx.update(
            local, state, params, weights=batch.weights, erasures=erasures
        )
        return optax.apply_updates(params, updates), state

    return step, tx


@functools.cache
def reference(dtype):
    """Return the parameters after plain training on the whole batches, in the same
    dtype.
    """
    params = make_params(dtype)
    tx = make_optimizer(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda p: per_example_loss(p, batch).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in make_batches(dtype):
        params, state = step(params, state, batch)
    return jax.device_get(params)


@not_alone
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("make_step", [coded_value_and_grad_step, chain_step])
def test_fifty_steps(group, comm, make_step, dtype):
    """Each step leaves out a different set of ranks, as many as the plan tolerates."""
    params = jax.device_put(make_params(dtype))
    step, tx = make_step(group, make_optimizer(params))
    state = tx.init(params)
    part = group.batch(BATCH)
    random = np.random.default_rng(3)
    for batch in make_batches(dtype):
        local = jax.tree.map(lambda leaf: leaf[part.indices], batch)
        erasures = random_erasures(group.plan, random)
        params, state = step(params, state, part.of(local), erasures)
    params = jax.device_get(params)
    assert step._cache_size() == 1

    replicas = comm.allgather(
        b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params))
    )
    assert len(set(replicas)) == 1
    if comm.rank == 0:  # checked once, as all ranks have the same bytes
        assert_close(params, reference(dtype), dtype, group.plan.amplification)
    wait_for_all(comm)


def assert_close(actual, expected, dtype, amplification):
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, e), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        place = jax.tree_util.keystr(path)
        assert a.dtype == e.dtype == dtype, place
        if dtype == "float64":
            np.testing.assert_allclose(a, e, rtol=1e-9, err_msg=place)
        else:
            bound = 1e-5 * max(1, amplification / 100)
            assert np.abs(a - e).max() <= bound * np.abs(e).max(), place


# The transformation.


@once
def test_init_does_not_communicate(group):
    tx = jaxcoded.optax.sum_gradients(group)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    if group.rank == 0:  # alone
        state = tx.init({"w": jnp.ones(2)})
        assert state == jaxcoded.optax.SumGradientsState(None)


@once
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("around", [jax.jit, lambda f: f])
def test_a_reduced_gradient_is_not_reduced_again(group, around, mean):
    """If the gradient is passed on unchanged, the mistake is detected before any rank begins a round for it."""
    part = group.batch(10)
    loss_and_grad = jaxcoded.coded_value_and_grad(
        lambda w, x: (w["a"] - x) ** 2 + w["b"], group, mean=mean
    )
    tx = optax.chain(jaxcoded.optax.sum_gradients(group), optax.sgd(1.0))
    batch = jnp.arange(10.0)[part.indices]
    w = {"a": jnp.float32(1.0), "b": jnp.float32(0.0)}

    def step(w, batch, prepare):
        _, grads = loss_and_grad(w, part.of(batch))
        return tx.update(prepare(grads), tx.init(w), w, weights=part.weights)[0]

    with pytest.raises(
        ValueError, match=r"updates\['a'\] is a gradient that coded_value"
    ):
        around(lambda w, x: step(w, x, lambda grads: grads))(w, batch)
    wait_for_all(group.comm)
    # a gradient computed from this gradient is the caller's responsibility
    local = around(lambda w, x: step(w, x, lambda g: jax.tree.map(jnp.negative, g)))
    jax.block_until_ready(local(w, batch))


def erased_contribution(group, seed):
    """Return this rank's contribution to ``Σ_j j`` over the examples: nonsense if this
    rank is left out.
    """
    erasures = random_erasures(group.plan, np.random.default_rng(seed))
    part = group.batch(10)
    own = 1e6 if erasures[group.rank] else (part.weights * part.indices).sum()
    return own, part.weights, erasures


def test_erasures_are_an_extra_argument(group):
    """The argument passes through a chain, next to others; masked leaves stay local."""
    tx = optax.chain(
        optax.masked(
            jaxcoded.optax.sum_gradients(group), {"summed": True, "local": False}
        ),
        optax.scale(2.0),
    )
    own, weights, erasures = erased_contribution(group, 0)
    grads = {"summed": np.float64(own), "local": np.float64(group.rank)}

    @jax.jit
    def update(grads, extra):
        state = tx.init(grads)
        return tx.update(grads, state, grads, **extra, value=1.0)[0]

    updates = update(grads, {"weights": weights, "erasures": erasures})
    np.testing.assert_allclose(updates["summed"], 2 * 45, rtol=1e-9)
    assert updates["local"] == 2 * group.rank


def test_gradient_accumulation(group):
    """Two steps take one round, inside a ``cond``, and the learning rate changes
    between the rounds.
    """
    tx = optax.inject_hyperparams(
        lambda learning_rate: optax.chain(
            jaxcoded.optax.sum_gradients(group, divisor=10), optax.sgd(learning_rate)
        )
    )(learning_rate=1.0)
    every_second = optax.MultiSteps(tx, every_k_schedule=2)
    update = jax.jit(every_second.update)
    param = jnp.float64(1.0)
    state = every_second.init(param)
    for number in range(4):
        own, weights, erasures = erased_contribution(group, number // 2)
        grad = jnp.float64(own * (1 + number))
        if number == 2:
            inner = state.inner_opt_state
            inner.hyperparams["learning_rate"] = jnp.float64(0.1)
        updates, state = update(grad, state, param, weights=weights, erasures=erasures)
        rate = {1: 1.0, 3: 0.1}.get(number, 0.0)
        # the mean of two gradients, of 1 and 2 or of 3 and 4 times 4.5
        expected = -rate * 4.5 * (number + 0.5)
        # MultiSteps accumulates in float32
        np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_closed_group(comm, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        tx = jaxcoded.optax.sum_gradients(group)
    with pytest.raises(jaxcoded.GroupClosed, match="use after close"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
