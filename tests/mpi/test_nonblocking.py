"""Rounds that are started now and finished later: their sums, their order, and calls in between."""

import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import together
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, once, redundant, several, slices
from mpi4py import MPI
from reference import (
    BATCH,
    assert_same_bits,
    assert_sum,
    contribution,
    per_example,
    random_erasures,
)
from together import finish, late_ranks, one_late, wait_for_all
from uncounted import coded_allreduce, coded_allreduce_start, coded_reduce

import jaxcoded
from jaxcoded import GroupClosed, coded_allreduce_done, tree_bcast

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]

RANK = MPI.COMM_WORLD.rank
MOST = 64  # most rounds that may be started and not yet done
VECTOR = per_example(5)
TREE = {
    "wide": per_example(40, 3, seed=1),
    "half": per_example(70, seed=2, dtype="float16"),
    "deep": [per_example(7, seed=3), per_example(5, 9, seed=4, dtype="float32")],
    "none": per_example(0, seed=5),
}

forms = pytest.mark.parametrize("form", ["effect", "token"])


@pytest.fixture(scope="module")
def own(group):
    return jnp.asarray(contribution(group, VECTOR))


class Calls:
    """The calls of a group, ordered by a token or by the effect."""

    def __init__(self, group, form, token):
        self.group, self.token = group, token if form == "token" else None

    def __call__(self, function, *args, **options):
        if self.token is None:
            return function(*args, **options)
        out = function(*args, **options, token=self.token)
        self.token = out[-1]
        if isinstance(out, jaxcoded.Result) and out.residual is not None:
            return out._replace(token=None)
        return out[0]

    def start(self, tree, **options):
        return self(coded_allreduce_start, tree, self.group, **options)

    def done(self, handle, **options):
        return self(coded_allreduce_done, handle, **options)

    def blocking(self, tree):
        return self(coded_allreduce, tree, self.group)

    @property
    def last(self):
        return jnp.int32(0) if self.token is None else self.token


# Sums.


@forms
@pytest.mark.parametrize("turned", [False, True])
def test_many_at_a_time(comm, group, own, form, turned):
    """Rounds of all sizes are done in the order of their starts or in reverse, with a
    waiting call in between.
    """
    tree = jax.tree.map(jnp.asarray, contribution(group, TREE))

    @jax.jit
    def program(x, tree, token):
        calls = Calls(group, form, token)
        handles = [calls.start(k * x) for k in (1, 2, 3)]
        handles.append(calls.start(tree, divisor=1.0))
        between = calls.blocking(x)
        handles.append(calls.start(jnp.zeros(0)))
        order = range(5)[::-1] if turned else range(5)
        sums = {i: calls.done(handles[i], after=(between, token)) for i in order}
        return [sums[i] for i in range(5)], between, calls.last

    token, before = jnp.int32(0), group.rounds
    for _ in range(2):
        sums, between, token = finish(program(own, tree, token))
        for k in (1, 2, 3):
            assert_sum(group, sums[k - 1], VECTOR, k)
        assert_sum(group, sums[3], TREE)
        assert sums[4].shape == (0,)
        assert_sum(group, between, VECTOR)
        assert_same_bits(comm, (sums, between))
    assert group.rounds == before + 2 * 6
    assert program._cache_size() == 1


@forms
@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**9])
def test_buckets(comm, group, form, bucket_bytes):
    """Each bucket is a round, and its leaves return in their places."""
    tree = jax.tree.map(jnp.asarray, contribution(group, TREE))
    expected = {1: 4, 600: 2, 10**9: 1}[bucket_bytes]

    @jax.jit
    def program(tree, token):
        calls = Calls(group, form, token)
        handle = calls.start(
            tree, divisor=BATCH, residual=True, bucket_bytes=bucket_bytes
        )
        assert len(handle.rounds) == expected
        return calls.done(handle), calls.last

    before = group.rounds
    (mean, residual, _), _ = finish(program(tree, jnp.int32(0)))
    assert group.rounds == before + expected
    gradients = jax.tree.map(lambda leaf: leaf / leaf.dtype.type(BATCH), TREE)
    scaled = jax.tree.map(lambda leaf: leaf.astype(np.float64) / BATCH, TREE)
    for actual, gradient, exact in zip(
        *map(jax.tree.leaves, (mean, gradients, scaled))
    ):
        assert actual.dtype == gradient.dtype
        size = np.abs(exact).sum(0)
        tolerance = 40 * jnp.finfo(actual.dtype).eps * group.plan.amplification
        np.testing.assert_array_less(
            np.abs(np.asarray(actual, np.float64) - exact.sum(0)),
            tolerance * size + 1e-300,
        )
    assert residual <= 1e-2 if SIZE > 1 else residual == 0  # the residual in float16
    assert_same_bits(comm, mean)


@forms
@late_ranks
def test_buckets_of_groups_that_take_turns(comm, group, transport, late, form):
    """Two groups alternate, while rounds progress by themselves."""
    tree = jax.tree.map(jnp.asarray, contribution(group, TREE))

    with jaxcoded.CodedGroup(
        comm, group.plan, transport=transport, options=group.options
    ) as other:

        @jax.jit
        def program(tree, token):
            calls = Calls([group, other], form, token)
            handle = calls.start(tree, bucket_bytes=1)
            return calls.done(handle), calls.last

        before, token = group.rounds, jnp.int32(0)
        for turn in range(3):
            if turn == 1:
                wait_for_all(comm)
                if late == RANK:
                    time.sleep(0.2)
            total, token = finish(program(tree, token))
            assert_sum(group, total, TREE)
            assert_same_bits(comm, total)
        rounds = (2, 2) if group._session.transport.most_started else (4, 0)
        assert (group.rounds - before, other.rounds) == tuple(3 * n for n in rounds)


def test_groups_that_cannot_take_turns(comm, group, transport):
    with pytest.raises(ValueError, match="group is an empty sequence"):
        coded_allreduce_start(jnp.ones(3), [])
    with pytest.raises(TypeError, match="got an int"):
        coded_allreduce_start(jnp.ones(3), [group, 3])
    if SIZE > 2:
        with (
            jaxcoded.CodedGroup(
                comm, jaxcoded.Coded(fanout=1, stragglers=0), transport=transport
            ) as other,
            pytest.raises(ValueError, match="must have the same plan"),
        ):
            coded_allreduce_start(jnp.ones(3), [group, other])


@forms
def test_from_one_step_of_a_scan_to_the_next(comm, group, own, form):
    @jax.jit
    def program(x, token):
        calls = Calls(group, form, token)
        handle = calls.start(x)

        def step(carry, k):
            handle, token = carry
            calls = Calls(group, form, token)
            following = calls.start(k * x)
            total = calls.done(handle)
            return (following, calls.last), total

        (handle, token), totals = jax.lax.scan(
            step, (handle, calls.last), jnp.arange(2.0, 5)
        )
        calls = Calls(group, form, token)
        return [*totals, calls.done(handle)], calls.last

    before = group.rounds
    totals, _ = finish(program(own, jnp.int32(0)))
    for k, total in enumerate(totals, 1):
        assert_sum(group, total, VECTOR, k)
    assert group.rounds == before + 4
    assert_same_bits(comm, totals)


@forms
def test_from_one_compiled_function_to_another(comm, group, own, form):
    """A handle also passes through Python, as a pytree."""

    @jax.jit
    def start(x, token):
        calls = Calls(group, form, token)
        return calls.start(x), calls.last

    @jax.jit
    def done(handle, token):
        calls = Calls(group, form, token)
        return calls.done(handle), calls.last

    token = jnp.int32(0)
    handles = []
    for k in (1, 2):
        handle, token = start(k * own, token)
        leaves, structure = jax.tree.flatten(handle)
        handles.append(jax.tree.unflatten(structure, leaves))
    for k in (2, 1):
        total, token = done(handles[k - 1], token)
        assert_sum(group, total, VECTOR, k)
        assert_same_bits(comm, total)
    assert (start._cache_size(), done._cache_size()) == (1, 1)


def test_outside_jit(group, own):
    handle = coded_allreduce_start(own, group, divisor=2)
    other = coded_allreduce_start(own, group, divisor=jnp.float64(4))
    # `after` takes any pytree of Python and NumPy values, also an empty one
    total = coded_allreduce_done(handle, after={"any": [1, True, np.ones(2, "int8")]})
    assert_sum(group, 2 * total, VECTOR)
    assert_sum(group, 4 * coded_allreduce_done(other, after=[]), VECTOR)


def test_a_round_is_started_on_some_ranks_and_waited_for_on_others(comm, group, own):
    kinds = ("start", "blocking", "numpy")
    if not group._session.transport.most_started:
        kinds = kinds[:2]
    kind = kinds[RANK % len(kinds)]
    totals = []
    for k in (1, 2, 3):
        if kind == "start":
            totals.append(coded_allreduce_done(coded_allreduce_start(k * own, group)))
        elif kind == "blocking":
            totals.append(coded_allreduce(k * own, group))
        else:
            totals.append(uncounted.allreduce(k * np.asarray(own), group))
    for k, total in enumerate(totals, 1):
        assert_sum(group, total, VECTOR, k)
    assert_same_bits(comm, totals)


def test_megabytes_of_buckets(comm, group):
    """Many pieces of many rounds move at a time, while the rank computes."""
    scale = per_example()
    random = np.random.default_rng(7)
    shape = {f"layer {i}": random.uniform(0.5, 1, 2**17 + i) for i in range(8)}
    weight = contribution(group, scale)

    @jax.jit
    def step(tree, a):
        handle = coded_allreduce_start(tree, group, bucket_bytes=2**20)
        for _ in range(4):
            a = jnp.sin(a @ a) / 100
        return coded_allreduce_done(handle, after=a), a

    tree = {name: jnp.asarray(weight * v) for name, v in shape.items()}
    tolerance = 1e-13 * group.plan.amplification
    for _ in range(3):
        sums, _ = step(tree, jnp.ones((200, 200)))
        for name, v in shape.items():
            error = np.abs(np.asarray(sums[name]) - scale.sum() * v)
            assert error.max() <= tolerance * np.abs(scale).sum()
        assert_same_bits(comm, sums)


def test_wire_dtype(comm, group):
    """Messages are half as long, and results match the results of the call that waits."""
    gradients = per_example(40, 3, dtype="float32")
    own = jnp.asarray(contribution(group, gradients))
    options = {"wire_dtype": "bfloat16", "residual": True}
    start = jax.jit(lambda x: coded_allreduce_start(x, group, **options))
    total, residual, _ = coded_allreduce_done(start(own))
    expected, same, _ = coded_allreduce(own, group, **options)
    assert total.dtype == np.float32
    assert residual.dtype == same.dtype
    size = np.abs(gradients.astype(np.float64)).sum(0)
    error = np.abs(np.asarray(total, np.float64) - gradients.sum(0, np.float64))
    assert np.all(error <= 0.1 * group.plan.amplification * size)
    assert np.all(np.abs(total - expected) <= 0.1 * group.plan.amplification * size)
    assert_same_bits(comm, total)


@redundant
def test_erasures(comm, group, own):
    rng = np.random.default_rng(3)
    masks = [random_erasures(group.plan, rng) for _ in range(4)]
    start = jax.jit(lambda x, mask: coded_allreduce_start(x, group, erasures=mask))
    handles = [start(np.nan * own if m[RANK] else own, m) for m in masks]
    totals = [coded_allreduce_done(handle) for handle in handles]
    for total in totals:
        assert_sum(group, total, VECTOR)
    assert_same_bits(comm, totals)


@slices
@pytest.mark.parametrize("code", ["slices", "progressive"])
def test_encoded(comm, transport, code):
    """Messages have slices or parts, and their sum is longer or shorter."""
    options = {"slices": 2} if code == "slices" else {"code": code, "fanout": SIZE - 1}
    gradients = {"x": per_example(11), "y": per_example(3, 2, seed=1)}
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(**options), transport=transport
    ) as coded:
        own = jax.tree.map(jnp.asarray, contribution(coded, gradients))
        start = jax.jit(lambda own: coded_allreduce_start(own, coded, residual=True))
        handles = [start(own) for _ in range(3)]
        for handle in handles:
            total, residual, _ = coded_allreduce_done(handle)
            assert_sum(coded, total, gradients)
            assert residual <= 1e-12 * coded.plan.amplification
            assert_same_bits(comm, total)
        with pytest.raises(TypeError, match="coded_allreduce takes the result"):
            coded_allreduce_start(gradients["x"][0], coded)
        with pytest.raises(TypeError, match="an Encoded is one message"):
            coded_allreduce_start(own, coded, bucket_bytes=8)


@engine_only
@pytest.mark.skipif(SIZE < 4, reason="no such plan for so few ranks")
def test_parts_between_started_rounds(comm, transport):
    """A call that sends its parts ahead keeps its place in the order."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=SIZE - 1, code="progressive"), transport=transport
    ) as coded:
        x = np.random.default_rng(0).normal(size=(4 * (SIZE - 1), 3))
        part = coded.batch(len(x))
        own = jax.tree.map(jnp.asarray, contribution(coded, VECTOR))
        value_and_grad = jaxcoded.coded_value_and_grad(
            lambda w, x: x @ w, coded, mean=False
        )

        @jax.jit
        def step(w):
            before = coded_allreduce_start(own, coded)
            _, grads = value_and_grad(w, part.of(x[part.indices]))
            after = coded_allreduce_start(own, coded)
            return coded_allreduce_done(before), grads, coded_allreduce_done(after)

        for _ in range(3):
            before, grads, after = step(np.ones(3))
            assert_sum(coded, before, VECTOR)
            assert_sum(coded, after, VECTOR)
            np.testing.assert_allclose(grads, x.sum(0), atol=1e-9)


# Ranks that are late.


@redundant
@engine_only
@late_ranks
@forms
def test_a_late_rank(comm, group, own, late, form):
    """The late rank's starts keep their places, and its results match the other
    ranks'."""

    @jax.jit
    def three(x, token):
        calls = Calls(group, form, token)
        handles = [calls.start(k * x, skip=False) for k in (1, 2, 3)]
        return [calls.done(handle) for handle in handles], calls.last

    finish(three(own, jnp.int32(0)))  # compiles
    mine = own * np.nan if RANK == late else own
    out = one_late(comm, group, late, 3, lambda: three(mine, jnp.int32(0)))
    for k, total in enumerate(out[0], 1):
        assert_sum(group, total, VECTOR, k)
    assert_same_bits(comm, out[0])


@redundant
@engine_only
@late_ranks
def test_lag_counts_what_is_not_started(comm, group, own, late):
    def starts():
        handles, lags = [], []
        for _ in range(3):
            handles.append(coded_allreduce_start(own, group))
            lags.append(group.lag())
        totals = [coded_allreduce_done(handle) for handle in handles]
        return totals, lags

    totals, lags = one_late(comm, group, late, 3, starts)
    assert RANK != late or lags == [2, 1, 0]
    for total in totals:
        assert_sum(group, total, VECTOR)
    assert_same_bits(comm, totals)


@redundant
@engine_only
def test_skipped_is_missing(comm, group, own):
    last = RANK == SIZE - 1
    mine = np.nan * own if last else own
    handles = [coded_allreduce_start(mine, group, skip=last) for _ in range(3)]
    totals = [coded_allreduce_done(handle) for handle in handles]
    for total in totals:
        assert_sum(group, total, VECTOR)
    assert_same_bits(comm, totals)


@redundant
@engine_only
@late_ranks
def test_a_late_rank_out_of_the_history(comm, group, transport, late):
    """All rounds that it has started fail, and it continues from a snapshot."""
    short = jaxcoded.CodedGroup(
        comm, group.plan, transport=transport, options=jaxcoded.Options(history_bytes=1)
    )
    ramp = np.linspace(1.0, 2.0, 2**16)
    own = contribution(short, 1.0 + np.arange(BATCH)) * ramp
    expected = (1.0 + np.arange(BATCH)).sum() * ramp
    tolerance = 1e-13 * short.plan.amplification
    state, lost = {"step": 0}, r"jaxcoded\.Desynchronized: "
    short.snapshot(state)
    wait_for_all(comm)
    if RANK != late:
        while state["step"] < 160:
            total = uncounted.allreduce(own, short)
            np.testing.assert_allclose(total, expected, rtol=tolerance)
            state["step"] += 1
            short.snapshot(state)
    wait_for_all(comm)
    if RANK == late:
        handles = [coded_allreduce_start(own, short) for _ in range(3)]
        with pytest.raises(JaxRuntimeError, match=lost):
            for _ in range(160):  # the rank may still get the first results
                handles.append(coded_allreduce_start(own, short))
                total = np.asarray(coded_allreduce_done(handles.pop(0)))
                np.testing.assert_allclose(total, expected, rtol=tolerance)
        for handle in handles:
            jaxcoded.effects_barrier()
            with pytest.raises(JaxRuntimeError, match=lost):
                jax.block_until_ready(coded_allreduce_done(handle))
        jaxcoded.effects_barrier()
        state = short.resync(state)
        assert state["step"] > 0
        while state["step"] < 160:
            handle = coded_allreduce_start(own, short)
            np.testing.assert_allclose(
                coded_allreduce_done(handle), expected, rtol=tolerance
            )
            state["step"] += 1
    wait_for_all(comm)
    handles = [coded_allreduce_start(own, short) for _ in range(3)]
    for handle in handles:
        np.testing.assert_allclose(
            coded_allreduce_done(handle), expected, rtol=tolerance
        )
    short.close()


# Ranks that start different things.


@several
@engine_only
@pytest.mark.parametrize(
    ("odd", "usual", "unusual"),
    [
        (
            lambda x, group: coded_allreduce_done(coded_allreduce_start(x[:4], group)),
            "coded_allreduce of float64[5]",
            "coded_allreduce of float64[4]",
        ),
        (
            coded_reduce,
            "coded_allreduce of float64[5]",
            "coded_reduce of float64[5]",
        ),
        (
            lambda x, group: tree_bcast(x, group),
            "coded_allreduce of float64[5]",
            "tree_bcast of float64[5]",
        ),
    ],
    ids=["shape", "coded_reduce", "tree_bcast"],
)
def test_one_rank_starts_something_else(comm, group, own, odd, usual, unusual):
    """Every rank gets the error when that call or the next one is done."""

    def usually(x, group):
        return coded_allreduce_done(coded_allreduce_start(x, group))

    last = SIZE - 1
    calls = [
        lambda: (odd if RANK == last else usually)(own, group),
        lambda: usually(own, group),
        lambda: usually(own, group),
    ]
    together.assert_odd_one_out(
        comm,
        calls,
        last,
        usual,
        unusual,
        lambda total: assert_sum(group, total, VECTOR),
    )


@several
@engine_only
def test_an_error_does_not_spoil_the_rounds_behind_it(comm, group, own):
    """One rank's first round differs; all other rounds in flight are right, or all except one."""
    mine = own[:4] if RANK == SIZE - 1 else own
    handles = [coded_allreduce_start(mine, group)]
    handles += [coded_allreduce_start(own, group) for _ in range(4)]
    erred = []
    for number, handle in enumerate(handles):
        try:
            total = np.asarray(coded_allreduce_done(handle))
        except JaxRuntimeError as error:
            assert "GroupMismatch" in str(error)
            erred.append(number)
            jaxcoded.effects_barrier()
        else:
            if number:
                assert_sum(group, total, VECTOR)
    wait_for_all(comm)
    jaxcoded.effects_barrier()
    # ranks are in step again, however late a rank got the error: all five rounds may
    # have been decided before the odd rank called
    for number in range(5, 7):
        try:
            total = np.asarray(coded_allreduce(own, group))
        except JaxRuntimeError as error:
            assert "GroupMismatch" in str(error)
            erred.append(number)
            jaxcoded.effects_barrier()
        else:
            assert_sum(group, total, VECTOR)
        wait_for_all(comm)
        time.sleep(0.05)
    assert 1 <= len(erred) <= 2, erred
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@several
def test_an_error_in_the_arguments_of_one_rank(comm, group, own):
    """The other ranks get an error, as with a call that waits."""
    errors = []
    if RANK == SIZE - 1:
        with pytest.raises(TypeError, match="floating point"):
            coded_allreduce_start(jnp.zeros(3, jnp.float8_e5m2), group)
    for _ in range(3):
        try:
            total = np.asarray(coded_allreduce_done(coded_allreduce_start(own, group)))
        except JaxRuntimeError as error:
            errors.append(str(error))
            jaxcoded.effects_barrier()
        else:
            assert_sum(group, total, VECTOR)
        wait_for_all(comm)
        time.sleep(0.05)
    assert 1 <= len(errors) <= 2
    assert all("GroupMismatch" in e and "after a TypeError" in e for e in errors)


# Wrong use.


@engine_only
def test_done_twice(group, own):
    done = jax.jit(coded_allreduce_done)
    handle = coded_allreduce_start(own, group)
    assert_sum(group, done(handle), VECTOR)
    with pytest.raises(JaxRuntimeError, match="had this handle before"):
        jax.block_until_ready(done(handle))
    jaxcoded.effects_barrier()
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@engine_only
def test_a_handle_of_another_call(group, own):
    """The memory of a foreign handle is not read."""
    handle = coded_allreduce_start(own, group)
    other = coded_allreduce_start(own[:2], group)
    mixed = dataclasses.replace(other, rounds=handle.rounds)
    with pytest.raises(JaxRuntimeError, match="other shapes or dtypes"):
        jax.block_until_ready(coded_allreduce_done(mixed))
    jaxcoded.effects_barrier()
    assert_sum(group, coded_allreduce_done(handle), VECTOR)
    assert_sum(group, coded_allreduce_done(other), VECTOR[:, :2])


@engine_only
def test_never_done(comm, transport):
    """The engine keeps a limited number of rounds that are never done."""
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
        transport=transport,
    ) as other:
        scale = per_example()
        big = jnp.asarray(contribution(other, scale) * np.ones(2**14))
        start = jax.jit(lambda x: coded_allreduce_start(x, other))
        handles = [start(big) for _ in range(6 * MOST)]
        totals = [coded_allreduce_done(handle) for handle in handles[-MOST:]]
        for total in totals:
            np.testing.assert_allclose(total, scale.sum(), rtol=1e-9)
        with pytest.raises(JaxRuntimeError, match=f"{MOST} rounds of the group were"):
            jax.block_until_ready(coded_allreduce_done(handles[-MOST - 1]))
        jaxcoded.effects_barrier()
        assert other.rounds == 6 * MOST
        start(big)
        np.testing.assert_allclose(coded_allreduce(big, other), scale.sum(), rtol=1e-9)
        wait_for_all(comm)
        kept = other.statistics()["memory_bytes"]
        # the engine keeps these rounds, and their results if a rank below may lack them
        assert kept <= (2 * MOST + 32) * 1.2 * big.nbytes


@once
def test_handles_of_a_wrong_kind(group, own):
    with pytest.raises(TypeError, match=r"handle must be the result .* got a Result"):
        coded_allreduce_done(coded_allreduce_start(own, group, token=jnp.int32(0)))
    handle, *_ = coded_allreduce_start(own, group, token=jnp.int32(0))
    started = "^calls are ordered by tokens or by effects: the round was started "
    with pytest.raises(ValueError, match=started + "with a token, so pass the latest"):
        coded_allreduce_done(handle)
    handle = coded_allreduce_start(own, group)
    with pytest.raises(
        ValueError,
        match=started + "without a token, so call coded_allreduce_done without",
    ):
        coded_allreduce_done(handle, token=jnp.int32(0))


def test_a_divisor_beyond_integers(group, own):
    """A divisor beyond JAX's integers acts as in a call that waits."""
    for mean in (2**70, np.float32(2**70)):
        handle = coded_allreduce_start(own, group, divisor=mean)
        assert_sum(group, coded_allreduce_done(handle), VECTOR, 2.0**-70)
        assert_sum(group, coded_allreduce(own, group, divisor=mean), VECTOR, 2.0**-70)


def test_nothing_starts_where_a_bucket_is_wrong(group, own):
    before = group.rounds
    wrong = jnp.zeros(3, jnp.float8_e5m2)
    with pytest.raises(TypeError, match=r"leaf at \[0\] has dtype float8_e5m2"):
        coded_allreduce_start([wrong, own], group, bucket_bytes=1)
    assert group.rounds == before
    assert_errs_together(group, own)


@once
@pytest.mark.parametrize("wrong", [0, 1.5, True])
def test_invalid_buckets(group, own, wrong):
    with pytest.raises(ValueError, match=f"bucket_bytes must be .* got {wrong}"):
        coded_allreduce_start(own, group, bucket_bytes=wrong)
    assert_errs_together(group, own)


@engine_only
def test_too_many_buckets(group, own):
    with pytest.raises(ValueError, match=rf"makes 65 rounds, but at most {MOST}"):
        coded_allreduce_start([own] * 65, group, bucket_bytes=8)
    assert_errs_together(group, own)


def assert_errs_together(group, own):
    """Check that all ranks get the error, and then continue."""
    assert_sum(group, coded_allreduce(own, group), VECTOR)


def test_transformations(group, own):
    def total(x):
        return coded_allreduce_done(coded_allreduce_start(x, group)).sum()

    differentiated = "coded_allreduce_start cannot be differentiated: use coded_allred"
    with pytest.raises(NotImplementedError, match=differentiated):
        jax.grad(total)(own)
    with pytest.raises(NotImplementedError, match=differentiated):
        jax.jit(lambda x: jax.jvp(total, (x,), (x,)))(own)
    with pytest.raises(NotImplementedError, match="coded_allreduce_start cannot be"):
        jax.linear_transpose(total, own)(1.0)
    with pytest.raises(NotImplementedError, match="cannot be batched by vmap"):
        jax.vmap(total)(jnp.stack([own, own]))
    assert_sum(group, coded_allreduce(own, group), VECTOR)


@engine_only
def test_handles_are_not_batched(group, own):
    handle = coded_allreduce_start(own, group)
    with pytest.raises(NotImplementedError, match="a handle belongs to one round"):
        jax.vmap(lambda x: coded_allreduce_done(handle, after=x))(jnp.ones(2))
    assert_sum(group, coded_allreduce_done(handle), VECTOR)
    # `after` may be any value computed before the call, and has no derivative
    value, grad = jax.value_and_grad(
        lambda x: (
            coded_allreduce_done(coded_allreduce_start(own, group), after=x).sum() * x
        )
    )(2.0)
    np.testing.assert_allclose(value, 2 * VECTOR.sum(), rtol=1e-9)
    np.testing.assert_allclose(grad, VECTOR.sum(), rtol=1e-9)


# The end.


def test_done_after_close(comm, group, transport, own):
    """Started rounds are completed, and no rank hangs."""
    other = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    done = jax.jit(coded_allreduce_done)
    assert_sum(group, done(coded_allreduce_start(own, other)), VECTOR)
    handles = [coded_allreduce_start(own, other) for _ in range(5)]
    other.close()
    with pytest.raises(GroupClosed, match="use after close"):
        coded_allreduce_done(handles[0])
    with pytest.raises(GroupClosed, match="use after close"):
        coded_allreduce_start(own, other)
    if group._session.transport.most_started:
        with pytest.raises(JaxRuntimeError, match="GroupClosed: use after close"):
            jax.block_until_ready(done(handles[0]))
        jaxcoded.effects_barrier()
    else:  # the round's sum is in the handle
        assert_sum(group, done(handles[0]), VECTOR)


@several
@engine_only
def test_close_without_a_rank_that_never_starts(comm, transport, own):
    """Closing ends in time, and ranks that wait for the round get an error."""
    group = jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
        transport=transport,
    )
    last, parents = SIZE - 1, group.plan.parents
    above = {parents[last], parents[parents[last]]} - {-1}
    done = jax.jit(lambda h, t: coded_allreduce_done(h, token=t))
    token = jnp.int32(0)
    handle, _, token = coded_allreduce_start(1.0, group, token=token)
    done(handle, token).value.block_until_ready()
    wait_for_all(comm)
    if RANK == last:
        wait_for_all(comm)
        group.close()
        return
    handles = [coded_allreduce_start(1.0, group, token=token)[0] for _ in range(3)]
    outcomes = []

    def wait():
        try:
            outcomes.append(f"got {done(handles[0], token)[0]}")
        except Exception as error:  # noqa: BLE001  # whatever it is
            outcomes.append(f"{type(error).__name__}: {error}")

    waits = threading.Thread(target=wait)
    waits.start()
    time.sleep(0.1)
    named = pytest.warns(RuntimeWarning, match=rf"without ranks \[{last}\]")
    with named if RANK in above else contextlib.nullcontext():
        group.close(timeout=0.3)
    waits.join()
    assert "GroupClosed" in outcomes[0] or "GroupMismatch" in outcomes[0], outcomes
    wait_for_all(comm)
    assert group.closed


@engine_only
def test_resync_and_snapshot_with_a_round_in_flight(comm, group, own):
    """The calls are refused, and the round still gets its sum."""
    comm.Barrier()
    if RANK != group.plan.root:
        handle = coded_allreduce_start(own, group)
        jax.block_until_ready(handle)
        with pytest.raises(jaxcoded.CodedError, match="coded_allreduce_done"):
            group.resync(own, timeout=0.1)
        with pytest.raises(
            jaxcoded.CodedError, match="1 rounds that coded_allreduce_start"
        ):
            group.snapshot(own)
    comm.Barrier()
    if RANK == group.plan.root:
        handle = coded_allreduce_start(own, group)
    assert_sum(group, finish(coded_allreduce_done(handle)), VECTOR)
