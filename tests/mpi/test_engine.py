"""Features of the engine alone: results in place, late ranks, snapshots and NumPy
arrays.
"""

import contextlib
import fcntl
import functools
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, not_alone, redundant, several, slices
from mpi4py import MPI
from reference import (
    BATCH,
    assert_same_bits,
    assert_sum,
    contribution,
    per_example,
    rounding,
)
from together import (
    SLOWNESS,
    compilations,
    finish,
    late_ranks,
    one_late,
    wait_for_all,
    wait_until,
)
from uncounted import coded_allreduce, coded_allreduce_start, coded_reduce

import jaxcoded
from jaxcoded import tree_bcast
from jaxcoded.group import snapshots
from jaxcoded.transport import engine
from jaxcoded.transport.mpi4jax import Mpi4jax
from jaxcoded.transport.round import Round

pytestmark = engine_only

RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(5)


@pytest.fixture(scope="module")
def own(group):
    return jnp.asarray(contribution(group, VECTOR))


# Results in place.


@pytest.mark.parametrize("form", ["token", "effect"])
def test_donated_operand(comm, group, own, form):
    """The operand is consumed, and the result takes its place."""

    def step(x, token):
        if form == "token":
            total, _, token = coded_allreduce(x, group, token=token)
            return total, token
        return coded_allreduce(x, group), token

    in_place = jax.jit(step, donate_argnums=0)
    not_in_place = jax.jit(step)
    total, token = not_in_place(own, jnp.int32(0))
    assert not own.is_deleted()
    assert_sum(group, total, VECTOR)
    for _ in range(2):
        operand = jnp.array(own)
        place = operand.unsafe_buffer_pointer()
        total, token = in_place(operand, token)
        assert operand.is_deleted()
        assert total.unsafe_buffer_pointer() == place
        assert_sum(group, total, VECTOR)
        assert_same_bits(comm, total)
    assert in_place._cache_size() == 1


@pytest.mark.parametrize("donated", [True, False])
def test_three_megabytes(comm, group, donated):
    """Each dtype has a vector of several pieces, in place or not."""
    dtypes = {"float16": 20, "bfloat16": 21, "float32": 19, "float64": 18}
    scale = per_example()
    shape = {
        dtype: np.random.default_rng(bits).uniform(0.5, 1, 3 * 2**bits // 4 + 5)
        for dtype, bits in dtypes.items()
    }
    weight = contribution(group, scale)
    tree = {dtype: jnp.asarray(weight * v, dtype) for dtype, v in shape.items()}
    step = jax.jit(
        lambda x, t: coded_allreduce(x, group, token=t),
        donate_argnums=(0,) if donated else (),
    )
    total, *_ = finish(step(tree, jnp.int32(0)))
    assert all(leaf.is_deleted() for leaf in tree.values()) == donated
    for dtype, v in shape.items():
        assert total[dtype].dtype == dtype
        bound = rounding(group, dtype) * np.abs(scale).sum() * np.abs(v)
        error = np.abs(np.asarray(total[dtype], np.float64) - scale.sum() * v)
        assert np.all(error <= bound), dtype
    assert_same_bits(comm, total)


@slices
def test_three_megabytes_in_slices(comm, transport):
    scale = 1.0 + np.arange(BATCH)
    shape = np.random.default_rng(0).uniform(1, 2, 3 * 2**17 + 5)
    params = {"wide": np.zeros(len(shape)), "single": np.zeros(len(shape), np.float32)}
    fanout = 3 if SIZE == 13 else None
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2, fanout=fanout), transport=transport
    ) as sliced:
        part = sliced.batch(BATCH)

        def loss(params, a):
            return a * (params["wide"] @ shape + params["single"] @ shape)

        step = jax.jit(jaxcoded.coded_value_and_grad(loss, sliced, mean=False))
        (_, grads), *_ = finish(
            step(params, part.of(scale[part.indices]), token=jnp.int32(0))
        )
        for name, dtype in {"wide": "float64", "single": "float32"}.items():
            error = np.abs(grads[name] / (scale.sum() * shape) - 1)
            # the loss is computed in float64, and its gradient rounded once more
            assert error.max() <= 2 * rounding(sliced, dtype), dtype
        assert_same_bits(comm, grads)


# Several groups and calls in one program, in the order of JAX's effect.


def test_two_groups_in_loops(comm, group, transport, own):
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:

        @jax.jit
        def program(x):
            def step(total, k):
                coded_allreduce(k * x, other)  # not used
                there = lambda: coded_allreduce(x, group) + coded_allreduce(x, other)
                back = lambda: coded_allreduce(x, other) + coded_allreduce(x, group)
                total += jax.lax.cond(k % 2 == 0, there, back)
                twice = jax.lax.while_loop(
                    lambda s: s[0] < 2,
                    lambda s: (s[0] + 1, s[1] + coded_allreduce(x, group)),
                    (0, jnp.zeros_like(x)),
                )[1]
                # two equal calls
                pair = coded_allreduce(x, other) + coded_allreduce(x, other)
                return total + twice + pair, coded_reduce(k * x, group)

            return jax.lax.scan(step, jnp.zeros_like(x), jnp.arange(1.0, 4))

        before = group.rounds
        total, rows = finish(program(own))
        assert (group.rounds - before, other.rounds) == (3 * 4, 3 * 4)
    assert_sum(group, total / 18, VECTOR)
    assert_same_bits(comm, total)
    for k in (1, 2, 3):
        at_root = RANK == group.plan.root
        assert_sum(
            group, rows[k - 1] + (0 if at_root else k * VECTOR.sum(0)), VECTOR, k
        )


def test_errors_of_the_engine_keep_their_classes(group, monkeypatch):
    """All errors keep their classes, not only that of a closed group."""

    def fails(index):
        raise RuntimeError("MPI is gone")

    monkeypatch.setattr(engine._engine, "next_round", fails)
    with pytest.raises(RuntimeError, match="^MPI is gone$"):
        _ = group.rounds
    monkeypatch.undo()
    other = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="engine")
    other.close()
    with pytest.raises(jaxcoded.GroupClosed, match="^use after close: group .* closed"):
        other._session.transport.host_lag()


# Ranks that are late.


def test_lag_in_step(comm, group):
    read = jax.jit(lambda: (group.lag(), group.lag(token=jnp.int32(3))))
    wait_for_all(comm)
    assert group.lag() == 0
    lag, (carried, _, token) = read()
    assert (lag.dtype, lag.shape, carried.dtype) == (np.int32, (), np.int32)
    assert (lag, carried, token) == (0, 0, 3)
    wait_for_all(comm)


@redundant
@late_ranks
@pytest.mark.parametrize("form", ["token", "effect"])
def test_lag_in_the_order_of_the_calls(comm, group, own, late, form):
    """A late rank's calls return at once, with the sum of the other ranks."""

    @jax.jit
    def step(x, token):
        if form == "effect":
            before = group.lag()
            total = coded_allreduce(x, group)
            return before, total, group.lag(), token
        before, _, token = group.lag(token=token)
        total, _, token = coded_allreduce(x, group, token=token)
        after, _, token = group.lag(token=token)
        return before, total, after, token

    token = jnp.int32(0)
    finish(step(own, token))  # compiles
    mine = own * np.nan if RANK == late else own

    def three():
        return [step(mine, token) for _ in range(3)]

    out = one_late(comm, group, late, 3, three)
    for number, (before, total, after, _) in enumerate(out):
        assert_sum(group, total, VECTOR)
        if RANK == late:
            assert (before, after) == (3 - number, 2 - number)
        if RANK == group.plan.root:
            assert (before, after) == (0, 0)
    assert_same_bits(comm, [total for _, total, _, _ in out])


def needed_with(plan, rank):
    """Return a mask of ranks without which every sum needs this rank."""
    for other in plan.tree.children[plan.tree.parents[rank]]:
        mask = np.arange(plan.size) == other
        both = mask | (np.arange(plan.size) == rank)
        if other != rank and not plan.why_not(mask) and plan.why_not(both):
            return mask
    raise AssertionError


@redundant
@late_ranks
def test_a_late_rank_counts_again(comm, group, own, late):
    one_late(
        comm, group, late, 2, lambda: [coded_allreduce(own, group) for _ in range(2)]
    )
    mask = needed_with(group.plan, late)
    mine = own * np.nan if mask[RANK] else own
    total = coded_allreduce(mine, group, erasures=mask)
    assert_sum(group, total, VECTOR)
    assert_same_bits(comm, total)


class Counter:
    """A counter of how often a loss is computed while the program runs."""

    def __init__(self):
        self.count = 0

    def __call__(self, w, x):
        jax.debug.callback(self.add)
        return (x @ w) ** 2 / 2

    def add(self):
        self.count += 1


@redundant
@late_ranks
@pytest.mark.parametrize("form", ["token", "effect"])
def test_a_late_rank_skips_its_gradient(comm, group, late, form):
    x = per_example(3, seed=1)
    part = group.batch(BATCH)
    counter = Counter()
    value_and_grad = jaxcoded.coded_value_and_grad(counter, group)

    @jax.jit
    def step(w, token):
        if form == "token":
            (loss, grad), _, token = value_and_grad(
                w, part.of(x[part.indices]), token=token
            )
        else:
            loss, grad = value_and_grad(w, part.of(x[part.indices]))
        return w - 0.1 * grad, token, loss

    start = jnp.ones(3), jnp.int32(0)
    finish(step(*start))  # compiles
    counter.count = 0

    def three():
        w, token = start
        losses = []
        for _ in range(3):
            w, token, loss = step(w, token)
            losses.append(loss)
        return w, losses

    w, losses = one_late(comm, group, late, 3, three)
    if RANK in (late, 0):  # the root has no data
        assert counter.count == 0
    elif SIZE == 4 or (late == 1 and RANK in group.plan.coded_children(0)):
        # the code tolerates the late rank, but not that this rank is missing, too
        assert counter.count == 3
    expected = np.ones(3)
    for loss in losses:
        slope = x @ expected
        np.testing.assert_allclose(loss, (slope**2).mean() / 2, rtol=1e-9)
        expected = expected - 0.1 * (slope @ x) / BATCH
    np.testing.assert_allclose(w, expected, rtol=1e-9)
    assert_same_bits(comm, (w, losses))


@slices
def test_a_late_rank_skips_its_chunks(comm, transport):
    x = per_example(3, seed=1)
    fanout = 3 if SIZE == 13 else None
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2, fanout=fanout), transport=transport
    ) as sliced:
        part = sliced.batch(BATCH)
        counter = Counter()
        step = jax.jit(jaxcoded.coded_value_and_grad(counter, sliced, mean=False))
        finish(step(jnp.ones(3), part.of(x[part.indices])))  # compiles
        counter.count = 0
        out = one_late(
            comm,
            *(sliced, SIZE - 1, 2),
            lambda: [step(jnp.ones(3), part.of(x[part.indices])) for _ in range(2)],
        )
        assert RANK < SIZE - 1 or counter.count == 0
        slope = x @ np.ones(3)
        for loss, grad in out:
            np.testing.assert_allclose(loss, (slope**2).sum() / 2, rtol=1e-9)
            np.testing.assert_allclose(grad, slope @ x, rtol=1e-9)
        assert_same_bits(comm, out)


@redundant
@late_ranks
def test_a_late_rank_gets_its_results_while_others_close(
    comm, group, transport, own, late
):
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:
        own = np.asarray(own)
        if RANK == late:
            wait_for_all(comm)
            time.sleep(0.2)
        totals = [uncounted.allreduce(own, other) for _ in range(3)]
        if RANK != late:
            wait_for_all(comm)
    for total in totals:
        assert_sum(group, total, VECTOR)
    assert_same_bits(comm, totals)


@several
def test_close_names_those_that_do_not_come(comm, transport):
    """Closing names the missing ranks, and continues without them."""
    group = jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
        transport=transport,
    )
    coded_allreduce(1.0, group)
    last, parents = SIZE - 1, group.plan.parents
    above = {parents[last], parents[parents[last]]} - {-1}
    wait_for_all(comm)
    if RANK == last:
        wait_for_all(comm)
        group.close()
    else:
        named = pytest.warns(RuntimeWarning, match=rf"without ranks \[{last}\]")
        with named if RANK in above else contextlib.nullcontext():
            group.close(timeout=0.3)
        wait_for_all(comm)
    assert group.closed


@pytest.mark.parametrize(
    ("timeout", "why"),
    [(0.0, "did not close it within 0 s"), (60.0, "a rank below has given them up")],
)
def test_close_logs_whether_it_waited(comm, transport, monkeypatch, timeout, why):
    group = jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport=transport)
    close = group._session.transport.close
    monkeypatch.setattr(
        group._session.transport, "close", lambda given: close(given) or [3]
    )
    with pytest.warns(RuntimeWarning, match=f"they are dead, or {why}$"):
        group.close(timeout)


# Numpy arrays.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numpy_arrays(comm, group, dtype):
    gradients = per_example(3, 2, dtype=dtype)
    array = np.asarray(contribution(group, gradients))
    with compilations() as compiled:
        total = uncounted.allreduce(array, group)
        out = np.empty_like(array)
        assert uncounted.allreduce(array, group, out=out) is out
        itself = array.view()
        assert uncounted.allreduce(array, group, out=itself) is itself
        empty = uncounted.allreduce(np.zeros((0, 3), dtype), group)
    assert not compiled
    assert (empty.shape, empty.dtype) == ((0, 3), dtype)
    for each in (total, out, array):
        assert type(each) is np.ndarray
        assert_sum(group, each, gradients)
    assert_same_bits(comm, [total, out, array])


def test_numpy_arrays_and_a_compiled_step_in_one_round(comm, group, own):
    if RANK % 2:
        totals = [uncounted.allreduce(np.asarray(own), group) for _ in range(2)]
    else:
        totals = [coded_allreduce(own, group) for _ in range(2)]
    for total in totals:
        assert_sum(group, total, VECTOR)
    assert_same_bits(comm, totals)


def test_a_pytree_is_no_numpy_array(transport, group, own):
    array = np.asarray(own)
    for wrong in ([1.0, 2.0], (array, array), {"w": array}, None):
        with pytest.raises(
            TypeError, match=r"jaxcoded\.coded_allreduce sums lists and"
        ):
            uncounted.allreduce(wrong, group)


@redundant
def test_numpy_arrays_of_ranks_left_out(comm, group, own):
    last = SIZE - 1
    array = np.asarray(own) * (np.nan if RANK == last else 1)
    total = uncounted.allreduce(array, group, skip=RANK == last)
    mask = [rank == last for rank in range(SIZE)]
    erased = uncounted.allreduce(array, group, erasures=mask)
    assert_sum(group, [total, erased], [VECTOR, VECTOR])
    assert_same_bits(comm, [total, erased])
    with pytest.raises(jaxcoded.TooManyErasures, match="rank 0 is the root"):
        uncounted.allreduce(array, group, erasures=[True] * SIZE)
    assert_sum(group, uncounted.allreduce(np.asarray(own), group), VECTOR)


@several
@pytest.mark.parametrize("strategy", [jaxcoded.Coded(stragglers=0), jaxcoded.Shared()])
def test_a_rank_that_every_sum_needs_skips(comm, transport, strategy):
    """The error names the rank on every rank, also without a deadline."""
    with jaxcoded.CodedGroup(comm, strategy, transport=transport) as group:
        own = np.asarray(contribution(group, VECTOR))
        text = r"these contribute nothing: rank 1 \(skip=True\); any 0 of its "
        with pytest.raises(jaxcoded.TooManyErasures, match=text):
            uncounted.allreduce(own, group, skip=RANK == 1)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)


@several
def test_numpy_arrays_that_do_not_fit(comm, group, own):
    """The error has its class, in that call or the next one."""
    own, erred = np.asarray(own), []
    for number in range(3):
        array = own[:4] if number == 0 and RANK == SIZE - 1 else own
        try:
            total = uncounted.allreduce(array, group)
        except jaxcoded.GroupMismatch as error:
            assert str(error).startswith("float64[")
            erred.append(number)
        else:
            assert_sum(group, total, VECTOR)
        wait_for_all(comm)
        time.sleep(0.05)
    assert erred in ([0], [1], [0, 1])


MEMORY = np.ones(5)


@pytest.mark.parametrize(
    ("array", "options", "error", "message"),
    [
        (MEMORY[1:], {"out": MEMORY[:-1]}, ValueError, "out overlaps the array in"),
        (MEMORY[:-1], {"out": MEMORY[1:]}, ValueError, "out overlaps the array in"),
        (np.ones((4, 4))[:, ::2], {}, ValueError, "must be contiguous"),
        (np.ones(4), {"out": np.ones(8)[::2]}, ValueError, "must be contiguous"),
        (np.ones(4), {"out": np.ones(3)}, ValueError, r"out must be like the sum"),
        (np.ones(4), {"out": np.ones(4, "f")}, ValueError, "out must be like"),
        (np.ones(4), {"out": [0.0] * 4}, (TypeError, ValueError), "out"),
        (np.ones(4, complex), {"out": np.ones(4)}, ValueError, "out must be like"),
        (np.ones(4), {"erasures": np.zeros(SIZE + 1, bool)}, ValueError, "erasures"),
        (np.ones(4), {"erasures": np.zeros(0, bool)}, ValueError, "erasures"),
        (np.ones(4), {"erasures": [0] * SIZE}, ValueError, "erasures must be bool"),
    ],
)
def test_invalid_numpy_arrays(group, own, array, options, error, message):
    with pytest.raises(error, match=message):
        uncounted.allreduce(array, group, **options)
    assert_sum(group, uncounted.allreduce(np.asarray(own), group), VECTOR)


def test_results_are_not_written_into_what_is_read_only(group, own):
    """Read-only memory, such as that of a JAX array, is not overwritten."""
    array = np.asarray(own)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only|writeable"):
        uncounted.allreduce(array, group, out=array)


@slices
def test_numpy_arrays_have_no_slices(comm, transport):
    with (
        jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(slices=2), transport=transport
        ) as sliced,
        pytest.raises(TypeError, match="need a group without slices"),
    ):
        uncounted.allreduce(np.ones(4), sliced)


# Threads.


def test_a_group_for_each_thread(comm, group, transport, own):
    own = np.asarray(own)
    totals = {}

    def work(name, group):
        for k in range(20):
            totals[name, k] = uncounted.allreduce((k + 1) * own, group) / (k + 1)

    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:
        thread = threading.Thread(target=work, args=("other", other))
        thread.start()
        work("group", group)
        thread.join()
    for total in totals.values():
        np.testing.assert_allclose(total, VECTOR.sum(0), rtol=1e-9)
    assert_same_bits(comm, [totals[key] for key in sorted(totals)])


@pytest.fixture
def pending(group, own):
    """Return a function that returns a sum. On rank 0, JAX still computes this rank's part when it returns."""

    @jax.jit
    def slowly(x, m):
        times = 20 if RANK == 0 else 1
        m = jax.lax.fori_loop(0, times, lambda _, m: jnp.tanh(m @ m), m)
        return x + 0 * m[0, 0]

    reduce = jax.jit(lambda x: coded_allreduce(x, group))

    def pending():
        part = slowly(own, jnp.ones((400, 400)))
        if RANK:
            jax.block_until_ready(part)
        return reduce(part)

    return pending


def test_a_call_on_numpy_arrays_comes_after_pending_calls(group, own, pending):
    for _ in range(3):
        total = pending()
        double = uncounted.allreduce(2 * np.asarray(own), group)
        assert_sum(group, total, VECTOR)
        assert_sum(group, double, 2 * VECTOR)


def test_wrong_arguments_do_not_fail_pending_calls(group, own, pending):
    for _ in range(3):
        total = pending()
        with pytest.raises(TypeError, match="leaf is a str"):
            coded_allreduce("text", group)
        assert_sum(group, total, VECTOR)
        assert_sum(group, coded_allreduce(own, group), VECTOR)


@several
@pytest.mark.parametrize("second", ["collective", "started"])
@pytest.mark.parametrize("culprit", sorted({0, SIZE - 1}))
def test_two_threads_in_one_group(comm, group, transport, culprit, second):
    """No rank knows which of the two threads met the other ranks. So both get an error,
    as do all ranks, and the group makes no more sums.
    """
    other = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    own = contribution(group, VECTOR)

    def call():
        uncounted.allreduce(own, other)

    def start():
        jax.block_until_ready(coded_allreduce_start(own, other))
        jaxcoded.effects_barrier()

    heard = []

    def refused(call):
        # the round in which two threads called on one rank, and one more round
        for _ in range(2):
            try:
                call()
            except (jaxcoded.errors.CodedError, JaxRuntimeError) as error:
                heard.append(str(error))
                return

    if culprit == RANK:
        first = threading.Thread(target=refused, args=(call,))
        first.start()
        wait_until(lambda: "calls round 1" in other._session.transport.status())
        refused(call if second == "collective" else start)
        wait_for_all(comm)
        first.join()
        refused(call)
        assert len(heard) == 3, heard
    else:
        wait_for_all(comm)
        refused(call)
        refused(call)
        assert len(heard) == 2, heard
    assert all("two threads called" in words for words in heard), heard
    # within its timeout; otherwise it warns, and warnings raise errors here
    other.close()


# Ranks that are too late.

STEPS = 180
SCALE = 1.0 + np.arange(BATCH)
RAMP = np.linspace(1.0, 2.0, 2**16)


def assert_state(group, state):
    """Check that the state is ``Σ_k (1 + k mod 3)`` times the sum over the batch."""
    factor = sum(1 + k % 3 for k in range(int(state["step"])))
    expected = factor * SCALE.sum() * RAMP
    tolerance = 1e-13 * group.plan.amplification
    np.testing.assert_allclose(state["x"], expected, rtol=tolerance)


@redundant
@late_ranks
def test_resync(comm, group, transport, late):
    """A rank later than every history continues from a snapshot."""
    short = jaxcoded.CodedGroup(
        comm, group.plan, transport=transport, options=jaxcoded.Options(history_bytes=1)
    )
    own = contribution(short, SCALE) * RAMP
    state = {"x": np.zeros_like(own), "step": 0}
    compiled = jax.jit(lambda x: coded_allreduce(x, short))

    def train(until, reduce):
        while state["step"] < until:
            state["x"] = state["x"] + reduce((1 + state["step"] % 3) * own)
            state["step"] = state["step"] + 1
            short.snapshot(state)

    by_host = functools.partial(uncounted.allreduce, group=short)
    train(5, by_host)
    assert_state(short, state)
    wait_for_all(comm)
    if RANK != late:
        train(STEPS, by_host)
    wait_for_all(comm)
    if RANK == late:
        lost = r"jaxcoded\.Desynchronized: "
        with pytest.raises(JaxRuntimeError, match=lost):
            train(STEPS, lambda x: np.asarray(compiled(x)))
        assert 5 <= state["step"] < STEPS
        assert_state(short, state)  # the snapshot is right
        for _ in range(2):
            with pytest.raises(JaxRuntimeError, match=lost):
                jax.block_until_ready(compiled(own))
            with pytest.raises(jaxcoded.Desynchronized, match=r"group\.resync"):
                by_host(own)
        like = {
            "x": jax.ShapeDtypeStruct(own.shape, own.dtype),
            "step": jax.ShapeDtypeStruct((), np.int64),
        }
        # as in a new group, the rank may also lack the state that a new root has passed on
        short._session.ahead = 0
        short._session.transport.expect_state()
        with pytest.raises(jaxcoded.CodedError, match="first send the root's state"):
            short.snapshot(state)
        state = jax.device_get(short.resync(like))
        assert short.alike
        assert STEPS - 16 <= state["step"] <= STEPS
        assert_state(short, state)
        train(STEPS, lambda x: np.asarray(compiled(x)))
    wait_for_all(comm)
    train(STEPS + 3, by_host)
    assert_state(short, state)
    assert_same_bits(comm, state["x"])
    short.close()


def test_snapshots(comm, group, transport):
    """Ranks below the root have snapshots, in step or not."""
    state = {"x": np.arange(3.0), "deep": [np.int32(7), np.ones((2, 0), "float16")]}
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:
        with pytest.raises(jaxcoded.Desynchronized, match="has a usable snapshot"):
            other.resync(state)
        wait_for_all(comm)
        kept = []
        for number in range(7):
            total = uncounted.allreduce(np.zeros(2), other)
            state["x"] = state["x"] + 1 + total[0]
            kept.append(other.snapshot(state, every=3))
        assert kept == [True, False, False, True, False, False, True]
        wait_for_all(comm)
        if RANK == other.plan.root:
            with pytest.raises(jaxcoded.Desynchronized, match="no rank above rank 0"):
                other.resync(state)
        else:
            assert other.rounds == 7
            back = other.resync(jax.tree.map(np.zeros_like, state))
            assert other.rounds == 7
            jax.tree.map(np.testing.assert_array_equal, back, state)
            assert [leaf.dtype for leaf in jax.tree.leaves(back)] == [
                leaf.dtype for leaf in jax.tree.leaves(state)
            ]
        wait_for_all(comm)


@several
@pytest.mark.parametrize(
    "like",
    [
        {"x": np.zeros(4), "step": 0},
        {"x": np.zeros(3, np.float32), "step": 0},
        {"x": np.zeros(3)},
        {"another name": np.zeros(3), "step": 0},
    ],
    ids=["shape", "dtype", "leaves", "structure"],
)
def test_a_snapshot_of_another_state(comm, group, transport, like):
    """The snapshot is refused, and the rank stays in its round."""
    state = {"x": np.arange(3.0), "step": 3}
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:
        for _ in range(2):
            uncounted.allreduce(np.zeros(2), other)
        other.snapshot(state)
        wait_for_all(comm)
        if RANK != other.plan.root:
            with pytest.raises(
                ValueError, match="the snapshot does not fit this state"
            ):
                other.resync(like)
            assert other.rounds == 2
        wait_for_all(comm)


@pytest.mark.skipif(SIZE < 4, reason="no redundancy")
def test_a_snapshot_from_after_two_replans(comm, transport):
    """The other ranks are back at their first plan, but calls name each replan."""
    state = {"x": np.arange(3.0)}
    strategy = jaxcoded.Coded(stragglers=1)
    first = jaxcoded.CodedGroup(comm, strategy, transport=transport)
    uncounted.allreduce(np.zeros(2), first)
    wait_for_all(comm)

    def replanned():
        other = first.replan(1.0 + np.arange(SIZE) % 2).replan(np.ones(SIZE))
        assert other.plan.fingerprint == first.plan.fingerprint
        return other

    late = RANK == SIZE - 1
    if not late:
        other = replanned()
        other.snapshot(state)
    wait_for_all(comm)
    if late:
        with pytest.raises(jaxcoded.Desynchronized, match="has replanned since"):
            first.resync(state)
        other = replanned()
    wait_for_all(comm)
    other.close()


# What users can observe.


@several
def test_other_threads_get_their_turn(comm, transport):
    """Other threads need not wait until the engine has nothing more to do for a round."""
    pieces = 128
    own = np.ones(pieces << 18 >> 3)  # pieces of 256 KiB each
    by_root = jaxcoded.Options(sections_from=0, piece_bytes=256 << 10)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport, options=by_root
    ) as group:
        root = group.plan.root
        uncounted.allreduce(np.ones(1), group)
        wait_for_all(comm)
        if RANK != root:
            uncounted.allreduce(own, group)
            return
        wait_until(
            lambda: f"offers {pieces} of round 2" in group._session.transport.status()
        )
        seen, over = set(), threading.Event()

        def look():
            while not over.is_set():
                decoded = re.search(
                    r"decoded (\d+) of", group._session.transport.status()
                )
                seen.add(int(decoded[1]))

        looking = threading.Thread(target=look)
        looking.start()
        uncounted.allreduce(own, group)
        over.set()
        looking.join()
        assert len(seen) > 4, seen  # states seen in 32 turns of the engine


def test_a_snapshot_holds_up_no_other_thread(comm, transport):
    state = np.ones(1 << 27, np.uint8)

    def looks_meanwhile():
        """Return how often another thread has read the group while a snapshot was
        taken.
        """
        over, looks = threading.Event(), []

        def look():
            while not over.is_set():
                group._session.transport.status()
                looks.append(1)

        looking = threading.Thread(target=look)
        looking.start()
        wait_until(lambda: looks)
        looks.clear()
        group._session.transport.keep_state(state)
        count = len(looks)
        over.set()
        looking.join()
        return count

    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        wait_for_all(comm)
        if RANK == group.plan.root:
            # the thread can read once before and once after the snapshot without a turn; other processes may delay the
            # thread
            wait_until(lambda: looks_meanwhile() > 2)
        wait_for_all(comm)


@several
def test_an_interrupt_while_a_rank_waits(comm, transport):
    """The round continues on all ranks. Control-C takes effect once the round is
    over."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        own, root = np.asarray(contribution(group, VECTOR)), group.plan.root
        children = group.plan.coded_children(root)

        def interrupt():
            wait_until(lambda: "calls round 1" in group._session.transport.status())
            signal.raise_signal(signal.SIGINT)
            for child in children:
                comm.send(None, child)

        wait_for_all(comm)
        if RANK == root:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                uncounted.allreduce(own, group)
                time.sleep(10)
        else:
            if RANK in children:
                comm.recv(source=root)
            assert_sum(group, uncounted.allreduce(own, group), VECTOR)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)


def test_report_of_whom_a_rank_waits_for(comm, transport, caplog):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
        transport=transport,
        options=jaxcoded.Options(deadline=0.7 * SLOWNESS),
    ) as group:
        parents, waited_for = group.plan.parents, SIZE - 1
        wait_for_all(comm)
        if RANK == SIZE - 1:
            time.sleep(1.6 * SLOWNESS)
        lags = []
        asking = logging.Handler()
        asking.emit = lambda record: lags.append(group.lag())
        logging.getLogger("jaxcoded").addHandler(asking)
        with caplog.at_level(logging.INFO, "jaxcoded"):
            total = uncounted.allreduce(np.asarray(contribution(group, VECTOR)), group)
        logging.getLogger("jaxcoded").removeHandler(asking)
        assert_sum(group, total, VECTOR)
        texts = [r.getMessage() for r in caplog.records if r.name == "jaxcoded"]
        # from one rank to the next on the way up
        while waited_for != RANK and parents[waited_for] not in (RANK, -1):
            waited_for = parents[waited_for]
        # the machine may make other ranks late, too
        if parents[waited_for] != RANK:
            assert not any(f"waits for rank {SIZE - 1};" in words for words in texts)
        else:
            children = len(group.plan.coded_children(RANK))
            # any rank that gets the report may ask for the lag
            assert lags == [0] * len(texts)
            assert texts[-1] == (
                f"group {group._session.index}, round 1: rank {RANK} waits for rank "
                f"{waited_for}; it needs {children} of its {children} children"
            )


@several
def test_groups_that_are_called_in_another_order(comm, transport, caplog):
    """A rank that waits for another rank reports that this rank waits in another group."""
    last, logger = SIZE - 1, logging.getLogger("jaxcoded")

    def tell(_):
        logger.removeHandler(tells)
        comm.send(None, last)

    def make(**options):
        return jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
            transport=transport,
            options=jaxcoded.Options(**options),
        )

    with make(deadline=0.1) as group, make() as other:
        own = np.asarray(contribution(group, VECTOR))
        parent = group.plan.parents[last]
        if RANK == last:
            ahead = threading.Thread(target=uncounted.allreduce, args=(own, other))
            ahead.start()
            comm.recv(source=parent)
            total = uncounted.allreduce(own, group)
            ahead.join()
        else:
            if RANK == parent:
                offered = re.compile(f"child {last} offers [1-9][0-9]* of round 1")
                wait_until(lambda: offered.search(other._session.transport.status()))
                tells = logging.Handler()
                tells.emit = tell
                logger.addHandler(tells)
            with caplog.at_level(logging.INFO, "jaxcoded"):
                total = uncounted.allreduce(own, group)
            uncounted.allreduce(own, other)
        assert_sum(group, total, VECTOR)
    if RANK == parent:
        words = f"; but in group {other._session.index} .*{last} .* in round 1, which rank {RANK} has not called"
        assert re.search(words, caplog.text), caplog.text


def test_memory_without_late_ranks(comm, transport):
    """Without late ranks, a rank keeps the memory of a round or two."""
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0, fanout=3 if SIZE == 13 else None),
        transport=transport,
        options=jaxcoded.Options(sections_from=0),
    ) as group:
        array = np.ones(2**17)
        for _ in range(20):
            uncounted.allreduce(array, group, out=array)
            array.fill(1)
        wait_for_all(comm)
        figures = group.statistics()
        assert figures["history_bytes"] <= 2.5 * array.nbytes
        assert figures["memory_bytes"] <= 16 * array.nbytes
        children = len(group.plan.coded_children(RANK))
        above = RANK != group.plan.root
        assert figures["fetched_bytes"] <= 20 * (children + above) * array.nbytes
        wait_for_all(comm)


# Which transport a group gets.


def test_a_rank_without_the_engine(comm, transport, monkeypatch):
    """If one rank lacks the engine, all ranks use the other transport."""
    last = SIZE - 1
    if RANK == last:
        monkeypatch.setattr(engine, "missing", lambda: "no compiler here")
    warns = pytest.warns(
        RuntimeWarning,
        match=rf"falling back on the mpi4jax.*; rank {last}: no compiler",
    )
    with warns if RANK == 0 else contextlib.nullcontext() as seen:
        group = jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0))
    assert RANK != 0 or seen[0].filename == __file__
    with group:
        assert isinstance(group._session.transport, Mpi4jax)
        assert coded_allreduce(1.0, group) == max(SIZE, 1)
    message = f'transport="engine" cannot be used: rank {last}: no compiler here'
    with pytest.raises(ValueError, match=message):
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport="engine")


@pytest.mark.parametrize("step", ["introduce", "open"])
def test_a_rank_that_cannot_open_the_engine(comm, transport, monkeypatch, step):
    """If one rank cannot open the engine, no rank gets the group, and all ranks can make another group."""
    last = SIZE - 1

    def fail(*_):
        raise RuntimeError("out of descriptors")

    with monkeypatch.context() as broken:
        if RANK == last:
            broken.setattr(engine._engine, step, fail)
        for _ in range(3):
            with pytest.raises(jaxcoded.CodedError, match=rf"^rank {last}: .* of desc"):
                jaxcoded.CodedGroup(
                    comm, jaxcoded.Coded(stragglers=0), transport=transport
                )
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        assert coded_allreduce(1.0, group) == SIZE


@pytest.mark.skipif(SIZE > 1, reason="a process of its own")
def test_a_process_that_cannot_share_memory(transport):
    """The engine reports that it cannot start, before any rank relies on shared memory."""
    program = """
import resource, signal
from mpi4py import MPI
import jaxcoded
from jaxcoded.transport import engine
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
assert engine.missing().startswith("the engine cannot start: "), engine.missing()
try:
    jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=0), transport="engine")
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0: the engine cannot start: no memory can be" in done.stdout
    assert "ftruncate failed: File too large" in done.stdout


# What ranks of one host share.


def mapped(what):
    """Return inode, size and access of every mapping of an engine's page, or memory, in
    this process.
    """
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    for line in lines:
        if f"/memfd:jaxcoded-{what}" in line:
            place, access, _, _, inode, *_ = line.split()
            first, last = (int(number, 16) for number in place.split("-"))
            yield int(inode), last - first, access


def own_file(what):
    """Return the descriptor of this process's own file."""
    for number in os.listdir("/proc/self/fd"):
        # the descriptor of the listing itself is gone
        with contextlib.suppress(FileNotFoundError):
            if f"/memfd:jaxcoded-{what}" in os.readlink(f"/proc/self/fd/{number}"):
                return int(number)
    raise AssertionError(f"no {what}")


@pytest.mark.parametrize("what", ["page", "memory"])
def test_others_cannot_harm_what_is_shared(comm, group, what):
    """Shared files cannot be truncated, which would kill all processes that map them,
    and other ranks can write only the page's wake-ups.
    """
    file = own_file(what)
    seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    uncounted.allreduce(np.ones(1 << 16), group)  # ranks fetch pieces from each other
    inode = os.fstat(file).st_ino
    others = [(size, access) for at, size, access in mapped(what) if at != inode]
    expected = {"r--s"} | ({"rw-s"} if what == "page" else set()) if SIZE > 1 else set()
    assert {access for _, access in others} == expected
    assert {size for size, access in others if access == "rw-s"} <= {64 << 10}


# Messages of ranks to each other.


@not_alone
def test_more_vectors_than_an_inbox_holds_addresses_of(group):
    """There are more vectors than an inbox holds addresses, and more than 16 bits can count."""
    count = 70_000
    scale = per_example()
    weight = contribution(group, scale)
    vectors = [np.full(1 + i % 3, float(i)) for i in range(count)]
    mine = [v * weight for v in vectors]
    total = [np.empty_like(v) for v in vectors]
    flat = np.concatenate(vectors)
    for _ in range(2):
        group._session.transport.host_round(
            Round(group._session.index, f"{count} vectors"), mine, total
        )
        error = np.abs(np.concatenate(total) - flat * scale.sum())
        assert np.all(error <= rounding(group, "float64") * flat * np.abs(scale).sum())


@several
def test_a_longer_text_than_an_inbox_holds(comm, transport):
    words = f"{'a long story ' * 10_000}of rank "
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        one = np.ones(1)
        # the error shows the beginning and the end of the text
        text = r"a long story .* \.\.\. .* a long story of rank 1"
        with pytest.raises(jaxcoded.GroupMismatch, match=text):
            group._session.transport.host_round(
                Round(group._session.index, words + str(int(RANK == SIZE - 1))),
                [one],
                [one],
            )
        assert uncounted.allreduce(np.ones(1), group) == SIZE


@several
def test_impossible_messages(comm, transport):
    """Impossible messages fail a round, and later messages are read."""
    nothing = np.zeros(7, np.uint8)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:
        assert uncounted.allreduce(np.ones(1), group) == SIZE
        root, child = group.plan.root, group.plan.coded_children(group.plan.root)[-1]
        for _ in range(3):
            wait_for_all(comm)
            if RANK == child:
                group._session.transport._own.Send(nothing, dest=root, tag=1)
            wait_for_all(comm)
            text = rf"rank {root} cannot read a message from rank {child} \("
            with pytest.raises(jaxcoded.CodedError, match=text):
                for _ in range(100):
                    uncounted.allreduce(np.ones(1), group)
            assert uncounted.allreduce(np.ones(1), group) == SIZE


def test_bcast_of_odd_lengths(comm, group):
    """Broadcast bytes, in pieces of odd lengths."""
    values = lambda rank: {
        "bool": (np.arange(300_001) + rank) % 3 == 0,
        "single": np.arange(100_003, dtype=np.float32) + rank,
    }
    got = tree_bcast(values(RANK), group)
    jax.tree.map(np.testing.assert_array_equal, got, values(group.plan.root))
    assert_same_bits(comm, got)


@redundant
def test_skipped_is_missing(group):
    """A rank that skips counts as a straggler, whatever it contributes and whether or
    not the round is decided.
    """
    gradients = per_example(5)
    late = group.size - 1
    reduce = jax.jit(lambda x, skip: coded_allreduce(x, group, skip=skip))
    own = contribution(group, gradients)
    for round_ in range(6):
        mine = np.nan * own if group.rank == late else own
        assert_sum(group, reduce(mine, group.rank == late), gradients)
        assert_sum(group, coded_allreduce(own, group, skip=round_ < 0), gradients)
    with pytest.raises(
        ValueError, match=r"skip must be True or False, got float64\[\]"
    ):
        coded_allreduce(own, group, skip=0.5)


@several
def test_an_error_that_comes_late(comm, transport):
    """Ranks pass the error on until they settle, and then all continue in step."""
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport=transport
    ) as group:

        @jax.jit
        def step(x):
            work = jax.lax.fori_loop(
                0, 20, lambda i, a: jnp.sin(a @ a), jnp.ones((200, 200))
            )
            return coded_allreduce(x + 0 * work[0, 0], group)

        gradients = per_example(3)
        own = contribution(group, gradients)
        odd = np.ones(4) if comm.rank == comm.size - 1 else own
        assert_sum(group, step(own), gradients)
        with pytest.raises(jax.errors.JaxRuntimeError, match="GroupMismatch"):
            jax.block_until_ready(step(odd))
        jaxcoded.effects_barrier()
        comm.Barrier()
        for _ in range(3):
            assert_sum(group, step(own), gradients)


def test_snapshots_keep_kinds(transport):
    """Python numbers and NumPy arrays keep their types and bits."""
    state = {
        "step": 3,
        "sampler": np.int64(2**40 + 5),
        "w": jnp.ones(3, jnp.bfloat16),
        "x": np.arange(3, dtype=">i4"),
        "key": jax.random.split(jax.random.key(5)),
    }
    with jax.enable_x64(False):
        back = snapshots.from_bytes(snapshots.to_bytes(state).tobytes(), state)
    assert {k: type(v) for k, v in back.items()} == {
        k: type(v) for k, v in state.items()
    }
    assert (back["step"], back["sampler"]) == (3, 2**40 + 5)
    np.testing.assert_array_equal(back["x"], state["x"])
    assert (back["key"] == state["key"]).all()


@pytest.mark.parametrize("leaf", ["adam", np.array(["a"]), np.array([{}]), len])
def test_snapshots_are_of_numbers(transport, leaf):
    """Values that a snapshot cannot restore are refused at once."""
    with pytest.raises(TypeError, match=r"leaf at \['a'\] is a .*leave it out"):
        snapshots.to_bytes({"a": leaf})


@pytest.mark.parametrize(
    "wrong", [{"history_bytes": -1}, {"history_bytes": 1e9}, {"deadline": -1}]
)
def test_misuse_of_limits(comm, transport, wrong):
    """Every rank gets an error, even if only one rank has a wrong argument."""

    def open_with(options):
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0),
            transport=transport,
            options=jaxcoded.Options(**options),
        )

    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        open_with(wrong)
    if comm.size > 1:
        mine = wrong if comm.rank == comm.size - 1 else {}
        with pytest.raises(jaxcoded.GroupMismatch, match=next(iter(wrong))):
            open_with(mine)
