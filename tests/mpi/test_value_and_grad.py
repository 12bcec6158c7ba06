"""`coded_value_and_grad` against sums over the whole batch that are worked out by hand in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from marks import SIZE, once, several, slices
from reference import random_erasures
from together import finish, wait_for_all

import jaxcoded
from jaxcoded.collectives.value_and_grad import _checked_count, _examples


def loss(params, batch):
    """Squared error of a linear model."""
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2 / 2


def by_hand(params, batch):
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return (residual**2).sum() / 2, {"w": residual @ batch["x"], "b": residual.sum()}


def problem(batch_size, seed=0):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(batch_size, 5)), random.normal(size=batch_size)
    return {"w": random.normal(size=5), "b": 0.5}, {"x": x, "y": y}


def share(batch, indices):
    return jax.tree.map(lambda leaf: leaf[indices], batch)


def left_out(group, batch, seed):
    """Erasures, and this rank's share of the batch: nonsense where it is left out."""
    erasures = random_erasures(group.plan, np.random.default_rng(seed))
    nonsense = {"x": batch["x"], "y": batch["y"] + 1e3}
    return erasures, nonsense if erasures[group.rank] else batch


def assert_equal(actual, expected, rtol=1e-9):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol)


class Counter:
    """Counts how often a loss is computed, while the program runs."""

    def __init__(self, loss):
        self.loss, self.count = loss, 0

    def __call__(self, params, batch):
        jax.debug.callback(self.add)
        return self.loss(params, batch)

    def add(self):
        self.count += 1

    def finished(self):
        jax.effects_barrier()
        return self.count


def times(group, needed):
    """How often a loss may be computed. A rank that the others did without may come too
    late."""
    return {needed, 0} if group.transport.can_lag else {needed}


@pytest.mark.parametrize("batch_size, mean", [(1, False), (5, True), (30, True)])
def test_exact(group, batch_size, mean):
    """Also of fewer examples than workers, and with no work where there are none."""
    params, batch = problem(batch_size)
    indices, weights = group.assignment(batch_size)
    counted = Counter(loss)
    step = jax.jit(jaxcoded.coded_value_and_grad(counted, group, mean=mean))
    erasures, local = left_out(group, share(batch, indices), batch_size)
    actual = step(params, local, weights, erasures=erasures)
    expected = by_hand(params, batch)
    if mean:
        expected = jax.tree.map(lambda leaf: leaf / batch_size, expected)
    assert_equal(actual, expected)
    assert counted.finished() in times(group, weights.any())


def test_aux_is_local(group):
    def with_aux(params, batch):
        return loss(params, batch), {"y": batch["y"], "one": 1, "nothing": None}

    params, batch = problem(9)
    indices, weights = group.assignment(9)
    step = jax.jit(jaxcoded.coded_value_and_grad(with_aux, group, has_aux=True))
    (total, aux), grads = step(params, share(batch, indices), weights)
    assert_equal((total, grads), by_hand(params, batch))
    holds = weights.any() & (aux["one"] > 0 or not group.transport.can_lag)
    assert_equal(aux, {"y": holds * batch["y"][indices], "one": holds, "nothing": None})


def sliced_plans(size):
    """Plans with slices of all kinds that fit: two or three slices, nested ones, and ranks with different numbers."""
    if size > 3:
        yield jaxcoded.make_plan(size, slices=2, root_computes=True)
    if size > 4:
        yield jaxcoded.make_plan(size, slices=3)
    if size == 7:
        # 1 has three children, 2 and 3 have none
        parents = (-1, 0, 0, 0, 1, 1, 1)
        yield jaxcoded.make_plan(7, slices=2, parents=parents)


@pytest.mark.parametrize("number", range(3))
def test_slices(comm, transport, number):
    """Every chunk of examples is computed once, and none that holds nothing; the auxiliary data are stacked."""
    plan = dict(enumerate(sliced_plans(comm.size))).get(number)
    if plan is None:
        pytest.skip("no such plan for so few ranks")

    def with_aux(params, batch):
        return loss(params, batch), batch["y"]

    params, batch = problem(37)  # so that there are chunks with padding
    counted = Counter(with_aux)
    with jaxcoded.CodedGroup.from_plan(comm, plan, transport=transport) as group:
        indices, weights = group.assignment(37)
        assert weights.shape[2] == plan.slices_above[comm.rank]
        step = jaxcoded.coded_value_and_grad(counted, group, has_aux=True, mean=True)
        erasures, local = left_out(group, share(batch, indices), number)
        (mean, aux), grads = jax.jit(step)(params, local, weights, erasures=erasures)
        expected = jax.tree.map(lambda leaf: leaf / 37, by_hand(params, batch))
        assert_equal((mean, grads), expected)
        held = weights.any(axis=(1, 2))
        count = counted.finished()
        assert count in times(group, held.sum())
        y = local["y"].reshape(weights.shape[:2])
        np.testing.assert_array_equal(aux, (held & (count > 0))[:, None] * y)


def test_dtypes_are_kept(group):
    """Also where JAX promotes nothing by itself."""
    params = {
        "wide": np.ones(3, np.float64),
        "single": np.ones(3, np.float32),
        "narrow": np.ones((), jnp.bfloat16),
    }
    indices, weights = group.assignment(6)

    def narrow_loss(params, x):
        row = params["wide"].astype(jnp.float32) + params["single"]
        losses = (x[:, None] * row).sum(axis=1)
        return losses.astype(jnp.bfloat16) * params["narrow"]

    step = jax.jit(jaxcoded.coded_value_and_grad(narrow_loss, group))
    with jax.numpy_dtype_promotion("strict"):
        total, grads = step(params, np.arange(6, dtype=np.float32)[indices], weights)
    assert total.dtype == jnp.float32
    for name, grad in grads.items():
        assert grad.dtype == params[name].dtype
    # 0 + … + 5 = 15, times the sum of a row. The backward pass rounds the weights to the
    # dtype of the losses.
    rounding = float(jnp.finfo(jnp.bfloat16).eps) * group.plan.amplification
    expected = {"wide": [15] * 3, "single": [15] * 3, "narrow": 90}
    for name, grad in grads.items():
        np.testing.assert_allclose(grad.astype(float), expected[name], rtol=rounding)
    np.testing.assert_allclose(total, 90, rtol=rounding)


@once
def test_random_keys_in_the_batch(group):
    """A key that belongs to its example draws the same wherever the example is computed."""
    x = np.random.default_rng(0).normal(size=(11, 4))
    keys = jax.random.split(jax.random.key(0), 11)
    draw = jax.jit(jax.vmap(jax.random.uniform))
    indices, weights = group.assignment(11)
    step = jaxcoded.coded_value_and_grad(
        lambda w, batch: draw(batch["key"]) * (batch["x"] @ w), group
    )
    batch = share({"x": x, "key": keys}, indices)
    expected = np.asarray(draw(keys)) @ x
    assert_equal(jax.jit(step)(np.ones(4), batch, weights), (expected.sum(), expected))


def test_scan_over_batches(group):
    """Rounds of several batches in one compiled program, with donated parameters and an ensemble by vmap."""
    params, _ = problem(1)
    batches = [problem(8, seed)[1] for seed in range(3)]
    indices, weights = group.assignment(8)
    step = jaxcoded.coded_value_and_grad(loss, group, mean=True)
    ensemble = jax.vmap(step, in_axes=(0, None, None))

    def descend(params, batch):
        losses, grads = ensemble(params, batch, weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    members = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), params)
    shares = jax.tree.map(lambda *leaves: np.stack(leaves)[:, indices], *batches)
    train = jax.jit(lambda *args: jax.lax.scan(descend, *args), donate_argnums=0)
    trained, losses = jax.device_get(train(jax.device_put(members), shares))
    for member in (0, 1):
        expected = share(members, member)
        for number, batch in enumerate(batches):
            total, grads = by_hand(expected, batch)
            np.testing.assert_allclose(losses[number, member], total / 8, rtol=1e-9)
            expected = jax.tree.map(lambda p, g: p - 0.1 * g / 8, expected, grads)
        assert_equal(share(trained, member), expected)


def one_at_a_time(step):
    return jax.jit(step)


def ordered_by_tokens(step):
    return jax.jit(lambda *args: step(*args, token=jnp.int32(0))[:2])


def of_an_ensemble(step):
    """By vmap: the count has one more axis."""

    def members(params, batch, weights):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
        out = jax.vmap(step, in_axes=(0, None, None))(stacked, batch, weights)
        return share(out, 0)

    return jax.jit(members)


@pytest.mark.parametrize("compiled", [one_at_a_time, ordered_by_tokens, of_an_ensemble])
@pytest.mark.parametrize("odd", ["all", "one"])
def test_a_mean_of_what_does_not_add_up(comm, group, transport, compiled, odd):
    """Weights whose values have changed: an error on all ranks, or NaN without the
    engine; or the exact mean where the code has done without them."""
    params, batch = problem(12)
    indices, weights = group.assignment(12)
    batch_here = share(batch, indices)
    step = compiled(jaxcoded.coded_value_and_grad(loss, group, mean=True))
    expected = jax.tree.map(lambda leaf: leaf / 12, by_hand(params, batch))
    assert_equal(finish(step(params, batch_here, weights)), expected)
    wait_for_all(comm)
    wrong = weights
    if odd == "all" or comm.rank == comm.size - 1:
        wrong = jax.tree.map(lambda leaf: leaf + (np.arange(len(leaf)) == 0), weights)
    text, nans = "", []
    try:
        out = jax.device_get(finish(step(params, batch_here, wrong)))
    except (JaxRuntimeError, ValueError) as error:  # the latter with tokens
        jaxcoded.effects_barrier()
        text = str(error)
        assert "InconsistentMessages: round " in text
        assert "for a batch of 12" in text
        assert " examples were counted, not 12. Some rank's parameters are not" in text
    else:
        nans = [bool(np.isnan(leaf).all()) for leaf in jax.tree.leaves(out)]
        if not any(nans):
            assert_equal(out, expected)
    assert set(comm.allgather(text)) == {text}
    elsewhere = comm.allgather(nans)
    assert elsewhere.count([True] * 3) in (0, comm.size)
    if transport == "engine":
        assert text or (odd == "one" and not any(nans))
    else:
        assert not text and (all(nans) or odd == "one")
    assert_equal(finish(step(params, batch_here, weights)), expected)


@once
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_count_may_be_off_by_its_rounding(transport, dtype):
    """The mean is by the number itself."""
    plan = jaxcoded.make_plan(13, fanout=3)
    for number in (1, 12, 10_000_000):
        weights = jaxcoded.Weights(jnp.ones(1, dtype), number, plan.fingerprint, 1)
        reduced = {"count": jnp.asarray(0, dtype)}
        examples = _examples(reduced, weights, plan)
        rounding = plan.amplification * float(jnp.finfo(dtype).eps)
        # one for each addition on the way: of two layers, each of three children
        for off in (0.0, 8 * rounding, -8 * rounding):
            count = jnp.asarray(number * (1 + off), dtype)
            assert _checked_count(count, examples) == number
        for wrong in (0.0, 0.999 * number, 1.001 * number, np.nan, np.inf):
            count = jnp.asarray(wrong, dtype)
            assert np.isnan(_checked_count(count, examples))


@pytest.mark.skipif(SIZE < 4, reason="too few for a straggler and two slices")
def test_a_count_beside_large_numbers_of_other_slices(comm, transport):
    """They are not added to it in the messages: it is exact."""
    with jaxcoded.CodedGroup(
        *(comm,), code="random_generator", slices=2, transport=transport
    ) as group:
        indices, weights = group.assignment(60)
        x = np.random.default_rng(0).standard_normal((60, 9)).astype(np.float32)
        gradient = jaxcoded.coded_value_and_grad(
            lambda p, x: 1e9 * (x @ p), group, mean=True
        )
        _, got = jax.jit(gradient)(jnp.ones(9, np.float32), x[indices], weights)
        np.testing.assert_allclose(got, 1e9 * x.mean(0), rtol=1e-3, atol=1e5)


# Wrong use. Each rank says it before it communicates.


def raises(message, loss, group, batch, weights, error=ValueError, **options):
    params, _ = problem(1)
    with pytest.raises(error, match=message):
        jaxcoded.coded_value_and_grad(loss, group, **options)(params, batch, weights)


@once
@pytest.mark.parametrize(
    "wrong, shape",
    [
        (lambda losses: losses[:, None], r"\({0}, 1\)"),
        (lambda losses: losses.sum(), r"\(\): leave their mean or sum to jaxcoded"),
    ],
)
def test_losses_of_a_wrong_shape(group, wrong, shape):
    _, batch = problem(6)
    indices, weights = group.assignment(6)
    length = len(indices)
    raises(
        rf"one loss for each example, shape \({length},\), got {shape.format(length)}",
        lambda params, batch: wrong(loss(params, batch)),
        group,
        share(batch, indices),
        weights,
    )


@once
def test_losses_that_are_integers(group):
    _, batch = problem(6)
    indices, weights = group.assignment(6)
    counted = lambda params, batch: jnp.round(loss(params, batch)).astype("int32")
    with pytest.raises(TypeError, match="losses in floating point, got int32: cast"):
        jaxcoded.coded_value_and_grad(counted, group)(
            problem(1)[0], share(batch, indices), weights
        )


@once
@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (jnp.tanh, "a function|a PjitFunction|a jit"),
        (3, "of dtype int64"),
        (np.arange(2), "of dtype int64"),
        (True, "of dtype bool"),
        ("relu", "a str"),
        (jax.random.key(0), "of dtype key<fry>"),
    ],
    ids=["function", "number", "integers", "bool", "text", "key"],
)
def test_parameters_without_a_gradient(group, leaf, said):
    _, batch = problem(6)
    indices, weights = group.assignment(6)
    model = {"w": np.ones(5), "b": 0.5, "layers": [{"odd": leaf}]}
    message = (
        rf"params\['layers'\]\[0\]\['odd'\] is ({said}).*, which has no gradient: "
        "partition the model"
    )
    with pytest.raises(TypeError, match=message):
        jaxcoded.coded_value_and_grad(loss, group)(
            model, share(batch, indices), weights
        )


@once
def test_a_partitioned_model(group):
    """What cannot be differentiated is put back in the loss."""
    params, batch = problem(6)
    indices, weights = group.assignment(6)
    rest = {"power": 2, "outer": jnp.negative}

    def partitioned(params, batch):
        model = params | rest
        return model["outer"](loss(params, batch)) * model["power"] / -2

    step = jax.jit(jaxcoded.coded_value_and_grad(partitioned, group))
    actual = step(params, share(batch, indices), weights)
    assert_equal(actual, by_hand(params, batch))


@once
@pytest.mark.parametrize("has_aux", [False, True])
def test_auxiliary_data_that_has_aux_does_not_fit(group, has_aux):
    _, batch = problem(6)
    indices, weights = group.assignment(6)

    def other(params, batch):
        losses = loss(params, batch)
        return losses if has_aux else (losses, {"aux": 1})

    message = f"has_aux={has_aux}.*per_example_loss must return"
    raises(message, other, group, share(batch, indices), weights, has_aux=has_aux)


@once
def test_batch_of_a_wrong_length(group):
    _, batch = problem(100)
    _, weights = group.assignment(6)
    length = len(weights)
    message = (
        rf"batch\['x'\] has shape \(100, 5\), but the weights are for {length} examples"
        ": index the data with the indices that came with them"
    )
    raises(message, loss, group, batch, weights)
    raises(r"batch\['y'\] has shape \(\)", loss, group, {"y": 1.0}, weights)


@once
def test_weights_of_a_wrong_shape(group):
    _, batch = problem(6)
    indices, weights = group.assignment(6)
    batch = share(batch, indices)
    message = (
        r"weights must have shape \(length,\) as group.assignment makes them, got "
    )
    for wrong in (weights[:, None], weights[:, None, None], 1.0):
        raises(message, loss, group, batch, wrong, own_weights=True)
    stacked = jax.tree.map(lambda values: values[:, None], weights)
    raises(message, loss, group, batch, stacked)


@once
@slices
def test_weights_of_another_group_with_slices(comm, transport):
    _, batch = problem(6)
    with jaxcoded.CodedGroup(comm, slices=2, transport=transport) as group:
        indices, weights = group.assignment(6)
        slices = weights.shape[2]
        message = (
            rf"weights must have shape \(chunks, length // chunks, {slices}\) "
            "as group.assignment makes them, got "
        )
        batch = share(batch, indices)
        for wrong in (weights[..., 0], weights[..., :0], weights.reshape(-1)):
            raises(message, loss, group, batch, wrong, own_weights=True)


@once
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda weights: np.ones(len(weights)), id="uniform"),
        pytest.param(np.asarray, id="as a numpy array"),
        pytest.param(jnp.asarray, id="as an array"),
        pytest.param(lambda weights: weights[:], id="a slice"),
        pytest.param(lambda weights: 1 * weights, id="a product"),
        pytest.param(lambda weights: 1.0, id="a number"),
        pytest.param(lambda weights: None, id="none"),
    ],
)
def test_weights_that_are_not_those_of_the_assignment(group, other):
    """Uniform weights went through, and the sum was wrong on every rank."""
    params, batch = problem(12)
    indices, weights = group.assignment(12)
    wrong, batch = other(weights), share(batch, indices)
    message = r"what group\.epoch or group\.assignment gave.*own_weights=True"
    raises(message, loss, group, batch, wrong, TypeError)
    step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=True))
    with pytest.raises(TypeError, match=message):
        step(params, batch, wrong)


@once
def test_weights_that_were_forgotten(group):
    params, batch = problem(12)
    indices, _ = group.assignment(12)
    step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=True))
    with pytest.raises(
        TypeError,
        match=r"Got none: .* group.epoch\(.*or indices, weights = group.assign",
    ):
        step(params, share(batch, indices))


@once
def test_a_plain_array_for_weights_in_jit(group):
    params, batch = problem(12)
    indices, weights = group.assignment(12)
    step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=True))
    words = r"a plain array, float\d+\[\d+(, \d+)*\], inside jit: hand the Weights"
    with pytest.raises(TypeError, match=words):
        step(params, share(batch, indices), np.asarray(weights))


@once
def test_weights_of_one_s_own(group):
    """Only where the call asks for them; what they add up to nobody knows."""
    params, batch = problem(12)
    indices, weights = group.assignment(12)
    own, batch_here = np.asarray(2 * weights), share(batch, indices)
    step = jaxcoded.coded_value_and_grad(loss, group, own_weights=True)
    actual = jax.jit(step)(params, batch_here, own)
    twice = jax.tree.map(lambda leaf: 2 * leaf, by_hand(params, batch))
    assert_equal(actual, twice)
    whole = weights.astype(np.int32)
    raises("floating point", loss, group, batch_here, whole, TypeError, own_weights=True)  # fmt: skip
    message = "leave mean out, and divide by it"
    raises(message, loss, group, batch_here, own, own_weights=True, mean=True)


@several
@once
def test_weights_of_another_rank_or_plan(comm, group, transport):
    _, batch = problem(12)
    indices, weights = group.assignment(12)
    batch = share(batch, indices)
    other = dataclasses.replace(weights, rank=(comm.rank + 1) % comm.size)
    message = f"the weights of rank {other.rank}, but this is rank {comm.rank}"
    raises(message, loss, group, batch, other)
    with jaxcoded.CodedGroup(
        comm, stragglers=0, root_computes=True, transport=transport
    ) as with_root:
        _, other = with_root.assignment(12)
    raises("another group's plan", loss, group, batch, other)


def test_weights_of_before_a_replan(comm, transport):
    """Before it they fit, after it no more; those of an equal plan still do."""
    params, batch = problem(12)
    with jaxcoded.CodedGroup(comm, stragglers=0, transport=transport) as group:
        indices, old = group.assignment(12)
        group = group.replan(np.ones(comm.size))
        step = jaxcoded.coded_value_and_grad(loss, group)
        assert_equal(step(params, share(batch, indices), old), by_hand(params, batch))
        group = group.replan(np.arange(1.0, comm.size + 1))
        if comm.size > 2:  # one worker has all of it at any speed
            raises("plan before a replan", loss, group, share(batch, indices), old)
        indices, new = group.assignment(12)
        step = jaxcoded.coded_value_and_grad(loss, group)
        assert_equal(step(params, share(batch, indices), new), by_hand(params, batch))


@once
def test_weights_with_fewer_digits(group):
    """A tree of inputs is cast to bfloat16 as a whole."""
    _, batch = problem(12)
    indices, weights = group.assignment(12)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    raises("converted to bfloat16", loss, group, share(batch, indices), narrow)


@once
def test_weights_compute_like_an_array(group):
    """In numpy and JAX, as they come and as arguments, moved and donated."""
    _, weights = group.assignment(6)
    array = np.asarray(weights)
    assert isinstance(array, np.ndarray)
    losses = np.random.default_rng(0).normal(size=array.shape)
    uses = [
        lambda w, x: w @ x,
        lambda w, x: x @ w,
        lambda w, x: jnp.sum(w * x),
        lambda w, x: (x * w - w / 3 + 2**w).sum(),
        lambda w, x: jnp.where(w != 0, -w * x, 0),
        lambda w, x: jnp.tensordot(w, x, 1),
        lambda w, x: jnp.asarray(w) + w[:1] + len(w) + w.ndim + w.size,
        lambda w, x: jnp.zeros(w.shape, w.dtype),
        lambda w, x: w.astype(x.dtype) * abs(x),
        lambda w, x: w.any(),
    ]
    for use in uses:
        expected = use(array, losses)
        for x in (losses, jnp.asarray(losses)):
            np.testing.assert_allclose(use(weights, x), expected)
            np.testing.assert_allclose(jax.jit(use)(weights, x), expected)
    assert np.multiply(weights, 2.0).tolist() == (2 * array).tolist()
    moved = jax.device_put(weights)
    assert isinstance(moved, jaxcoded.Weights)
    assert moved.batch_size == 6
    donated = jax.jit(lambda w: jax.tree.map(jnp.copy, w), donate_argnums=0)(moved)
    donated.check(group.plan, group.rank)
    assert donated.tolist() == array.tolist()
