"""Compare `coded_value_and_grad` with sums over the whole batch, computed by hand in
float64.
"""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from marks import SIZE, once, several, slices
from reference import random_erasures
from together import finish, lowered, wait_for_all

import jaxcoded
from jaxcoded.collectives.counting import rounding
from jaxcoded.transport.kernels import counts


def loss(params, batch):
    """Return the squared error of a linear model."""
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
    """Return erasures, and this rank's part of the batch: nonsense if the rank is left out."""
    erasures = random_erasures(group.plan, np.random.default_rng(seed))
    nonsense = {"x": batch["x"], "y": batch["y"] + 1e3}
    return erasures, nonsense if erasures[group.rank] else batch


def assert_equal(actual, expected, rtol=1e-9):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol)


class Counter:
    """A counter of how often a loss is computed while the program runs."""

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
    """Return how often a loss may be computed. A rank without which the sum is complete may come too late."""
    return {needed, 0} if group._session.transport.can_lag else {needed}


@pytest.mark.ranks(2, 4, exhaustive=(7,))
@pytest.mark.parametrize("batch_size, mean", [(1, False), (5, True), (30, True)])
def test_exact(group, batch_size, mean):
    """Results are exact also for fewer examples than workers; a rank without examples
    does no work.
    """
    params, batch = problem(batch_size)
    part = group.batch(batch_size)
    counted = Counter(loss)
    step = jax.jit(jaxcoded.coded_value_and_grad(counted, group, mean=mean))
    erasures, local = left_out(group, share(batch, part.indices), batch_size)
    actual = step(params, part.of(local), erasures=erasures)
    expected = by_hand(params, batch)
    if mean:
        expected = jax.tree.map(lambda leaf: leaf / batch_size, expected)
    assert_equal(actual, expected)
    assert counted.finished() in times(group, part.weights.any())


@pytest.mark.ranks(2, 4, exhaustive=(7,))
def test_aux_is_local(group):
    def with_aux(params, batch):
        return loss(params, batch), {"y": batch["y"], "one": 1, "nothing": None}

    params, batch = problem(9)
    part = group.batch(9)
    step = jax.jit(
        jaxcoded.coded_value_and_grad(with_aux, group, has_aux=True, mean=False)
    )
    (total, aux), grads = step(params, part.of(share(batch, part.indices)))
    assert_equal((total, grads), by_hand(params, batch))
    holds = part.weights.any() & (
        aux["one"] > 0 or not group._session.transport.can_lag
    )
    assert_equal(
        aux, {"y": holds * batch["y"][part.indices], "one": holds, "nothing": None}
    )


def sliced_plans(size):
    """Return plans with all kinds of slices that fit: two or three, nested ones, and
    different numbers per rank.
    """
    if size > 3:
        yield jaxcoded.make_plan(size, jaxcoded.Coded(slices=2, root_computes=True))
    if size > 4:
        yield jaxcoded.make_plan(size, jaxcoded.Coded(slices=3))
    if size == 7:
        # rank 1 has three children, 2 and 3 have none
        parents = (-1, 0, 0, 0, 1, 1, 1)
        yield jaxcoded.make_plan(7, jaxcoded.Coded(slices=2, parents=parents))


@pytest.mark.parametrize("number", range(3))
def test_slices(comm, transport, number):
    """Every nonempty chunk of examples is computed once; the auxiliary data are
    stacked.
    """
    plan = dict(enumerate(sliced_plans(comm.size))).get(number)
    if plan is None:
        pytest.skip("no such plan for so few ranks")

    def with_aux(params, batch):
        return loss(params, batch), batch["y"]

    params, batch = problem(37)  # so that some chunks have padding
    counted = Counter(with_aux)
    with jaxcoded.CodedGroup(comm, plan, transport=transport) as group:
        part = group.batch(37)
        assert part.weights.shape[2] == plan.slices_above[comm.rank]
        step = jaxcoded.coded_value_and_grad(counted, group, has_aux=True)
        erasures, local = left_out(group, share(batch, part.indices), number)
        (mean, aux), grads = jax.jit(step)(params, part.of(local), erasures=erasures)
        expected = jax.tree.map(lambda leaf: leaf / 37, by_hand(params, batch))
        assert_equal((mean, grads), expected)
        held = part.weights.any(axis=(1, 2))
        count = counted.finished()
        assert count in times(group, held.sum())
        y = local["y"].reshape(part.weights.shape[:2])
        np.testing.assert_array_equal(aux, (held & (count > 0))[:, None] * y)


def test_dtypes_are_kept(group):
    """Dtypes are kept also without JAX's promotion."""
    params = {
        "wide": np.ones(3, np.float64),
        "single": np.ones(3, np.float32),
        "narrow": np.ones((), jnp.bfloat16),
    }
    part = group.batch(6)

    def narrow_loss(params, x):
        row = params["wide"].astype(jnp.float32) + params["single"]
        losses = (x[:, None] * row).sum(axis=1)
        return losses.astype(jnp.bfloat16) * params["narrow"]

    step = jax.jit(jaxcoded.coded_value_and_grad(narrow_loss, group, mean=False))
    with jax.numpy_dtype_promotion("strict"):
        total, grads = step(
            params, part.of(np.arange(6, dtype=np.float32)[part.indices])
        )
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
    """A key in an example gives the same draws wherever the example is computed."""
    x = np.random.default_rng(0).normal(size=(11, 4))
    keys = jax.random.split(jax.random.key(0), 11)
    draw = jax.jit(jax.vmap(jax.random.uniform))
    part = group.batch(11)
    step = jaxcoded.coded_value_and_grad(
        lambda w, batch: draw(batch["key"]) * (batch["x"] @ w), group, mean=False
    )
    batch = share({"x": x, "key": keys}, part.indices)
    expected = np.asarray(draw(keys)) @ x
    assert_equal(jax.jit(step)(np.ones(4), part.of(batch)), (expected.sum(), expected))


def test_calls_outside_jit_compile_once_and_keep_little(group):
    """Batches of equal shapes, also smaller last ones, and parameters with other values
    compile once.
    """

    def sums():
        def losses(w, x):
            return jax.nn.relu(w - x) ** 2 + jnp.minimum(w - x, 0) ** 2

        value_and_grad = jaxcoded.coded_value_and_grad(losses, group, mean=False)
        for epoch in range(2):
            for part in group.epoch(np.arange(10.0), batch_size=4, epoch=epoch, seed=0):
                with lowered() as programs:
                    total = value_and_grad(float(epoch), part)[0]
                yield total, len(programs)
        yield weakref.ref(losses), 0

    *losses, (kept, _) = sums()
    first = losses[0][1]
    assert first > 0
    assert [programs for _, programs in losses] == [first, 0, 0, 0, 0, 0]
    for epoch in range(2):
        total = sum(float(loss) for loss, _ in losses[3 * epoch : 3 * epoch + 3])
        np.testing.assert_allclose(total, ((np.arange(10.0) - epoch) ** 2).sum())
    jaxcoded.effects_barrier()
    for _ in range(16):  # the latest programs are kept
        jaxcoded.coded_value_and_grad(lambda w, x: (w - x) ** 2, group)
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("scalar", [False, True])
def test_calls_outside_jit_use_the_current_values_of_closures(group, scalar):
    """Calls outside `jit` see the current values, as in other functions of JAX; `jit`
    freezes them.
    """

    class Model:
        scale = 1.0

        def losses(self, w, x):
            found = factor * self.scale * jnp.sin(w * x + target["shift"])
            return found.mean() if scalar else found

    factor, target, model, x = 1.0, {"shift": 0.0}, Model(), np.arange(1.0, 9.0)
    batch = group.batch(x)
    value_and_grad = jaxcoded.coded_value_and_grad(model.losses, group)
    total = jaxcoded.coded_sum(
        lambda w, x: factor * self_scale() * jnp.sin(w * x + target["shift"]), group
    )

    def self_scale():
        return model.scale

    for step in range(5):
        if step == 1:
            factor = 3.0
        elif step == 2:
            target = {"shift": jnp.float64(0.5)}
        elif step == 3:
            model.scale = -2.0
        loss, grad = value_and_grad(0.3, batch)
        shift = float(target["shift"])
        expected = factor * model.scale * np.sin(0.3 * x + shift)
        slope = factor * model.scale * (x * np.cos(0.3 * x + shift))
        np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
        np.testing.assert_allclose(grad, slope.mean(), rtol=1e-6)
        np.testing.assert_allclose(total(0.3, batch), expected.sum(), rtol=1e-6)


@pytest.mark.ranks(2, 4, exhaustive=(7,))
def test_scan_over_batches(group):
    """One compiled program runs rounds of several batches, with donated parameters and
    an ensemble by vmap.
    """
    params, _ = problem(1)
    batches = [problem(8, seed)[1] for seed in range(3)]
    part = group.batch(8)
    step = jaxcoded.coded_value_and_grad(loss, group)
    ensemble = jax.vmap(step, in_axes=(0, None))

    def descend(params, batch):
        losses, grads = ensemble(params, part.of(batch))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses

    members = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), params)
    shares = jax.tree.map(lambda *leaves: np.stack(leaves)[:, part.indices], *batches)
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
    return jax.jit(lambda *args: step(*args, token=jnp.int32(0)).value)


def of_an_ensemble(step):
    """Return the step of an ensemble by vmap: the count has one more axis."""

    def members(params, batch):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
        out = jax.vmap(step, in_axes=(0, None))(stacked, batch)
        return share(out, 0)

    return jax.jit(members)


@pytest.mark.parametrize("compiled", [one_at_a_time, ordered_by_tokens, of_an_ensemble])
@pytest.mark.parametrize("odd", ["all", "one"])
def test_a_mean_with_changed_weights(comm, group, transport, compiled, odd):
    """Changed weights raise an error on all ranks, or give NaN without the engine. If the sum does not need them, the
    mean is exact.
    """
    params, batch = problem(12)
    part = group.batch(12)
    batch_here = share(batch, part.indices)
    step = compiled(jaxcoded.coded_value_and_grad(loss, group))
    expected = jax.tree.map(lambda leaf: leaf / 12, by_hand(params, batch))
    assert_equal(finish(step(params, part.of(batch_here))), expected)
    wait_for_all(comm)
    wrong = part.weights
    if odd == "all" or comm.rank == comm.size - 1:
        wrong = dataclasses.replace(
            part.weights, values=part.weights + (np.arange(len(part.weights)) == 0)
        )
    text, nans = "", []
    try:
        out = jax.device_get(
            finish(step(params, jaxcoded.Batch(batch_here, part.indices, wrong)))
        )
    # with tokens JAX raises a ValueError
    except (JaxRuntimeError, ValueError) as error:
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
    assert_equal(finish(step(params, part.of(batch_here))), expected)


@once
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_count_may_be_off_by_its_rounding(transport, dtype):
    """The mean divides by the exact count."""
    plan = jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3))
    for number in (1, 12, 10_000_000):
        examples = number, rounding(plan, dtype)
        one = plan.amplification * float(jnp.finfo(dtype).eps)
        # one rounding for each addition on the way up: two layers of three children each
        for off in (0.0, 8 * one, -8 * one):
            count = jnp.asarray(number * (1 + off), dtype)
            assert counts(count, *examples)
        for wrong in (0.0, 0.999 * number, 1.001 * number, np.nan, np.inf):
            count = jnp.asarray(wrong, dtype)
            assert not counts(count, *examples)


@pytest.mark.skipif(SIZE < 4, reason="too few for a straggler and two slices")
def test_a_count_with_large_numbers_in_other_slices(comm, transport):
    """Messages do not add large numbers to the count: it is exact."""
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(code="random_generator", slices=2),
        transport=transport,
    ) as group:
        part = group.batch(60)
        x = np.random.default_rng(0).standard_normal((60, 9)).astype(np.float32)
        gradient = jaxcoded.coded_value_and_grad(lambda p, x: 1e9 * (x @ p), group)
        _, got = jax.jit(gradient)(jnp.ones(9, np.float32), part.of(x[part.indices]))
        np.testing.assert_allclose(got, 1e9 * x.mean(0), rtol=1e-3, atol=1e5)


# Wrong use. Each rank raises the error before it communicates.


def raises(message, loss, group, batch, error=ValueError, **options):
    params, _ = problem(1)
    step = jaxcoded.coded_value_and_grad(loss, group, **options)
    for call in (step, jax.jit(step)):
        with pytest.raises(error, match=message):
            call(params, batch)


@once
@pytest.mark.parametrize("axes", [1, 2])
def test_losses_of_a_wrong_shape(group, axes):
    batch = group.batch(problem(6)[1])
    length = len(batch.indices)
    shape = {1: f"{length + 1},", 2: f"{length}, 1"}[axes]
    wrong = {1: lambda x: jnp.append(x, 0), 2: lambda x: x[:, None]}[axes]
    raises(
        rf"shape \({length},\), or their mean, shape \(\), got \({shape}\)",
        lambda params, batch: wrong(loss(params, batch)),
        group,
        batch,
    )


@once
def test_losses_that_are_integers(group):
    _, batch = problem(6)
    part = group.batch(6)
    counted = lambda params, batch: jnp.round(loss(params, batch)).astype("int32")
    with pytest.raises(TypeError, match="losses must be in floating point, got int32"):
        jaxcoded.coded_value_and_grad(counted, group, mean=False)(
            problem(1)[0], part.of(share(batch, part.indices))
        )


@once
@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.tanh, "a function|a PjitFunction|a jit"),
        (3, "has dtype int64"),
        (np.arange(2), "has dtype int64"),
        (True, "has dtype bool"),
        ("relu", "a str"),
        (jax.random.key(0), "has dtype key<fry>"),
    ],
    ids=["function", "number", "integers", "bool", "text", "key"],
)
def test_parameters_without_a_gradient(group, leaf, text):
    _, batch = problem(6)
    part = group.batch(6)
    model = {"w": np.ones(5), "b": 0.5, "layers": [{"odd": leaf}]}
    message = (
        rf"params\['layers'\]\[0\]\['odd'\] (is )?({text}).*, which has no gradient: "
        "partition the model"
    )
    with pytest.raises(TypeError, match=message):
        jaxcoded.coded_value_and_grad(loss, group, mean=False)(
            model, part.of(share(batch, part.indices))
        )


@once
def test_a_partitioned_model(group):
    """The loss combines the parameters with the leaves that have no derivative."""
    params, batch = problem(6)
    part = group.batch(6)
    rest = {"power": 2, "outer": jnp.negative}

    def partitioned(params, batch):
        model = params | rest
        return model["outer"](loss(params, batch)) * model["power"] / -2

    step = jax.jit(jaxcoded.coded_value_and_grad(partitioned, group, mean=False))
    actual = step(params, part.of(share(batch, part.indices)))
    assert_equal(actual, by_hand(params, batch))


@once
@pytest.mark.parametrize("has_aux", [False, True])
def test_auxiliary_data_that_has_aux_does_not_fit(group, has_aux):
    _, batch = problem(6)
    part = group.batch(6)

    def other(params, batch):
        losses = loss(params, batch)
        return losses if has_aux else (losses, {"aux": 1})

    message = f"has_aux={has_aux} losses must return"
    batch = part.of(share(batch, part.indices))
    raises(message, other, group, batch, has_aux=has_aux)


@once
def test_data_of_a_wrong_length(group):
    """`of` raises the error; if the batch was changed by hand, the call raises it."""
    _, data = problem(100)
    part = group.batch(6)
    for wrong, name, shape in (
        (data, "x", r"\(100, 5\)"),
        ({"y": 1.0}, "y", r"\(\)"),
    ):
        message = rf"data\['{name}'\] has shape {shape}, but the batch has {len(part.indices)} examples"
        with pytest.raises(ValueError, match=message):
            part.of(wrong)
        raises(message, loss, group, dataclasses.replace(part, data=wrong))


@once
def test_weights_of_a_wrong_shape(group):
    batch = group.batch(problem(6)[1])
    stacked = dataclasses.replace(batch.weights, values=batch.weights[:, None])
    message = r"batch.weights must have shape \(length,\), got "
    raises(message, loss, group, dataclasses.replace(batch, weights=stacked))


@once
@slices
def test_weights_of_a_wrong_shape_with_slices(comm, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2), transport=transport
    ) as group:
        batch = group.batch(problem(6)[1])
        w, slices = batch.weights, batch.weights.shape[2]
        message = rf"shape \(chunks, length // chunks, {slices}\), got "
        for wrong in (w[..., 0], w[..., :0], w.reshape(-1)):
            weights = dataclasses.replace(w, values=wrong)
            raises(message, loss, group, dataclasses.replace(batch, weights=weights))


@pytest.mark.parametrize("wrong", ["arrays", "weights", "none", "no data"])
def test_batches_of_a_wrong_kind(group, wrong):
    """The error shows the call that makes a batch."""
    part, data = group.batch(12), problem(12)[1]
    batch = {"arrays": data, "weights": part.weights, "none": None, "no data": part}
    message = (
        r"this batch has no data.*: pass batch\.of\(load\(batch\.indices\)\)"
        if wrong == "no data"
        else r"batch must come from this group, got .*: make it with batch = group\.batch\(\(x, y\)\)"
    )
    raises(message, loss, group, batch[wrong], TypeError)


@several
@once
def test_a_batch_of_another_rank_or_plan(comm, group, transport):
    batch = group.batch(problem(12)[1])
    other = dataclasses.replace(batch.weights, rank=(comm.rank + 1) % comm.size)
    message = f"this batch belongs to rank {other.rank}, but this is rank {comm.rank}"
    raises(message, loss, group, dataclasses.replace(batch, weights=other))
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Uncoded(), transport=transport
    ) as with_root:
        batch = with_root.batch(problem(12)[1])
    raises("this batch belongs to another group's plan", loss, group, batch)


def test_weights_of_before_a_replan(comm, transport):
    """Weights fit until the replan, and not after it; weights of an equal plan still fit."""
    params, batch = problem(12)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        part = group.batch(12)
        group = group.replan(np.ones(comm.size))
        step = jaxcoded.coded_value_and_grad(loss, group, mean=False)
        assert_equal(
            step(params, part.of(share(batch, part.indices))), by_hand(params, batch)
        )
        group = group.replan(np.arange(1.0, comm.size + 1))
        if comm.size > 2:  # a single worker has the whole batch at any speed
            old = part.of(share(batch, part.indices))
            raises("plan before a replan", loss, group, old)
        part = group.batch(12)
        step = jaxcoded.coded_value_and_grad(loss, group, mean=False)
        assert_equal(
            step(params, part.of(share(batch, part.indices))), by_hand(params, batch)
        )


@once
def test_weights_with_fewer_digits(group):
    """Casting a whole tree of inputs to bfloat16 also casts its weights."""
    _, batch = problem(12)
    part = group.batch(12)
    batch = part.of(share(batch, part.indices))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), batch)
    raises("converted to bfloat16", loss, group, narrow)


@once
def test_weights_compute_like_an_array(group):
    """Weights work in NumPy and JAX, directly and as arguments, moved and donated."""
    part = group.batch(6)
    array = np.asarray(part.weights)
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
            np.testing.assert_allclose(use(part.weights, x), expected)
            np.testing.assert_allclose(jax.jit(use)(part.weights, x), expected)
    assert np.multiply(part.weights, 2.0).tolist() == (2 * array).tolist()
    moved = jax.device_put(part.weights)
    assert isinstance(moved, jaxcoded.Weights)
    assert moved.batch_size == 6
    donated = jax.jit(lambda w: jax.tree.map(jnp.copy, w), donate_argnums=0)(moved)
    donated.check(group.plan, group.rank)
    assert donated.tolist() == array.tolist()


@once
def test_a_function_made_in_each_step_compiles_once(group):
    """A function made in each step from the same losses compiles once."""

    def losses(w, x):
        return (x - w) ** 2

    batch = group.batch(np.arange(20.0))
    for step in range(4):
        value_and_grad = jaxcoded.coded_value_and_grad(losses, group)
        with lowered() as programs:
            _, grad = value_and_grad(float(step), batch)
        np.testing.assert_allclose(grad, 2 * (step - 9.5), rtol=1e-6)
        assert (programs == []) == (step > 0), step


@several
@once
def test_a_mean_on_one_rank_alone(group, comm):
    batch = group.batch(np.arange(20.0))
    value_and_grad = jaxcoded.coded_value_and_grad(
        lambda w, x: (x - w) ** 2, group, mean=comm.rank == 0
    )
    with pytest.raises(JaxRuntimeError, match="as a mean at"):
        finish(value_and_grad(1.0, batch))


@once
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda f, w, b: f(b, w), r"in the order \(params, batch\)"),
        (
            lambda f, w, b: f(w, dataclasses.replace(b, weights=b.weights * 2)),
            "multiply their losses",
        ),
    ],
)
def test_arguments_in_another_place(comm, transport, call, words):
    group = jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport)
    f = jaxcoded.coded_value_and_grad(lambda w, x: (x - w) ** 2, group)
    with pytest.raises(TypeError, match=words):
        call(f, 1.0, group.batch(np.arange(20.0)))
    group.close()


@once
@pytest.mark.parametrize(
    ("losses", "options", "words"),
    [
        (lambda w, x: None, {}, "losses returned None"),
        (lambda w, x: {"l": x - w}, {}, "losses returned a dict: return one array"),
        (lambda w, x: (x - w, {"k": "x"}), {"has_aux": True}, r"aux\['k'\] is a str"),
        (lambda w, x: x - w, {"mean": "x"}, "mean must be True or False, got 'x'"),
        (lambda w, x: x - w, {"has_aux": 1}, "has_aux must be True or False, got 1"),
    ],
)
def test_losses_of_another_kind(comm, transport, losses, options, words):
    with (
        jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group,
        pytest.raises(TypeError, match=words),
    ):
        f = jaxcoded.coded_value_and_grad(losses, group, **options)
        f(1.0, group.batch(np.arange(20.0)))
