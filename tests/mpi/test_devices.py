"""Ranks with several devices: a collective runs on any one of them, and on no more than one.

`tests/test_mpirun.py` gives the ranks of one job two devices each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from marks import engine_only
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from together import finish

import jaxcoded
from jaxcoded import coded_allreduce, coded_reduce, tree_bcast

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="one device")

VECTOR = per_example(6)
SPLIT = PartitionSpec("x")


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
    out = jaxcoded.coded_allreduce_start(x, group, **order)
    handle, *token = out if order else (out,)
    return jaxcoded.coded_allreduce_done(handle, **dict(zip(order, token)))


def gradient(x, group, **order):
    """Of a batch that lies on all devices."""
    indices, weights = group.assignment(BATCH)
    step = jaxcoded.coded_value_and_grad(lambda w, i: i * w.sum() * x.sum(), group)
    return jax.tree.leaves(step(jnp.ones(3), indices * 1.0, weights, **order))


def uncoded(x, group, **order):
    assert not order
    return jaxcoded.baselines.allreduce(x, group.comm)


@pytest.mark.parametrize("form", ["effect", "token"])
@pytest.mark.parametrize("program", ["jit", "eager", "shard_map", "pmap"])
def test_several_devices_are_refused(group, own, program, form):
    """Before anything is sent, with what works in the message."""
    devices = jax.devices()
    order = {"token": jnp.int32(0)} if form == "token" else {}
    calls = [coded_allreduce, coded_reduce, tree_bcast, started]
    if program != "eager":  # in which a gradient is many programs
        calls.append(gradient)
    if form == "effect":
        calls.append(uncoded)
    if group.transport.can_lag and program != "eager":
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
        assert "jaxcoded.host.coded_allreduce(np.asarray(local)" in str(error.value)
    assert group.rounds == before
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@pytest.mark.parametrize("form", ["effect", "token"])
def test_any_one_device(comm, group, own, form):
    """One after the other in the order of the program."""

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
    indices, weights = group.assignment(BATCH)
    step = jax.jit(jaxcoded.coded_value_and_grad(lambda w, x: x @ w, group))
    device = jax.devices()[1]
    loss, grad = finish(step(jax.device_put(np.ones(3), device), x[indices], weights))
    assert grad.devices() == {device}
    np.testing.assert_allclose(loss, x.sum(), rtol=1e-9)
    np.testing.assert_allclose(grad, x.sum(0), rtol=1e-9)


def halved(own):
    """A contribution that is computed on both devices."""
    spread = jax.device_put(own, NamedSharding(on(jax.devices()), SPLIT))
    return mapped(lambda x: 2 * x, jax.devices())(spread / 2)


def test_a_collective_in_a_jit_of_its_own(group, own):
    local = halved(own)
    assert len(local.devices()) == 2
    reduce = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group))
    total = reduce(jax.device_put(local, jax.local_devices()[0]))
    assert_sum(group, total, VECTOR)


@engine_only
def test_a_collective_on_the_host(group, own):
    total = jaxcoded.host.coded_allreduce(np.asarray(halved(own)), group)
    assert_sum(group, total, VECTOR)
