"""Shared work: whichever rank computes a block, every sum contains the whole batch, and has the same bits on every
rank.
"""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, several
from mpi4py import MPI
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from together import SLOWNESS, assert_odd_one_out, finish, wait_for_all, wait_until
from uncounted import coded_allreduce, coded_allreduce_start

import jaxcoded
from jaxcoded import coded_allreduce_done

pytestmark = [engine_only, pytest.mark.ranks(2, 4, exhaustive=(7,))]

RANK = MPI.COMM_WORLD.rank
WORK = jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=3)
WIDTH = 5
VECTOR = per_example(WIDTH)


@pytest.fixture(scope="module")
def work(comm, transport):
    """A group with shared work, each block on up to three ranks."""
    with jaxcoded.CodedGroup(comm, WORK, transport=transport) as group:
        yield group


class Naps:
    """The seconds that this rank sleeps in every block that it computes."""

    def __init__(self):
        self.next = lambda: 0.0

    def __call__(self, y):
        time.sleep(self.next())
        return y


naps = Naps()


def loss(params, batch):
    """Return the squared error of a linear model, after a sleep."""
    y = batch["y"]
    y = jax.pure_callback(naps, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    return (batch["x"] @ params["w"] + params["b"] - y) ** 2 / 2


def by_hand(params, batch):
    """Return the sum of losses and its gradient, and the sizes of the terms, in
    float64.
    """
    params, batch = jax.tree.map(lambda leaf: np.asarray(leaf, float), (params, batch))
    off = batch["x"] @ params["w"] + params["b"] - batch["y"]
    each = off[:, None] * batch["x"]
    sums = (off**2).sum() / 2, {"w": each.sum(0), "b": off.sum()}
    sizes = (off**2).sum() / 2, {"w": abs(each).sum(0), "b": abs(off).sum()}
    return sums, sizes


def problem(batch_size, seed=0, dtype="float64"):
    random = np.random.default_rng(seed)
    params = {"w": random.normal(size=WIDTH), "b": random.normal()}
    x = random.normal(size=(batch_size, WIDTH))
    batch = {"x": x, "y": random.normal(size=batch_size)}
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (params, batch))


def held(batch, indices):
    """Return only this rank's examples, so that no other rank could compute the sum."""
    return jax.tree.map(lambda leaf: leaf[indices], batch)


def assert_right(comm, actual, params, batch, rounding=1e-13, divisor=1):
    """Check that ``(loss, gradient)`` is the sum of the whole batch, with the same bits
    on all ranks.
    """
    expected, sizes = by_hand(params, batch)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e, size in zip(*map(jax.tree.leaves, (actual, expected, sizes))):
        error = abs(np.asarray(a, float) * divisor - e)
        assert np.all(error <= rounding * size), (a * divisor, e, error / size)
    assert_same_bits(comm, actual)


def stepped(group, **options):
    options = {"mean": False} | options
    return jax.jit(jaxcoded.coded_value_and_grad(loss, group, **options))


# Sums.


@pytest.mark.ranks(2, 4, 7)
@pytest.mark.parametrize("batch_size, mean", [(1, False), (2, True), (37, True)])
def test_exact(comm, work, batch_size, mean):
    """Sums are exact also for fewer examples than blocks, and for blocks of different
    sizes.
    """
    params, batch = problem(batch_size)
    part = work.batch(batch_size)
    step = stepped(work, mean=mean, residual=True)
    out = step(params, part.of(held(batch, part.indices)))
    divisor = batch_size if mean else 1
    assert_right(comm, out.value, params, batch, divisor=divisor)
    assert out.residual == 0
    assert out.token is None


@pytest.mark.parametrize(
    "dtype, wire, rounding",
    [
        ("float32", None, 64 * 2.0**-24),
        # rounded once by each rank, and once by the root
        ("float32", "bfloat16", 2.02 * 2.0**-8),
        # the precision of losses and blocks, too
        ("bfloat16", None, 8 * 2.0**-8),
    ],
    ids=["single", "narrow wire", "narrow"],
)
def test_dtypes(comm, work, dtype, wire, rounding):
    params, batch = problem(31, dtype=jnp.dtype(dtype))
    part = work.batch(31)
    total, grads = stepped(work, wire_dtype=wire)(
        params, part.of(held(batch, part.indices))
    )
    assert total.dtype == jnp.float32
    for name, grad in grads.items():
        assert grad.dtype == params[name].dtype
    assert_right(comm, (total, grads), params, batch, rounding)


def test_aux_is_of_the_blocks_that_a_rank_has_computed(comm, work):
    """Auxiliary data cover the rank's own blocks, and each block has been computed."""

    def with_aux(params, batch):
        return loss(params, batch), {"y": batch["y"], "one": 1}

    params, batch = problem(29)
    part = work.batch(29)
    step = jax.jit(
        jaxcoded.coded_value_and_grad(with_aux, work, has_aux=True, mean=False)
    )
    (total, aux), grads = step(params, part.of(held(batch, part.indices)))
    assert_right(comm, (total, grads), params, batch)
    blocks = work.plan.placement.held(comm.rank)
    computed = aux["one"] == 1
    assert computed.shape == (len(blocks),)
    y = batch["y"][part.indices].reshape(len(blocks), -1)
    np.testing.assert_array_equal(aux["y"], computed[:, None] * y)
    mine = {block for block, here in zip(blocks, computed) if here}
    everybody = set().union(*comm.allgather(mine))
    assert everybody == set(range(len(work.plan.placement.holders)))


@several
def test_a_root_that_does_not_compute(comm, transport):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Shared(replicas=int(SIZE > 2), blocks=3, root_computes=False),
        transport=transport,
    ) as group:
        params, batch = problem(17)
        part = group.batch(17)
        assert part.weights.any() == (comm.rank != 0)
        step = stepped(group, mean=True)
        for _ in range(2):
            actual = step(params, part.of(held(batch, part.indices)))
            assert_right(comm, actual, params, batch, divisor=17)


def test_a_plain_sum_needs_every_rank(comm, work):
    """A plain sum needs every rank, because no rank computes another rank's part."""
    total = jax.jit(lambda v: coded_allreduce(v, work))(contribution(work, VECTOR))
    assert_sum(work, total, VECTOR)
    assert_same_bits(comm, total)


# Rounds that follow each other.


@pytest.mark.ranks(2, 4, 7)
@pytest.mark.parametrize("form", ["effect", "token"])
def test_rounds_of_all_kinds_in_one_program(comm, work, form):
    """Shared, plain and started rounds alternate in a ``scan``; the last started round is done after a shared round."""
    params, batch = problem(BATCH)
    part = work.batch(BATCH)
    step = jaxcoded.coded_value_and_grad(loss, work)
    local = held(batch, part.indices)
    own = contribution(work, VECTOR)

    def one(state, factor):
        params, token = state
        if token is None:
            handle = coded_allreduce_start(factor * own, work)
            value, grads = step(params, part.of(local))
            plain = coded_allreduce(2 * factor * own, work)
            started = coded_allreduce_done(handle)
        else:
            handle, _, token = coded_allreduce_start(factor * own, work, token=token)
            (value, grads), _, token = step(params, part.of(local), token=token)
            plain, _, token = coded_allreduce(2 * factor * own, work, token=token)
            started, _, token = coded_allreduce_done(handle, token=token)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, token), (value, started, plain)

    factors = np.arange(1.0, 4)
    token = jnp.int32(0) if form == "token" else None
    (trained, _), (values, started, plain) = finish(
        jax.jit(lambda *args: jax.lax.scan(one, *args))((params, token), factors)
    )
    for number, factor in enumerate(factors):
        (total, grads), _ = by_hand(params, batch)
        np.testing.assert_allclose(values[number], total / BATCH, rtol=1e-12)
        assert_sum(work, started[number], VECTOR, factor)
        assert_sum(work, plain[number], VECTOR, 2 * factor)
        params = jax.tree.map(lambda p, g: p - 0.1 * g / BATCH, params, grads)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12), trained, params
    )
    assert_same_bits(comm, (trained, values, started, plain))


# Ranks that are slow, or late.

SLOWEST = 0.06  # seconds for a block


def randomly(number):
    random = np.random.default_rng([number, RANK])
    return lambda: random.choice([0, 0, 0.002, SLOWEST], p=[0.4, 0.2, 0.3, 0.1])


def one_far_slower(number):
    """Return this rank's sleep: another rank is slow in every round."""
    slow = RANK == (SIZE - 1 - number) % SIZE
    return lambda: SLOWEST if slow else 0.0


def all_but_one(number):
    slow = RANK != number % SIZE
    return lambda: SLOWEST / 3 if slow else 0.0


def one_block_far_slower(number):
    """Return the last rank's sleep, which is long in its third block, when its vector already has other blocks."""
    blocks = iter([0.0, 0.0, 4 * SLOWEST])
    return lambda: next(blocks, 0.0) if RANK == SIZE - 1 else 0.0


@pytest.fixture(scope="module")
def steps(work):
    """Return rounds with a batch of 23, whose computation sleeps."""
    part = work.batch(23)
    step = stepped(work, mean=True)
    return lambda params, batch: finish(
        step(params, part.of(held(batch, part.indices)))
    )


@pytest.fixture
def asleep():
    yield naps
    naps.next = lambda: 0.0


@pytest.mark.ranks(2, 4, 7)
@several
@pytest.mark.parametrize(
    "slowness", [randomly, one_far_slower, all_but_one, one_block_far_slower]
)
def test_slow_ranks(comm, work, steps, asleep, slowness):
    actual = []
    for number in range(4):
        asleep.next = slowness(number)
        params, batch = problem(23, seed=number)
        actual.append((steps(params, batch), params, batch))
    for out, params, batch in actual:
        assert_right(comm, out, params, batch, divisor=23)


@several
@pytest.mark.parametrize("late", [SIZE - 1, 0])
def test_a_rank_that_comes_late(comm, work, steps, late):
    """The rank comes after the other ranks have computed the whole batch; all ranks
    contribute to the next round."""
    wait_for_all(comm)
    actual = []
    for number in range(3):
        if RANK == late and number == 1:
            time.sleep(0.4)
        params, batch = problem(23, seed=number)
        actual.append((steps(params, batch), params, batch))
    for out, params, batch in actual:
        assert_right(comm, out, params, batch, divisor=23)


@several
def test_two_threads_that_compute(comm, transport):
    """Both threads get an error, as do all ranks, and no rank waits for the rest of the
    round.
    """
    group = jaxcoded.CodedGroup(comm, WORK, transport=transport)
    part = group.batch(BATCH)
    summed = jax.jit(
        jaxcoded.coded_value_and_grad(lambda w, x: w * x, group, mean=False)
    )
    jax.block_until_ready(summed(1.0, part.of(jnp.ones(len(part.indices)))))
    heard = []

    def refused():
        try:
            for _ in range(2):  # the other ranks may still get the sum of this round
                jax.block_until_ready(summed(1.0, part.of(jnp.ones(len(part.indices)))))
        except JaxRuntimeError as error:
            heard.append(str(error))

    wait_for_all(comm)
    if RANK == SIZE - 1:
        first = threading.Thread(target=refused)
        first.start()
        # wait until this rank has computed all of its blocks
        waits = re.compile("calls round 2, .*, lent")
        wait_until(lambda: waits.search(group._session.transport.status()))
        with pytest.raises(jaxcoded.errors.CodedError, match="two threads called"):
            uncounted.allreduce(np.ones(3), group)
        first.join()
    wait_for_all(comm)
    if RANK < SIZE - 1:
        refused()
    assert len(heard) == 1 and "two threads called" in heard[0], heard
    begun = time.monotonic()
    group.close()
    assert time.monotonic() - begun < 20 * SLOWNESS  # not the 60 s of its timeout


@pytest.mark.skipif(SIZE < 3, reason="the others hold what the late one owns")
def test_a_rank_that_does_not_come_before_the_others_are_done(comm, work, steps):
    """The other ranks compute this rank's blocks. The rank gets the sum, and computes
    nothing.
    """
    late, params_and_batch = SIZE - 1, problem(23)
    wait_for_all(comm)
    if late == RANK:
        comm.recv(source=0, tag=77)
    out = steps(*params_and_batch)
    if RANK == 0:
        comm.send(None, dest=late, tag=77)
    assert_right(comm, out, *params_and_batch, divisor=23)


# Errors.


def test_erasures_cannot_be_meant(work):
    params, batch = problem(12)
    part = work.batch(12)
    step = jaxcoded.coded_value_and_grad(loss, work)
    words = "erasures cannot be given in a group with Shared("
    with pytest.raises(ValueError, match=re.escape(words)):
        batch = part.of(held(batch, part.indices))
        step(params, batch, erasures=np.zeros(SIZE, bool))


def test_vmap(work):
    params, batch = problem(12)
    part = work.batch(12)
    step = jaxcoded.coded_value_and_grad(loss, work, mean=False)
    ensemble = jax.vmap(step, in_axes=(0, None))
    members = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    with pytest.raises(NotImplementedError, match="shared work cannot be batched"):
        jax.jit(ensemble)(members, part.of(held(batch, part.indices)))


def test_a_gradient_of_the_gradient(work):
    params, batch = problem(12)
    part = work.batch(12)
    step = jaxcoded.coded_value_and_grad(loss, work, mean=False)
    with pytest.raises(NotImplementedError, match="shared work cannot be differentiat"):
        jax.grad(lambda p: step(p, part.of(held(batch, part.indices)))[0])(params)


def test_losses_of_no_batch(work):
    """A loss must still return one value for each example."""
    part = work.batch(1000)
    size = len(part.weights) // len(work.plan.placement.held(work.rank))
    step = jaxcoded.coded_value_and_grad(
        lambda w, _: jnp.full(size, w), work, mean=False
    )
    assert finish(step(1.0, part.of(()))) == (1000, 1000)
    step = jaxcoded.coded_value_and_grad(lambda w, _: jnp.full(1, w), work, mean=False)
    with pytest.raises(ValueError, match="one loss for each example"):
        step(1.0, part.of(()))


@pytest.mark.skipif(SIZE < 4, reason="a tree of two layers")
@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"strategy": jaxcoded.Shared(replicas=SIZE)},
            f"give replicas={SIZE - 1} or less",
        ),
        ({"transport": "mpi4jax"}, 'needs the engine: transport="mpi4jax" was asked'),
    ],
    ids=["replicas", "transport"],
)
def test_groups_that_cannot_be(comm, transport, options, words):
    arguments = {"strategy": WORK, "transport": transport} | options
    with pytest.raises(ValueError, match=re.escape(words)):
        jaxcoded.CodedGroup(comm, **arguments)


@several
def test_weights_of_another_placement(comm, work, transport):
    _, batch = problem(12)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=2), transport=transport
    ) as other:
        part = other.batch(12)
    step = jaxcoded.coded_value_and_grad(loss, work, mean=False)
    with pytest.raises(ValueError, match="another group's plan"):
        step(problem(12)[0], part.of(held(batch, part.indices)))


# A part of the batch suffices after a deadline.


@pytest.fixture(scope="module")
def approximate(comm, transport):
    options = jaxcoded.Options(deadline=600, on_deadline="approximate")
    with jaxcoded.CodedGroup(comm, WORK, transport=transport, options=options) as group:
        yield group


@pytest.mark.parametrize("mean", [True, False])
def test_nothing_is_missing_before_a_deadline(comm, approximate, mean):
    params, batch = problem(37)
    part = approximate.batch(37)
    step = stepped(approximate, mean=mean, residual=True)
    out = step(params, part.of(held(batch, part.indices)))
    divisor = 37 if mean else 1
    assert_right(comm, out.value, params, batch, divisor=divisor)
    assert out.residual == 0 and out.residual.dtype == jnp.float32


@pytest.mark.parametrize("tokened", [True, False])
def test_nothing_is_missing_of_blocks_on_the_host(comm, approximate, tokened):
    token = jnp.int32(0) if tokened else None
    finish = jax.jit(
        lambda sums, token: coded_allreduce(
            sums, approximate, residual=True, token=token
        )
    )
    for size in (37, 5):
        count = np.zeros(())
        with approximate.blocks(size) as blocks:
            for block in blocks:
                count += len(block.indices)
        out = finish(count, token)
        assert (out.value, out.residual) == (size, 0)
        assert (out.token is not None) == tokened


def test_the_residual_of_a_sum_without_blocks(comm, transport):
    options = jaxcoded.Options(deadline=600, on_deadline="approximate")
    with jaxcoded.CodedGroup(comm, WORK, transport=transport, options=options) as group:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="right after a loop over group.blocks"
        ):
            jax.block_until_ready(coded_allreduce(1.0, group, residual=True))
        jaxcoded.effects_barrier()
        assert coded_allreduce(1.0, group) == SIZE


def test_a_record_is_of_whole_batches(comm, transport):
    options = jaxcoded.Options(deadline=600, on_deadline="approximate")
    for name in ("record", "replay"):
        with pytest.raises(ValueError, match="a record needs sums of the whole batch"):
            jaxcoded.CodedGroup(
                comm,
                WORK,
                transport=transport,
                options=options,
                **{name: "ledger.jsonl"},
            )


# Ranks that call different things.

SHARED = (
    "coded_value_and_grad(loss) of ['grads']['b'] float64[], "
    "['grads']['w'] float64[5], ['loss'] float64[], for a batch of 20"
)
PLAIN = "coded_allreduce of float64[5]"


@pytest.fixture(scope="module")
def calls(work):
    """Return a shared round of a batch, and a plain one."""
    part = work.batch(BATCH)
    params, batch = problem(BATCH)
    step, own = stepped(work), contribution(work, VECTOR)
    add = jax.jit(lambda v: coded_allreduce(v, work))
    local = held(batch, part.indices)
    finish(add(own))  # this reports errors that happened before these tests
    return lambda: flat(step(params, part.of(local))), lambda: finish(add(own))


def flat(out):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(finish(out))])


def assert_one_differs(comm, work, calls, first, odd, usual, unusual):
    """Check that all ranks get an error, and that the group stays usable."""
    shared, plain = calls
    expected, sizes = map(flat, by_hand(*problem(BATCH)))

    def check(out):
        if len(out) == WIDTH:
            return assert_sum(work, out, VECTOR)
        return np.testing.assert_array_less(abs(out - expected), 1e-13 * sizes)

    wait_for_all(comm)
    assert_odd_one_out(comm, [first, plain, plain], odd, usual, unusual, check)
    check(shared())


@several
@pytest.mark.parametrize("odd", [SIZE - 1, 0])
def test_one_shares_and_the_others_do_not(comm, work, calls, odd):
    if odd == 0 and all(0 in ranks for ranks in work.plan.placement.holders):
        pytest.skip("the root alone can compute the whole batch, before others call")
    first = calls[0 if odd == RANK else 1]
    assert_one_differs(comm, work, calls, first, odd, PLAIN, SHARED)


@several
@pytest.mark.parametrize("odd", [SIZE - 1, 0])
def test_one_does_not_share(comm, work, calls, odd):
    first = calls[1 if odd == RANK else 0]
    assert_one_differs(comm, work, calls, first, odd, SHARED, PLAIN)


@several
def test_a_mismatch_outside_jit(comm, work, calls):
    """Outside jit a rank that makes a wrong call gets the error, like all other
    ranks."""
    part = work.batch(BATCH)
    params, batch = problem(BATCH)
    step = jaxcoded.coded_value_and_grad(loss, work, mean=False)

    def first():
        return flat(step(params, part.of(held(batch, part.indices))))

    if RANK == 0:
        first = calls[1]
    assert_one_differs(comm, work, calls, first, 0, SHARED, PLAIN)


@several
def test_batches_of_different_sizes(comm, work, calls):
    odd = SIZE - 1
    size = BATCH - (odd == RANK)
    part = work.batch(size)
    params, batch = problem(size)
    step = stepped(work)

    def first():
        return flat(step(params, part.of(held(batch, part.indices))))

    other_call = SHARED.replace("of 20", "of 19")
    assert_one_differs(comm, work, calls, first, odd, SHARED, other_call)
