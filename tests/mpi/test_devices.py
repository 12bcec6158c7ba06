"""Ranks with several devices: a collective runs on any one of them, or, inside `shard_map`, on all.

`tests/test_mpirun.py` gives the ranks of one job two devices each, and the ranks of
another job four.
"""

import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from cases import more
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from marks import SIZE, engine_only, redundant, several
from mpi4py import MPI
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from together import finish, one_late, wait_for_all
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import tree_bcast
from jaxcoded.transport import engine_call

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 2, reason="one device"),
    pytest.mark.ranks(2, 4, exhaustive=(7,)),
    pytest.mark.devices(4),
]

VECTOR = per_example(8)
SPLIT, SAME = PartitionSpec("x"), PartitionSpec()
four = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than four devices")


@pytest.fixture(scope="module")
def own(group):
    return np.asarray(contribution(group, VECTOR))


def on(devices):
    return Mesh(np.array(devices), ("x",))


def mapped(f, devices):
    specs = {"in_specs": SPLIT, "out_specs": SPLIT, "check_vma": False}
    return jax.jit(jax.shard_map(f, mesh=on(devices), **specs))


def pmapped(f, devices):
    return lambda x: jax.pmap(f, devices=devices)(x.reshape(len(devices), -1))


def started(x, group, **order):
    out = uncounted.coded_allreduce_start(x, group, **order)
    handle, order = (out.value, {"token": out.token}) if order else (out, {})
    return jaxcoded.coded_allreduce_done(handle, **order)


def gradient(x, group, **order):
    """Return the gradient for a batch that lies on all devices."""
    part = group.batch(BATCH)
    step = jaxcoded.coded_value_and_grad(
        lambda w, i: i * w.sum() * x.sum(), group, mean=False
    )
    return jax.tree.leaves(step(jnp.ones(3), part.of(part.indices * 1.0), **order))


def uncoded(x, group, **order):
    assert not order
    return jaxcoded.baselines.allreduce(x, group.comm)


@pytest.mark.devices(exhaustive=(4,))
@pytest.mark.parametrize("form", ["effect", "token"])
@pytest.mark.parametrize("program", ["jit", "eager", "shard_map", "pmap"])
def test_several_devices_are_refused(group, own, program, form):
    """The error comes before anything is sent, and names what works."""
    devices = jax.devices()
    order = {"token": jnp.int32(0)} if form == "token" else {}
    calls = [coded_allreduce, coded_reduce, tree_bcast, started]
    if program != "eager":  # eagerly, a gradient is many programs
        calls.append(gradient)
    if form == "effect":
        calls.append(uncoded)
    if group._session.transport.can_lag and program != "eager":
        calls.append(lambda x, group, **order: group.lag(**order))
    spread = jax.device_put(own, NamedSharding(on(devices), SPLIT))
    before = group.rounds
    for call in calls:

        def f(x, call=call):
            return jax.tree.map(lambda leaf: leaf.sum() + x, call(x, group, **order))

        run, x = {
            "jit": (jax.jit(f), spread),
            "eager": (f, spread),
            "shard_map": (mapped(f, devices), spread),
            "pmap": (pmapped(f, devices), own),
        }[program]
        with pytest.raises(ValueError, match="runs on one device of its proc") as error:
            run(x)
        assert "reduce(jax.device_put(local, jax.local_devices()[0])" in str(
            error.value
        )
        assert "jaxcoded.host.allreduce(np.asarray(local)" in str(error.value)
    assert group.rounds == before
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@pytest.mark.devices(exhaustive=(4,))
@pytest.mark.parametrize("form", ["effect", "token"])
def test_any_one_device(comm, group, own, form):
    """Rounds on any one device follow the order of the program."""

    def total(x):
        if form == "effect":
            return coded_allreduce(x, group)
        return coded_allreduce(x, group, token=jnp.int32(0))[0]

    for device in reversed(jax.devices()):
        x = jax.device_put(own, device)
        programs = total, jax.jit(total), mapped(total, [device]), pmapped(total, [device])  # fmt: skip
        for program in programs:
            out = finish(program(x))
            assert out.devices() == {device}
            assert_sum(group, out.reshape(-1), VECTOR)
            assert_same_bits(comm, out)


def test_value_and_grad_on_another_device(group):
    x = per_example(3, seed=1)
    part = group.batch(BATCH)
    step = jax.jit(jaxcoded.coded_value_and_grad(lambda w, x: x @ w, group, mean=False))
    device = jax.devices()[1]
    loss, grad = finish(
        step(jax.device_put(np.ones(3), device), part.of(x[part.indices]))
    )
    assert grad.devices() == {device}
    np.testing.assert_allclose(loss, x.sum(), rtol=1e-9)
    np.testing.assert_allclose(grad, x.sum(0), rtol=1e-9)


def halved(own):
    """Return a contribution that is computed on all devices."""
    spread = jax.device_put(own, NamedSharding(on(jax.devices()), SPLIT))
    return mapped(lambda x: 2 * x, jax.devices())(spread / 2)


def test_a_collective_in_a_separate_jit(group, own):
    local = halved(own)
    assert len(local.devices()) == jax.device_count()
    reduce = jax.jit(lambda x: uncounted.coded_allreduce(x, group))
    total = reduce(jax.device_put(local, jax.local_devices()[0]))
    assert_sum(group, total, VECTOR)


@engine_only
def test_a_collective_on_the_host(group, own):
    total = uncounted.allreduce(np.asarray(halved(own)), group)
    assert_sum(group, total, VECTOR)


# All devices of a rank together.


def together(f, in_specs, out_specs, mesh=None, **options):
    mesh = mesh or on(jax.devices())
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
    )


def total(group, **options):
    """Sum a split and a replicated array, in the order of a token."""

    def f(x, token):
        out = coded_allreduce(x, group, token=token, **options)
        return out.value, out.residual, out.token

    return f


def assert_same_copies(x):
    """Check that replicated arrays have the same bits on all devices."""
    first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
    assert others and all(other.tobytes() == first.tobytes() for other in others)


TREE = {
    "split": per_example(8, 3, seed=1),
    "same": [per_example(5, seed=2), per_example(seed=3)],
    "half": per_example(16, seed=4, dtype="float32"),
    "many": [per_example(4, seed=5 + i) for i in range(40)],
}
SPECS = {"split": SPLIT, "same": SAME, "half": SPLIT, "many": SPLIT}


@engine_only
@pytest.mark.parametrize("program", ["jit", more("eager")])
def test_shards_and_copies(comm, group, program):
    """Each device has its shards of the sum, and replicated arrays have the same bits."""
    own = contribution(group, TREE)
    f = together(total(group, residual=True), (SPECS, SAME), (SPECS, SAME, SAME))
    before = group.rounds
    out, residual, token = finish(
        (jax.jit(f) if program == "jit" else f)(own, jnp.int32(7))
    )
    assert group.rounds == before + 1
    assert_sum(group, out, TREE)
    assert residual < 1e-12 and token == 7
    assert_same_bits(comm, out)
    jax.tree.map(assert_same_copies, [out["same"], residual, token])
    assert out["split"].sharding.spec[0] == "x"


@engine_only
def test_other_collectives(comm, group):
    own = contribution(group, TREE)

    def f(x, token):
        told, token = jaxcoded.tree_bcast(
            {"x": x, "rank": token * 0 + comm.rank}, group, token=token
        )[::2]
        reduced, token = coded_reduce(x, group, token=token)[::2]
        halved, token = coded_allreduce(
            x, group, divisor=2, wire_dtype="bfloat16", token=token
        )[::2]
        lag, _, token = group.lag(token=token)
        return told["x"], told["rank"], reduced, halved, lag

    run = jax.jit(together(f, (SPECS, SAME), (SPECS, SAME, SPECS, SPECS, SAME)))
    received, rank, reduced, halved, lag = finish(run(own, jnp.int32(0)))
    assert_same_bits(comm, (received, halved))
    assert rank == 0 and lag >= 0
    if comm.rank == 0:
        assert_same_bits(comm.Split(0), [np.asarray(x) for x in jax.tree.leaves(own)])
        assert_sum(group, reduced, TREE)
        jax.tree.map(np.testing.assert_array_equal, received, own)
    else:
        comm.Split(1)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(reduced))
    assert_sum(group, halved["split"], TREE["split"], 0.5)


@four
@engine_only
def test_two_axes(comm, group):
    """An array split over one axis is replicated along the other."""
    mesh = Mesh(np.array(jax.devices()[:4][::-1]).reshape(2, 2), ("x", "y"))
    tree = {
        name: per_example(8, 4, seed=i)
        for i, name in enumerate(["x", "y", "xy", "none"])
    }
    specs = {
        "x": PartitionSpec("x"),
        "y": PartitionSpec(None, "y"),
        "xy": PartitionSpec("y", "x"),
        "none": SAME,
    }
    f = together(total(group), (specs, SAME), (specs, SAME, SAME), mesh)
    out, _, _ = finish(jax.jit(f)(contribution(group, tree), jnp.int32(0)))
    assert_sum(group, out, tree)
    assert_same_bits(comm, out)
    assert_same_copies(out["none"])


class Model:
    """A linear model with a hidden layer, and its training in one process in float64."""

    x = per_example(8, seed=11)
    params = {  # noqa: RUF012
        "w": np.random.default_rng(12).standard_normal((8, 4)),
        "v": np.random.default_rng(13).standard_normal(4),
    }
    rate = 0.05

    @staticmethod
    def losses(params, x):
        return (jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2

    @classmethod
    def trained(cls, steps):
        def mean(params):
            return cls.losses(params, jnp.asarray(cls.x)).mean()

        params, losses = cls.params, []
        for _ in range(steps):
            loss, grads = jax.value_and_grad(mean)(params)
            params = jax.tree.map(lambda p, g: p - cls.rate * g, params, grads)
            losses.append(float(loss))
        return params, losses


def hsdp_losses(shards, x):
    """Return the losses; parameters and batch are split over the devices."""
    w = jax.lax.all_gather(shards["w"], "x", tiled=True)
    return Model.losses({"w": w, "v": shards["v"]}, x)


LAYOUTS = {
    "hsdp": (hsdp_losses, {"w": SPLIT, "v": SAME}, SPLIT),
    "batch": (Model.losses, SAME, SPLIT),
    "copies": (Model.losses, SAME, SAME),
}


def train_step(group, layout, **options):
    """(params, batch, token) -> (params, loss, token)"""
    losses, params, spec = LAYOUTS[layout]
    step = jaxcoded.coded_value_and_grad(losses, group, **options)

    def f(p, batch, token):
        out = step(p, batch, token=token)
        loss, grads = out.value
        p = jax.tree.map(lambda p, g: p - Model.rate * g, p, grads)
        return p, loss, out.token

    specs = (params, split(read(group), spec), SAME)
    return jax.jit(together(f, specs, (params, SAME, SAME)), donate_argnums=0)


def placed(layout):
    """Return the parameters in a layout on the devices."""
    specs = LAYOUTS[layout][1]
    specs = specs if isinstance(specs, dict) else dict.fromkeys(Model.params, specs)
    mesh = on(jax.devices())
    return {
        name: jax.device_put(jnp.array(value), NamedSharding(mesh, specs[name]))
        for name, value in Model.params.items()
    }


def read(group):
    batch = group.batch(Model.x, multiple=jax.device_count())
    assert len(batch.indices) % jax.device_count() == 0
    return batch


def split(batch, spec=SPLIT):
    """Return the specs: arrays are split along the axis of examples, and numbers are
    replicated.
    """
    return jax.tree.map(lambda leaf: spec if np.ndim(leaf) else SAME, batch)


@pytest.mark.devices(2, 4)
@engine_only
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training(comm, group, layout):
    """Training matches training in one process, with the same bits on all ranks and devices."""
    params, token = placed(layout), jnp.int32(0)
    step, batch = train_step(group, layout), read(group)
    losses = []
    for _ in range(5):
        params, loss, token = step(params, batch, token)
        losses.append(loss)
    expected, expected_losses = Model.trained(5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        *(finish(params), expected),
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    assert_same_bits(comm, (params, losses))
    assert_same_copies(params["v"])


@pytest.mark.ranks(4, exhaustive=(2, 7))
@engine_only
def test_in_a_scan(comm, group):
    losses, params, _ = LAYOUTS["hsdp"]
    step = jaxcoded.coded_value_and_grad(losses, group, residual=True)
    batch = read(group)

    def f(p, batch, token):
        def body(carry, _):
            p, token = carry
            out = step(p, batch, token=token)
            loss, grads = out.value
            p = jax.tree.map(lambda p, g: p - Model.rate * g, p, grads)
            return (p, out.token), (loss, out.residual)

        return jax.lax.scan(body, (p, token), length=4)

    specs = (params, split(batch), SAME)
    run = jax.jit(together(f, specs, ((params, SAME), (SAME, SAME))))
    (p, _), (values, residuals) = finish(run(placed("hsdp"), batch, jnp.int32(0)))
    expected, expected_losses = Model.trained(4)
    np.testing.assert_allclose(p["w"], expected["w"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(values, expected_losses, rtol=1e-9)
    assert residuals.max() < 1e-12
    assert_same_bits(comm, p)


@pytest.mark.ranks(4, exhaustive=(2, 7))
@engine_only
def test_batches_of_an_epoch(comm, group):
    """A smaller last batch works, too."""
    epoch = group.epoch(Model.x, 12, seed=0, multiple=jax.device_count())
    step = jaxcoded.coded_value_and_grad(Model.losses, group)

    def f(batch, token):
        out = step(Model.params, batch, token=token)
        return out.value[0], out.token

    run, token = (
        jax.jit(together(f, (split(epoch[0]), SAME), (SAME, SAME))),
        jnp.int32(0),
    )
    for number, batch in enumerate(epoch):
        value, token = run(batch, token)
        expected = Model.losses(Model.params, Model.x[epoch.indices(number)]).mean()
        np.testing.assert_allclose(value, expected, rtol=1e-9)
    assert number == 1


@pytest.mark.ranks(4, exhaustive=(2, 7))
@engine_only
@pytest.mark.parametrize("late", [None, pytest.param(SIZE - 1, marks=redundant)])
def test_sums_of_what_the_compiler_has_laid_out(comm, group, late):
    """Sum, in the same jit, the gradient of a batch that is split by the arrays'
    sharding.
    """
    part = group.batch(BATCH, multiple=jax.device_count())
    spread = NamedSharding(on(jax.devices()), SPLIT)
    lag = together(lambda token: group.lag(token=token)[::2], (SAME,), (SAME, SAME))

    def summed(x, skip, token):
        return coded_allreduce(x, group, skip=skip, token=token)[::2]

    specs = {
        "w": SPLIT,
        "v": SAME,
    }  # a layout different from the gradient's
    reduce = together(summed, (specs, SAME, SAME), (specs, SAME))

    @jax.jit
    def gradient(x, weights, token):
        behind, token = lag(token)
        grads = jax.grad(lambda p: (weights @ Model.losses(p, x)).sum())(Model.params)
        return *reduce(grads, behind > 0, token), behind

    x = jax.device_put(Model.x[part.indices], spread)
    values = jax.device_put(part.weights.values, spread)

    def step():
        return gradient(x, values, jnp.int32(0))

    finish(step())
    if late is None:
        grads, _, behind = finish(step())
    else:
        grads, _, behind = one_late(comm, group, late, 1, step)
        assert behind == 1 or comm.rank != late
    expected = jax.grad(lambda p: Model.losses(p, Model.x).sum())(Model.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        *(grads, expected),
    )
    assert_same_bits(comm, grads)
    assert_same_copies(grads["v"])


@pytest.mark.devices(2, 4)
@redundant
@engine_only
@pytest.mark.parametrize("layout", ["hsdp", "batch"])
def test_a_late_rank_catches_up(comm, group, layout):
    """The late rank skips its gradients on all of its devices, and ends with the same
    bits.
    """
    step, batch = train_step(group, layout), read(group)
    step.lower(placed(layout), batch, jnp.int32(0)).compile()

    def steps():
        params, token = placed(layout), jnp.int32(0)
        for _ in range(4):
            params, _, token = step(params, batch, token)
        return params

    params = one_late(comm, group, SIZE - 1, 4, steps)
    expected, _ = Model.trained(4)
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-9, atol=1e-12)
    assert_same_bits(comm, params)
    assert_same_copies(params["v"])


@redundant
@engine_only
def test_mistakes_are_looked_for(comm, transport):
    """A shard that does not match the other ranks' shards raises an error on all ranks."""
    debug = jaxcoded.Options(check=jaxcoded.DEBUG)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(), transport=transport, options=debug
    ) as group:
        step, batch = train_step(group, "hsdp"), read(group)
        params, _, token = step(placed("hsdp"), batch, jnp.int32(0))
        np.testing.assert_allclose(finish(params)["w"], Model.trained(1)[0]["w"])
        wrong = batch
        if comm.rank == SIZE - 1:
            wrong = batch.of(1.5 * batch.data)
        with pytest.raises(JaxRuntimeError, match=rf"InconsistentMessages.*{SIZE - 1}"):
            finish(step(params, wrong, token))
        jaxcoded.effects_barrier()


@pytest.mark.ranks(4, exhaustive=(2, 7))
@pytest.mark.devices(2, 4)
@engine_only
@pytest.mark.parametrize("late", [None, pytest.param(SIZE - 1, marks=redundant)])
def test_started_rounds(comm, group, late):
    own = contribution(group, TREE)
    specs = (SPECS, SAME)

    def f(x, token):
        handle, _, token = uncounted.coded_allreduce_start(
            x, group, bucket_bytes=400, residual=True, token=token
        )
        other, _, token = uncounted.coded_allreduce_start(x["same"], group, token=token)
        work = jnp.sin(x["split"])
        out = jaxcoded.coded_allreduce_done(handle, after=work, token=token)
        same = jaxcoded.coded_allreduce_done(other, token=out.token)
        return out.value, out.residual, same.value

    run = jax.jit(together(f, specs, (SPECS, SAME, SAME)))

    def rounds():
        return run(own, jnp.int32(0))

    before = group.rounds
    out, residual, same = finish(rounds())
    number = group.rounds - before
    assert number > 2
    if late is not None:
        out, residual, same = one_late(comm, group, late, number, rounds)
    assert_sum(group, (out, same), (TREE, TREE["same"]))
    # the residual is rounded to float32 if a bucket has no wider numbers
    assert residual < 1e-6
    assert_same_bits(comm, (out, same))
    jax.tree.map(assert_same_copies, (out["same"], same))


@pytest.mark.ranks(4, exhaustive=(2, 7))
@engine_only
def test_together_with_collectives_among_the_devices(comm, group):
    """Independent sums end, in whichever order XLA begins them."""
    number = jax.device_count()
    around = [(i, (i + 1) % number) for i in range(number)]

    def f(x, y, token):
        out = []
        for _ in range(3):
            out.append(coded_allreduce(x, group, token=token))
            token = out[-1].token
            y = [jax.lax.ppermute(jax.lax.psum(z, "x") + z, "x", around) for z in y]
        return [each.value for each in out], y, token

    run = jax.jit(together(f, (SPLIT, SPLIT, SAME), (SPLIT, SPLIT, SAME)))
    own, y = contribution(group, VECTOR), [np.ones((2 * number, 50))] * 6
    token = jnp.int32(0)
    for _ in range(5):
        out, sums, token = run(own, y, token)
    for each in finish(out):
        assert_sum(group, each, VECTOR)
    for each in sums:
        np.testing.assert_array_equal(each, (number + 1) ** 3)


@engine_only
def test_a_handle_leaves_shard_map(comm, group):
    own = contribution(group, VECTOR)
    start = together(
        lambda x, token: uncounted.coded_allreduce_start(x, group, token=token)[::2],
        *((SPLIT, SAME), SAME),
    )
    done = together(
        lambda handle, token: jaxcoded.coded_allreduce_done(handle, token=token).value,
        *((SAME, SAME), SPLIT),
    )
    handle, token = jax.jit(start)(own, jnp.int32(0))
    assert_sum(group, finish(jax.jit(done)(handle, token)), VECTOR)


@engine_only
def test_what_is_refused(group, own):
    """The error comes at trace time, and says what helps."""

    def refused(match, f, in_specs=(SPLIT, SAME), out_specs=SPLIT, **options):
        before = group.rounds
        with pytest.raises(ValueError, match=match):
            jax.jit(together(f, in_specs, out_specs, **options))(own, jnp.int32(0))
        assert group.rounds == before

    def summed(x, token):
        return coded_allreduce(x, group, token=token).value

    refused("order the calls by a token", lambda x, token: coded_allreduce(x, group))
    refused("without check_vma=False", summed, check_vma=False)
    refused(
        "skip must be equal on all devices",
        lambda x, token: coded_allreduce(x, group, skip=x[0] > 0, token=token).value,
    )

    def lopsided(x, token):
        losses = jaxcoded.coded_value_and_grad(lambda w, i: w * i * x.sum(), group)
        return losses(1.0, group.batch(np.ones(3)), token=token).value[0] * x

    refused("differ along the axes", lopsided)
    if len(jax.devices()) == 4:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        refused(
            "leaves the axes y to the compiler", summed, mesh=mesh, axis_names={"x"}
        )
    if SIZE > 3:
        with jaxcoded.CodedGroup(
            group.comm, jaxcoded.Coded(slices=2), transport="engine"
        ) as other:
            refused(
                "with one part and slices=1",
                lambda x, token: coded_allreduce(x, other, token=token).value,
            )
            with pytest.raises(ValueError, match="multiple=3 cannot be given"):
                other.batch(BATCH, multiple=3)
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@several
@engine_only
def test_other_devices_on_other_ranks(comm, group, own):
    """Every rank gets an error, and then all continue."""
    name = "x" if comm.rank else "z"
    spec = PartitionSpec(name)
    f = together(
        lambda x, token: coded_allreduce(x, group, token=token).value,
        *((spec, SAME), spec),
        Mesh(np.array(jax.devices()), (name,)),
    )
    wait_for_all(comm)
    with pytest.raises(JaxRuntimeError, match=r"GroupMismatch.*devices \[[xz]="):
        for _ in range(2):  # the error comes in this round or the next one
            finish(jax.jit(f)(own, jnp.int32(0)))
    jaxcoded.effects_barrier()
    wait_for_all(comm)
    assert_sum(group, settled(group, own), VECTOR)


def settled(group, own):
    """Return the sum, once errors of an earlier round have been raised."""
    f = together(total(group), (SPLIT, SAME), (SPLIT, SAME, SAME))
    for _ in range(3):
        try:
            return finish(jax.jit(f)(own, jnp.int32(0)))[0]
        except JaxRuntimeError as error:
            assert "GroupMismatch" in str(error)
    return None


@engine_only
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x, group, token: x, "devices of this process have not called"),
        (
            lambda x, group, token: coded_reduce(x, group, token=token).value,
            "the devices of this process called different things",
        ),
    ],
)
def test_devices_that_call_different_things(
    comm, group, own, monkeypatch, other, words
):
    """The devices fail, or give up the device that calls nothing, and the other ranks get an error."""
    monkeypatch.setattr(engine_call, "PATIENCE", 2.0)

    def f(x, token):
        return jax.lax.cond(
            jax.lax.axis_index("x") == 0,
            lambda x: coded_allreduce(x, group, token=token).value,
            lambda x: other(x, group, token),
            x,
        )

    run = jax.jit(together(f, (SPLIT, SAME), SPLIT))
    with pytest.raises(JaxRuntimeError, match=words):
        finish(run(own, jnp.int32(0)))
    jaxcoded.effects_barrier()
    wait_for_all(comm)
    assert_sum(group, settled(group, own), VECTOR)


def test_time_in_which_the_process_is_stopped_is_no_patience(comm, monkeypatch):
    """A device computes while its process is stopped for longer than the other devices
    wait."""
    monkeypatch.setattr(engine_call, "PATIENCE", 6.0)

    def compute(device):
        if device == 1:
            wake = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 8; kill -CONT {os.getpid()}"
            subprocess.run(["sh", "-c", wake], check=True)
        return np.float32(0)

    with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Uncoded()) as group:

        def f(x, token):
            device = jax.lax.axis_index("x")
            zero = jax.pure_callback(
                compute, jax.ShapeDtypeStruct((), np.float32), device
            )
            return tree_bcast(x + zero, group, token=token).value

        run = jax.jit(together(f, (SPLIT, SAME), SPLIT))
        x = np.arange(2 * jax.device_count(), dtype=np.float32)
        np.testing.assert_array_equal(finish(run(x, jnp.int32(0))), x)
    wait_for_all(comm)
