"""Float32 arrays sent in 16 bits: which values are rounded, on both transports."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import together
import uncounted
from jax.errors import JaxRuntimeError
from marks import engine_only, mpi4jax_only, several, slices
from reference import (
    BATCH,
    assert_same_bits,
    assert_sum,
    contribution,
    exact,
    per_example,
    rounding,
)
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import kernels
from jaxcoded.transport import packing

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]

wires = pytest.mark.parametrize("wire", ["bfloat16", "float16"])

GRADIENTS = {
    "matrix": per_example(40, 30, dtype="float32"),
    "number": per_example(seed=1, dtype="float32"),
    "wide": per_example(7, seed=2),
    "half": per_example(9, seed=3, dtype="float16"),
    "brain": per_example(9, seed=4, dtype="bfloat16"),
    "empty": per_example(0, 3, dtype="float32"),
}


def assert_rounded(group, wire, actual, gradients, factor=1.0):
    """Check that the error is within the wire dtype's bound, and not smaller than
    rounding allows.
    """
    size = np.abs(gradients.astype(np.float64)).sum(0)
    error = np.abs(np.asarray(actual, np.float64) - factor * exact(gradients))
    assert actual.dtype == np.float32
    assert np.all(error <= rounding(group, wire) * size * abs(factor))
    if group.size > 1:
        assert error.max() > float(jnp.finfo(wire).eps) / 16 * abs(factor)


@wires
@pytest.mark.parametrize("mean", [None, BATCH])
def test_what_is_rounded(comm, group, wire, mean):
    factor = 1.0 if mean is None else 1 / mean
    call = jax.jit(lambda x: coded_allreduce(x, group, divisor=mean, wire_dtype=wire))
    total = call(contribution(group, GRADIENTS))
    assert_same_bits(comm, total)
    matrix = total.pop("matrix")
    assert_rounded(group, wire, matrix, GRADIENTS["matrix"], factor)
    if mean is None:  # the root also has the rounded result
        assert np.array_equal(matrix, matrix.astype(wire).astype(np.float32))
    rest = {name: g for name, g in GRADIENTS.items() if name != "matrix"}
    assert_sum(group, total, rest, factor)


@pytest.mark.parametrize(("dtype", "wire"), [("float16", None), ("float32", "float16")])
def test_the_smallest_halves(comm, group, dtype, wire):
    """Below 6·10⁻⁵ float16 has steps of 6·10⁻⁸, even on XLA's threads."""
    gradients = (1.5e-6 + 5e-7 * per_example(500)).astype(dtype)
    call = jax.jit(lambda x: coded_allreduce(x, group, wire_dtype=wire))
    total = call(contribution(group, gradients))
    assert_same_bits(comm, total)
    error = np.abs(np.asarray(total, np.float64) - exact(gradients))
    assert error.max() <= 2 * group.size * group.plan.amplification * 2.0**-25


@wires
def test_reduce(group, wire):
    own = contribution(group, GRADIENTS["matrix"])
    total = coded_reduce(own, group, wire_dtype=jnp.dtype(wire))
    if group.rank == group.plan.root:
        assert_rounded(group, wire, total, GRADIENTS["matrix"])
    else:
        assert total.dtype == np.float32 and not total.any()


@slices
@pytest.mark.filterwarnings("ignore:messages in bfloat16 with the plan's amplification")
@pytest.mark.parametrize("wire", ["bfloat16"])
@pytest.mark.parametrize(
    "code",
    [{"slices": 2}, {"code": "progressive"}, {"code": "adaptive", "stragglers": 1}],
)
def test_encoded_messages_are_rounded_once(comm, transport, wire, code):
    fanout = 3 if comm.size == 13 else None
    tree = {name: GRADIENTS[name] for name in ("matrix", "number", "wide")}
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=fanout, **code), transport=transport
    ) as group:
        part = group.batch(BATCH)
        parts = group.plan.parts_above[group.rank]
        message = kernels.encode(
            jax.tree.map(lambda leaf: leaf[part.indices], tree),
            part.weights.reshape(len(part.indices), parts, -1).transpose(1, 0, 2),
            multiple=group.plan.padding_multiple,
            wire_dtype=wire,
        )
        assert {v.dtype.name for v in message.vectors} == {"float32", "float64"}
        total = coded_allreduce(message, group, wire_dtype=wire)
        assert_rounded(group, wire, total.pop("matrix"), tree.pop("matrix"))
        assert_sum(group, total, tree)
        other = {"bfloat16": "float16", "float16": "bfloat16"}[wire]
        with pytest.raises(ValueError, match=f"encoded with wire_dtype={wire}, not"):
            coded_allreduce(message, group, wire_dtype=other)


EXAMPLES = 24
X = np.random.default_rng(0).normal(size=(EXAMPLES, 50)).astype(np.float32)


def loss(params, x):
    return jnp.sum((params["w"] - x) ** 2, -1) / 2 + (params["b"] - x[:, 0]) ** 2 / 2


@slices
@pytest.mark.parametrize("code", ["auto", "auto, slices", "progressive"])
def test_value_and_grad(comm, transport, code):
    """Loss, count, numbers and the residual's probe keep their digits; arrays are
    rounded within the bound.
    """
    code, *more = code.split(", ")
    wire, fanout = "bfloat16", 3 if comm.size == 13 else None
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(code=code, slices=1 + len(more), fanout=fanout),
        transport=transport,
    ) as group:
        part = group.batch(EXAMPLES)
        step = jaxcoded.coded_value_and_grad(
            loss, group, residual=True, wire_dtype=wire
        )
        params = {"w": jnp.zeros(50, jnp.float32), "b": jnp.float32(0)}
        (total, grads), residual, _ = jax.jit(step)(params, part.of(X[part.indices]))
        amplification, bound = group.plan.amplification, rounding(group, wire)
    terms = {"w": -X.astype(np.float64), "b": -X[:, 0].astype(np.float64)}
    losses = (terms["w"] ** 2).sum(1) / 2 + terms["b"] ** 2 / 2
    fine = 1e-6 * amplification * EXAMPLES
    np.testing.assert_allclose(total, losses.mean(), rtol=fine)
    np.testing.assert_allclose(grads["b"], terms["b"].mean(), atol=fine)
    assert residual < 2e-4
    assert grads["w"].dtype == np.float32
    error = np.abs(grads["w"] - terms["w"].mean(0))
    assert 1e-4 < error.max()
    assert np.all(error <= bound * np.abs(terms["w"]).mean(0) + 1e-6)


def test_transformations(group):
    """A batch axis takes one round; the transpose passes cotangents unchanged."""
    gradients, wire = GRADIENTS["matrix"][:, :3], "bfloat16"
    own = jnp.asarray(contribution(group, gradients))
    call = lambda x: coded_allreduce(x, group, wire_dtype=wire, transposes=True)
    before = group.rounds
    assert_rounded(group, wire, jax.jit(jax.vmap(call))(own), gradients)
    assert group.rounds == before + 1
    # batched numbers are still numbers
    rows = jax.vmap(call)(own[:, 0])
    assert_sum(group, rows, gradients[:, :, 0])
    _, back = jax.vjp(call, own)
    cotangent = jnp.float32(1 / 3) * own
    np.testing.assert_array_equal(back(cotangent)[0], cotangent)
    _, tangent = jax.jvp(call, (own,), (2 * own,))
    assert_rounded(group, wire, tangent, gradients, 2)
    jax.effects_barrier()


def test_optax(group):
    wire = "bfloat16"
    tx = jaxcoded.optax.sum_gradients(group, divisor=BATCH, wire_dtype=wire)
    own = contribution(group, GRADIENTS["matrix"])
    tx = optax.chain(tx, optax.scale(-1.0))
    weights = group.batch(BATCH).weights
    total, _ = tx.update(own, tx.init(own), own, weights=weights)
    assert_rounded(group, wire, total, GRADIENTS["matrix"], -1 / BATCH)


@wires
@engine_only
def test_numpy(comm, group, wire):
    """Some ranks use a compiled function and some do not; in place or not."""
    gradients = GRADIENTS["matrix"]
    own = contribution(group, gradients)
    kept = own.copy()
    on_host = lambda **out: uncounted.allreduce(own, group, wire_dtype=wire, **out)
    if group.rank % 2:
        total = coded_allreduce(own, group, wire_dtype=wire)
    else:
        total = on_host()
        assert np.array_equal(own, kept)
    assert_rounded(group, wire, total, gradients)
    assert_same_bits(comm, total)
    out = np.empty_like(own)
    assert on_host(out=out) is out
    assert np.array_equal(own, kept)
    assert on_host(out=own) is own
    for again in (out, own):
        assert_rounded(group, wire, again, gradients)
    empty = np.zeros((0, 2), np.float32)
    assert uncounted.allreduce(empty, group, wire_dtype=wire).shape == (0, 2)


@wires
@engine_only
def test_traffic_is_halved(comm, group, wire):
    own = np.zeros(1_000_000, np.float32)
    run = jax.jit(
        lambda x, w: coded_allreduce(x, group, wire_dtype=w), static_argnums=1
    )

    def fetched(dtype):
        before = group.statistics()["fetched_bytes"]
        jax.block_until_ready(run(own, dtype))
        comm.Barrier()
        return group.statistics()["fetched_bytes"] - before

    full, half = comm.allreduce(fetched(None)), comm.allreduce(fetched(wire))
    if comm.size > 1:
        # for each edge at least one child's message and one result, or copies of them
        assert half * 2 == pytest.approx(full, rel=0.35)
        assert full >= 4_000_000 * (comm.size - 1)


@several
@wires
@engine_only
def test_in_sections(comm, transport, wire):
    """Sections give the root's bits if all messages are used."""
    gradients = {
        "rounded": per_example(30_000, dtype="float32"),
        "wide": per_example(7),
    }
    totals, formed = [], []
    for least in (1, 0):
        wanted = jaxcoded.Options(sections_from=least, piece_bytes=16 << 10)
        with jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(fanout=comm.size - 1, stragglers=0),
            transport=transport,
            options=wanted,
        ) as group:
            own = contribution(group, gradients)
            totals.append(coded_allreduce(own, group, wire_dtype=wire))
            assert_rounded(group, wire, totals[-1]["rounded"], gradients["rounded"])
            assert_same_bits(comm, totals[-1])
            statistics = group.statistics()
            formed.append(comm.allreduce(statistics["formed_bytes"]))
    jax.tree.map(np.testing.assert_array_equal, *totals)
    assert formed[1] == 0
    assert 2 * 30_000 <= formed[0] < 4 * 30_000


@engine_only
def test_token(group):
    gradients, wire = GRADIENTS["matrix"], "bfloat16"
    own = contribution(group, gradients)
    step = jax.jit(
        lambda x, token: coded_allreduce(x, group, token=token, wire_dtype=wire)
    )
    token = jnp.int32(0)
    for _ in range(3):
        total, _, token = step(own, token)
        assert_rounded(group, wire, total, gradients)


@several
@engine_only
@pytest.mark.parametrize("other", [None, "float16"])
def test_ranks_must_agree(comm, group, other):
    gradients = per_example(5, dtype="float32")
    own = contribution(group, gradients)

    def call(odd):
        wire = other if odd and comm.rank == comm.size - 1 else "bfloat16"
        return coded_allreduce(own, group, wire_dtype=wire)

    together.assert_odd_one_out(
        comm,
        [lambda: call(True), lambda: call(False), lambda: call(False)],
        comm.size - 1,
        "coded_allreduce of float32[5] as bfloat16",
        "coded_allreduce of float32[5]" + f" as {other}" * (other is not None),
        lambda total: assert_rounded(group, "bfloat16", total, gradients),
    )


@several
@mpi4jax_only
def test_ranks_must_agree_with_mpi4jax(group):
    wire = "float16" if group.rank else "bfloat16"
    with pytest.raises(JaxRuntimeError, match="GroupMismatch") as error:
        coded_allreduce(
            np.ones(5, np.float32), group, wire_dtype=wire
        ).block_until_ready()
    for each in ("bfloat16", "float16"):
        assert f"coded_allreduce of float32[5] as {each}" in str(error.value)


@engine_only
def test_float16_overflows(group):
    """Float16 overflows, as sharp-bits says; bfloat16 has the exponents of float32."""
    part = group.batch(1)
    own = np.full(3, 1e5 * part.weights.sum(), np.float32)
    # infinite or, for some sets of ranks, a difference of infinities
    assert not np.any(np.isfinite(coded_allreduce(own, group, wire_dtype="float16")))
    total = coded_allreduce(own, group, wire_dtype="bfloat16")
    np.testing.assert_allclose(total, 1e5, rtol=0.01 * group.plan.amplification)


@pytest.mark.parametrize(
    "wrong",
    [
        *("int8", "float64", "float32", ">f2"),
        "float8_e5m2",
        "nonsense",
        16,
        np.complex64,
    ],
)
def test_wrong_dtypes(group, wrong):
    message = (
        "wire_dtype must be bfloat16 or float16, or None to send arrays as they are"
    )
    x = np.ones(3, np.float32)
    tx = jaxcoded.optax.sum_gradients(group, wire_dtype=wrong)
    calls = [
        lambda: coded_allreduce(x, group, wire_dtype=wrong),
        lambda: coded_reduce(x, group, wire_dtype=wrong),
        lambda: jaxcoded.coded_value_and_grad(
            loss, group, wire_dtype=wrong, mean=False
        ),
        lambda: tx.update(x, tx.init(x), x, weights=group.batch(3).weights),
        lambda: packing.pack(x, wire_dtype=wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert_sum(group, coded_allreduce(contribution(group, GRADIENTS), group), GRADIENTS)


@slices
def test_rounding_is_checked_for_the_wire_dtype(comm, transport):
    fanout = 3 if comm.size == 13 else None
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(code="adaptive", fanout=fanout), transport=transport
    ) as group:
        narrow = group.plan.amplification * float(jnp.finfo("bfloat16").eps)
        zeros = np.zeros((1, 8), np.float32)
        shape = (
            group.plan.parts_above[group.rank],
            1,
            group.plan.slices_above[group.rank],
        )
        multiple = group.plan.padding_multiple
        encoded = lambda wire: kernels.encode(
            zeros, np.zeros(shape), multiple=multiple, wire_dtype=wire
        )
        coded_allreduce(encoded(None), group)  # float32 does not warn
        with contextlib.ExitStack() as stack:
            if narrow > 0.125:
                words = "messages in bfloat16 with the plan's amplification"
                stack.enter_context(pytest.warns(UserWarning, match=words))
            coded_allreduce(encoded("bfloat16"), group)
        assert narrow > 0.125 or comm.size < 7
