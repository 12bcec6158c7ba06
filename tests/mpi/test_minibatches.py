"""Compare training over epochs of minibatches, with a smaller last one, with one
process in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, mpi4jax_only, redundant, several
from reference import assert_same_bits
from together import finish, one_late

import jaxcoded

pytestmark = [pytest.mark.ranks(4), pytest.mark.above_the_transport]

EXAMPLES, BATCH, FEATURES, RATE = 41, 12, 4, 0.05
_random = np.random.default_rng(5)
X = _random.uniform(1, 2, (EXAMPLES, FEATURES))
Y = _random.normal(size=EXAMPLES)
START = _random.normal(size=FEATURES)

GROUPS = {
    "coded": jaxcoded.Coded(stragglers=1 if SIZE > 2 else 0),
    "shared": jaxcoded.Shared(),
}
if SIZE == 4:
    GROUPS |= {
        "slices": jaxcoded.Coded(slices=2),
        "parts": jaxcoded.Coded(code="progressive"),
    }
CHILDREN = max(SIZE - 1, 1)


def losses(w, batch):
    x, y = batch
    return (jnp.log(x) @ w - y) ** 2 / 2


def by_hand(w, batch):
    """Return the mean of a batch, and its gradient."""
    x, y = np.log(X[batch]), Y[batch]
    return ((x @ w - y) ** 2).mean() / 2, (x @ w - y) @ x / len(batch)


def batches(group, epoch):
    return group.epoch((X, Y), BATCH, seed=7, epoch=epoch)


@engine_only
@pytest.mark.parametrize("how", GROUPS)
def test_two_epochs(comm, transport, how):
    """Two epochs compile nothing again."""
    with jaxcoded.CodedGroup(comm, GROUPS[how], transport=transport) as group:
        loss_and_grad = jaxcoded.coded_value_and_grad(losses, group)

        @jax.jit
        def step(w, batch):
            loss, grad = loss_and_grad(w, batch)
            return w - RATE * grad, loss

        w, expected = jnp.asarray(START), START
        for epoch in range(2):
            loader = batches(group, epoch)
            for number, batch in enumerate(loader):
                w, loss = finish(step(w, batch))
                true, grad = by_hand(expected, loader.indices(number))
                expected = expected - RATE * grad
                np.testing.assert_allclose(loss, true, rtol=1e-11)
                np.testing.assert_allclose(w, expected, rtol=1e-11)
        assert number == 3 and batch.weights.examples == 5
        assert step._cache_size() == 1
        assert_same_bits(comm, w)


@several
@engine_only
@pytest.mark.parametrize("how", ["coded", "shared"] if SIZE > 2 else [])
def test_a_slow_loader_skips_decided_batches(comm, transport, how):
    """The last rank begins when the other ranks have finished, and reads nothing."""
    with jaxcoded.CodedGroup(comm, GROUPS[how], transport=transport) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        read = []

        def epoch():
            for part in group.epoch(EXAMPLES, BATCH, seed=7):
                behind = group.lag() > 0
                read.append(not behind)
                x, y = X[part.indices], Y[part.indices]
                if behind:
                    x, y = np.full_like(x, np.nan), np.full_like(y, np.nan)
                out.append(finish(step(START, part.of((x, y)))))
            return out

        late = SIZE - 1
        out = []
        one_late(comm, group, late, len(batches(group, 0)), epoch)
        assert all(read) if comm.rank == 0 else not any(read) or comm.rank != late
        for number, sums in enumerate(out):
            expected = by_hand(START, batches(group, 0).indices(number))
            for actual, wanted in zip(sums, expected):
                np.testing.assert_allclose(actual, wanted, rtol=1e-11)
        assert_same_bits(comm, out)


@several
@engine_only
def test_an_epoch_continues_in_another_group(comm, transport):
    """A new plan divides the same batches."""
    with jaxcoded.CodedGroup(comm, GROUPS["coded"]) as group:
        w = expected = START
        for number in range(len(batches(group, 0))):
            if number == 2:
                group = group.replan([1.0 + rank for rank in range(SIZE)])
            mine = batches(group, 0)[number]
            step = jaxcoded.coded_value_and_grad(losses, group)
            _, grad = jax.jit(step)(w, mine)
            w = w - RATE * finish(grad)
            batch = batches(group, 0).indices(number)
            expected = expected - RATE * by_hand(expected, batch)[1]
        np.testing.assert_allclose(w, expected, rtol=1e-11)


def test_sums_without_a_mean(group):
    """Sums without a mean also take weights; the caller divides by the number of
    examples.
    """

    def mean(w, batch):
        return batch.weights @ losses(w, batch.data) / batch.weights.examples

    loader = batches(group, 0)
    last = len(loader) - 1
    batch, (true, grad) = loader[last], by_hand(START, loader.indices(last))
    value, sums = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=False))(
        START, batch
    )
    np.testing.assert_allclose(value, true * 5, rtol=1e-11)
    np.testing.assert_allclose(sums, grad * 5, rtol=1e-11)
    local = jax.jit(jax.value_and_grad(mean))(START, batch)
    value, sums = uncounted.coded_allreduce(local, group)
    np.testing.assert_allclose(value, true, rtol=1e-11)
    np.testing.assert_allclose(sums, grad, rtol=1e-11)


@redundant
def test_a_rank_at_another_batch_gets_the_mean_of_the_others(comm, group):
    """The other ranks did not need this rank. The batches have different sizes."""
    loader, late = batches(group, 0), SIZE - 1
    batch = loader[0 if comm.rank == late else 3]
    step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
    erasures = np.arange(SIZE) == late
    out = finish(step(START, batch, erasures=erasures))
    for actual, expected in zip(out, by_hand(START, loader.indices(3))):
        np.testing.assert_allclose(actual, expected, rtol=1e-11)
    assert_same_bits(comm, out)


@several
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            jaxcoded.Coded(stragglers=0),
            marks=pytest.mark.skipif(SIZE < 3, reason="only rank 1 has data"),
        ),
        jaxcoded.Shared(replicas=0),
    ],
)
@pytest.mark.parametrize(
    "odd", [{"number": 3}, {"seed": 8}, {"epoch": 1}, {"examples": EXAMPLES - 1}]
)
@engine_only
def test_ranks_at_different_batches_are_an_error(comm, transport, how, odd):
    """The sum needs each rank, so it cannot leave out the odd rank."""
    which = {"number": 0, "seed": 7, "epoch": 0, "examples": EXAMPLES}
    which |= odd if comm.rank == SIZE - 1 else {}
    with jaxcoded.CodedGroup(comm, how, transport=transport) as group:
        data = X[: which["examples"]], Y[: which["examples"]]
        epoch = group.epoch(data, BATCH, seed=which["seed"], epoch=which["epoch"])
        batch = epoch[which["number"]]
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        with pytest.raises(JaxRuntimeError, match="InconsistentMessages: round 1, "):
            finish(step(START, batch))
        jax.effects_barrier()


@pytest.mark.skipif(SIZE < 3, reason="the code needs 2 children")
@mpi4jax_only  # mpi4jax waits for all ranks, so no rank is left out
def test_an_approximate_mean(comm, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(code="ignore_stragglers"), transport=transport
    ) as group:
        loader = batches(group, 0)
        last = len(loader) - 1
        batch = loader[last]
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        out = step(START, batch)
        for actual, expected in zip(out, by_hand(START, loader.indices(last))):
            np.testing.assert_allclose(actual, expected, rtol=1e-11)


@several
@engine_only
@pytest.mark.parametrize("odd", [SIZE - 1, 0])
@pytest.mark.parametrize("replicas", [0, *([2] if SIZE > 3 else [])])
def test_a_rank_at_another_batch_of_the_same_size(comm, transport, replicas, odd):
    """The mismatch is detected in this step, unless other ranks have computed the whole
    batch; the next step is right. No rank can compute the whole batch alone.
    """
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=replicas), transport=transport
    ) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        for epoch, number in ((0, 0), (0, 1), (3, 2)):
            loader = batches(group, epoch)
            true = by_hand(START, loader.indices(number))
            for wrong in (True, False):
                # among batches of one size
                at = (number + 1) % 3 if wrong and comm.rank == odd else number
                batch = loader[at]
                error = ""
                try:
                    out = finish(step(START, batch))
                except JaxRuntimeError as raised:
                    error = str(raised)
                    jaxcoded.effects_barrier()
                    assert wrong and "is at another batch" in error
                else:
                    for actual, expected in zip(out, true):
                        np.testing.assert_allclose(actual, expected, rtol=1e-11)
                outcomes = comm.allgather(bool(error))
                assert outcomes in ([True] * SIZE, [False] * SIZE)
                assert error or not wrong or replicas


@several
@engine_only
@pytest.mark.parametrize("epochs", [True, False])
def test_a_rank_with_other_parameters(comm, transport, epochs):
    """Shared work with `DEBUG`: the mismatch is detected 62 times of 63."""
    options = jaxcoded.Options(check=jaxcoded.DEBUG)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Shared(replicas=0), transport=transport, options=options
    ) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=False))
        batch = batches(group, 0)[0] if epochs else group.batch((X[:BATCH], Y[:BATCH]))
        w = START + 1e-9 * (comm.rank == SIZE - 1)
        with pytest.raises(JaxRuntimeError, match="parameters are not those"):
            finish(step(w, batch))
        jaxcoded.effects_barrier()
        finish(step(START, batch))


@redundant
@engine_only
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        jaxcoded.Coded(stragglers=0, fanout=CHILDREN),
        jaxcoded.Coded(stragglers=min(1, CHILDREN - 1), fanout=CHILDREN),
        jaxcoded.Coded(stragglers=0, slices=min(2, CHILDREN), fanout=CHILDREN),
        jaxcoded.Shared(replicas=0),
        jaxcoded.Shared(replicas=min(1, CHILDREN - 1)),
    ],
    ids=["uncoded", "coded", "slices", "shared", "replicas"],
)
def test_ranks_that_start_from_parameters_of_their_own(comm, transport, how, mean):
    """Parameters from different seeds raise an error on all ranks with any code. Parameters that differ only in
    rounding raise no error.
    """
    with jaxcoded.CodedGroup(comm, how, transport=transport) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=mean))
        mine = batches(group, 0)[0]
        own = np.random.default_rng(comm.rank).standard_normal(len(START))
        comm.barrier()  # no rank is late, so all ranks are in the sum
        with pytest.raises(
            JaxRuntimeError, match="parameters are not those of the others"
        ):
            finish(step(jnp.asarray(own, START.dtype), mine))
        jaxcoded.effects_barrier()
        finish(step(START * (1 + 1e-7 * comm.rank), mine))
