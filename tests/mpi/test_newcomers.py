"""If one rank makes a mistake, or all ranks except one, every rank gets an error. No rank gets a wrong sum or hangs."""

import time

import numpy as np
import pytest
from cases import more
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, redundant, several
from together import finish, wait_for_all

import jaxcoded

pytestmark = pytest.mark.ranks(2, 4)

EXAMPLES, BATCH = 40, 12
DATA = np.random.default_rng(8).normal(size=(EXAMPLES, 5))

# Without redundancy the sum needs every rank.
NEEDS_ALL = {
    "uncoded": jaxcoded.Uncoded(),
    "alone": jaxcoded.Shared(replicas=0),
}
STRATEGIES = NEEDS_ALL | {"shared": jaxcoded.Shared()}
if SIZE > 2:
    STRATEGIES |= {"coded": jaxcoded.Coded(stragglers=1)}


def batches(group, **given):
    return group.epoch(DATA, **{"batch_size": BATCH, "seed": 0, "epoch": 0} | given)


def losses(w, x):
    return x @ w


def gradient(group, batch):
    """Return the sum of the batch's examples."""
    step = jaxcoded.coded_value_and_grad(losses, group, mean=False)
    return finish(step(np.zeros(5), batch)[1])


def allreduced(group, weights):
    batch = batches(group)[0]
    x = batch.weights @ batch.data
    weights = batch.weights if weights else None
    return finish(jaxcoded.coded_allreduce(x, group, weights))


def by_weights(group, odd):
    return allreduced(group, weights=odd)


def by_no_weights(group, odd):
    return allreduced(group, weights=not odd)


def by_arrays(group, odd):
    return gradient(group, DATA[:BATCH] if odd else batches(group)[0])


def by_a_batch(group, odd):
    return by_arrays(group, not odd)


each_rank = pytest.mark.parametrize("odd", [0, SIZE - 1])


def is_right(group, total, within=1e-9):
    expected = DATA[batches(group).indices(0)].sum(0)
    np.testing.assert_allclose(total, expected, rtol=within, atol=within)


def is_one_of(total, *examples):
    """Check that a sum is the sum of one of these sets of examples. If the other ranks
    are late, shared work may need only the odd rank.
    """
    sums = [each.sum(0) for each in examples]
    assert any(np.allclose(total, each, 1e-9, 1e-9) for each in sums), (total, sums)


@pytest.fixture(scope="module", params=STRATEGIES)
def going_on(request, comm, transport):
    """A group in which ranks continue after their errors."""
    strategy = STRATEGIES[request.param]
    if transport == "mpi4jax" and strategy.by_blocks:
        pytest.skip("shared work needs the engine")
    with jaxcoded.CodedGroup(comm, strategy, transport=transport) as group:
        yield group


@several
@pytest.mark.above_the_transport
@each_rank
@pytest.mark.parametrize(
    "call", [by_weights, more(by_no_weights), more(by_arrays), by_a_batch]
)
def test_ranks_that_go_on_after_it(comm, going_on, call, odd):
    """All ranks get the error in that call or in the next one, and the third sum is right."""

    def right():
        return gradient(going_on, batches(going_on)[0])

    def mistaken():
        try:
            return call(going_on, comm.rank == odd)
        except TypeError as error:  # before anything was sent
            assert "group.batch" in str(error) or "batch.weights" in str(error)
            return right()

    erred = []
    for step in (right, mistaken, right, right):
        wait_for_all(comm)
        try:
            is_right(going_on, step())
            erred.append(False)
        except JaxRuntimeError as error:
            assert "GroupMismatch" in str(error), error
            erred.append(True)
            jaxcoded.effects_barrier()
        wait_for_all(comm)
        # ranks that wait for no other rank could be several rounds ahead
        time.sleep(0.05)
    assert erred in (
        [False, True, False, False],
        [False, False, True, False],
        [False, True, True, False],
    )


@several
@engine_only
@each_rank
@pytest.mark.parametrize("call", [by_arrays, by_a_batch])
@pytest.mark.parametrize("strategy", NEEDS_ALL.values(), ids=NEEDS_ALL)
def test_programs_that_end_with_it(comm, transport, strategy, call, odd):
    """Ranks that erred leave, and the other ranks do not wait for them."""

    def program():
        with jaxcoded.CodedGroup(comm, strategy, transport=transport) as group:
            call(group, comm.rank == odd)
            gradient(group, batches(group)[0])

    with pytest.raises((TypeError, JaxRuntimeError)) as error:
        program()
    erred = (comm.rank == odd) == (call is by_arrays)
    assert error.type is TypeError if erred else "rank" in str(error.value)
    wait_for_all(comm)


@several
@engine_only
@each_rank
@pytest.mark.parametrize("labelled", [False, True], ids=["rows", "labels"])
@pytest.mark.parametrize("summed", ["gradient", "contribution"])
def test_data_that_a_rank_has_alone(comm, going_on, odd, labelled, summed):
    """All ranks get an error, or the sum of ranks with the same data."""
    if summed == "contribution" and going_on.plan.strategy.by_blocks:
        pytest.skip("shared work computes the contribution itself")

    def total(data, labels):
        batch = going_on.epoch((data, labels), batch_size=BATCH, seed=0)[0]
        if summed == "gradient":
            step = jaxcoded.coded_value_and_grad(
                lambda w, batch: losses(w, batch[0]), going_on, mean=False
            )
            return finish(step(np.zeros(5), batch)[1])
        x = batch.weights @ batch.data[0]
        return finish(jaxcoded.coded_allreduce(x, going_on, batch.weights))

    labels = np.arange(EXAMPLES) % 10
    data, numbers = DATA, labels
    if comm.rank == odd:
        data, numbers = (DATA, labels + 1) if labelled else (DATA[::-1], labels)
    wait_for_all(comm)
    try:
        of = batches(going_on).indices(0)
        # only with shared work may the odd rank alone be in the sum
        alone = going_on.plan.strategy.by_blocks and not labelled
        is_one_of(total(data, numbers), DATA[of], *[DATA[::-1][of]] * alone)
        erred = False
    except JaxRuntimeError as error:
        assert "its data are not" in str(error), error
        erred = True
        jaxcoded.effects_barrier()
    assert comm.allgather(erred) == [erred] * SIZE
    assert erred or going_on.plan.strategy not in NEEDS_ALL.values()
    rounding = 1 + 1e-7 * (comm.rank == odd)  # as another processor may round
    is_right(going_on, total(DATA * rounding, labels), within=1e-5)


@engine_only
@redundant
@each_rank
@pytest.mark.parametrize("given", [{"seed": 1}, {"seed": None}, {"epoch": 1}], ids=str)
def test_a_rank_at_another_batch(comm, going_on, given, odd):
    """All ranks get an error, or the sum of ranks with the same batch."""
    mine = batches(going_on, **given if comm.rank == odd else {})[0]
    wait_for_all(comm)
    try:
        some = [batches(going_on), batches(going_on, **given)]
        some = some[: 1 + going_on.plan.strategy.by_blocks]
        is_one_of(gradient(going_on, mine), *(DATA[each.indices(0)] for each in some))
        erred = False
    except JaxRuntimeError as error:
        assert "InconsistentMessages" in str(error), error
        erred = True
        jaxcoded.effects_barrier()
    assert comm.allgather(erred) == [erred] * SIZE
    assert erred or going_on.plan.strategy not in NEEDS_ALL.values()
    is_right(going_on, gradient(going_on, batches(going_on)[0]))


@engine_only
@pytest.mark.parametrize("loss", [losses, lambda w, x: (x @ w).mean()])
def test_the_default_fits_any_number_of_ranks(comm, transport, loss):
    with jaxcoded.CodedGroup(comm, transport=transport) as group:
        assert group.plan.strategy == jaxcoded.Shared()
        step = jaxcoded.coded_value_and_grad(loss, group, mean=False)
        for number, batch in enumerate(epoch := batches(group)):
            _, total = finish(step(np.zeros(5), batch))
            expected = DATA[epoch.indices(number)].sum(0)
            np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-9)


UNFIT = [
    (
        jaxcoded.Coded(stragglers=SIZE),
        r"are too few for .*take more ranks, stragglers=",
    ),
    (jaxcoded.Coded(slices=SIZE), r"are too few for .*Shared\(\), which works on any"),
    (jaxcoded.Coded(parents=(-1,) + SIZE * (0,)), r"parents has \d entries for size="),
    (jaxcoded.Coded(stragglers=0, speeds=[1] * (SIZE + 1)), "give one for each rank"),
    (jaxcoded.Coded(stragglers=0, code={SIZE: "uncoded"}), "code names rank"),
    (jaxcoded.Shared(replicas=SIZE), r"give replicas="),
    (jaxcoded.Uncoded(speeds=[1] * (SIZE + 1)), "give one for each rank"),
]


@several
@pytest.mark.parametrize(("strategy", "remedy"), UNFIT, ids=str)
def test_a_strategy_that_does_not_fit(comm, transport, strategy, remedy):
    """Every rank gets an error with the remedy, and a group can be made after it."""
    with pytest.raises(ValueError, match=remedy):
        jaxcoded.CodedGroup(comm, strategy, transport=transport)
    jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport).close()
