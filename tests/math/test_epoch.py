"""The batches of an epoch hold every example once, with the plan's coefficients, also
in a smaller last batch.
"""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, random_missing, tree_sum

import jaxcoded
from jaxcoded.group.epoch import Epoch

PLANS = [
    jaxcoded.make_plan(1, jaxcoded.Coded()),
    jaxcoded.make_plan(5, jaxcoded.Coded()),
    jaxcoded.make_plan(7, jaxcoded.Coded(fanout=3, speeds=[1, 2, 1, 3, 1, 1, 2])),
    jaxcoded.make_plan(7, jaxcoded.Coded(fanout=3, root_computes=True)),
    jaxcoded.make_plan(5, jaxcoded.Coded(slices=2)),
    jaxcoded.make_plan(4, jaxcoded.Coded(code="progressive")),
    jaxcoded.make_plan(5, jaxcoded.Shared(replicas=2, blocks=3)),
    jaxcoded.make_plan(4, jaxcoded.Shared(replicas=2, blocks=2, root_computes=False)),
]


def epochs(plan, n, batch_size, *, seed=0, epoch=0, drop_last=False, **how):
    """Return the epochs of all ranks."""
    how["drop_last"] = drop_last
    return [
        Epoch(plan, rank, n, batch_size, seed=seed, epoch=epoch, **how)
        for rank in range(plan.size)
    ]


def total(plan, reads, gradients, missing):
    """Return the root's sum: the plan's algebra in float64 on the examples that the
    ranks read.
    """
    messages = []
    for batch, P, M in zip(reads, plan.parts_above, plan.slices_above):
        slices = gradients[batch.indices].reshape(len(batch.indices), M, -1)
        coefficients = np.asarray(batch.weights).reshape(-1, P, M)
        messages.append(np.einsum("epu,euq->pq", coefficients, slices))
    if plan.strategy.by_blocks:
        return sum(messages)[0]
    return tree_sum(plan, messages, missing)


@bounded
@given(
    plan=st.sampled_from(PLANS),
    n=st.integers(1, 70),
    batch_size=st.integers(1, 30),
    drop_last=st.booleans(),
    seed=st.none() | st.integers(0, 2**40),
    multiple=st.sampled_from([1, 4]),
    by_cost=st.booleans(),
)
def test_every_example_counts_once(
    plan, n, batch_size, drop_last, seed, multiple, by_cost
):
    if plan.strategy.by_blocks or max(plan.slices_above + plan.parts_above) > 1:
        multiple = 1  # shared work is not split over devices
    if drop_last and n < batch_size:
        n, batch_size = batch_size, n
    gradients = np.random.default_rng(n).standard_normal((n, 12))
    random = np.random.default_rng(batch_size)
    with jax.enable_x64(True):
        how = {"seed": seed, "drop_last": drop_last, "multiple": multiple}
        how["costs"] = random.pareto(1.5, n) if by_cost else None
        ranks = epochs(plan, n, batch_size, epoch=3, **how)
    seen = []
    for number in range(len(ranks[0])):
        batch = ranks[0].indices(number)
        reads = [epoch[number] for epoch in ranks]
        missing = random_missing(plan, random) if not plan.strategy.by_blocks else ()
        np.testing.assert_allclose(
            total(plan, reads, gradients, missing), gradients[batch].sum(0), atol=1e-9
        )
        for epoch, mine in zip(ranks, reads):
            indices, weights = mine.indices, mine.weights
            np.testing.assert_array_equal(epoch.indices(number), batch)
            assert np.isin(indices, batch).all()
            assert weights.examples == len(batch)
            assert len(indices) % multiple == 0
            assert indices.dtype == np.int64
            like = epoch[0]
            assert jax.tree.structure(mine) == jax.tree.structure(like)
            for leaf, leaf_like in zip(jax.tree.leaves(mine), jax.tree.leaves(like)):
                assert (leaf.dtype, leaf.shape) == (leaf_like.dtype, leaf_like.shape)
            if (
                plan.encoded
            ):  # the first example of a chunk has the chunk's coefficients
                held = (np.asarray(weights) != 0).any(axis=2).astype(int)
                assert (np.diff(held, axis=1) <= 0).all()
        seen.append(batch)
    sizes = [len(batch) for batch in seen]
    assert set(sizes[:-1]) <= {batch_size}
    assert sizes[-1] == (n % batch_size or batch_size) or drop_last
    whole = np.concatenate(seen)
    assert len(whole) == (n // batch_size * batch_size if drop_last else n)
    assert len(set(whole.tolist())) == len(whole)
    assert 0 <= whole.min() and whole.max() < n


def test_the_order():
    """Seed and epoch determine the order, for any plan; without a seed it is the order
    of the data.
    """

    def order(size=4, **which):
        epoch = epochs(jaxcoded.make_plan(size, jaxcoded.Coded()), 40, 7, **which)[0]
        return np.concatenate([epoch.indices(i) for i in range(len(epoch))]).tolist()

    assert order(seed=None) == order(seed=None, epoch=1) == list(range(40))
    shuffled = order(seed=1)
    assert shuffled == order(7, seed=1) != order(seed=2)
    assert order(seed=1, epoch=1) not in (shuffled, order(seed=2), list(range(40)))


def test_any_batch_can_be_asked_for():
    epoch = epochs(PLANS[1], 10, 4)[1]
    assert len(epoch) == 3
    for number, batch in enumerate(epoch):
        again = epoch[number - 3]
        np.testing.assert_array_equal(batch.indices, again.indices)
        np.testing.assert_array_equal(batch.weights, again.weights)
    with pytest.raises(
        IndexError, match="there is no batch 3: the epoch has 3 batches"
    ):
        epoch[3]
    with pytest.raises(ValueError, match="read-only"):
        epoch.indices(0)[:] = 0


def test_grain_reads_it():
    """Grain reads an epoch as a random-access source, and continues from a checkpoint."""
    grain = pytest.importorskip("grain")
    epoch = epochs(PLANS[1], 10, 4)[1]
    reading = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)

    def batches():
        data = grain.MapDataset.source(epoch).map(
            lambda part: part.of(10 * part.indices)
        )
        return iter(data.to_iter_dataset(reading))

    def assert_these(found, expected):
        assert len(found) == len(expected)
        for batch, part in zip(found, expected):
            np.testing.assert_array_equal(batch.data, 10 * part.indices)
            np.testing.assert_array_equal(batch.weights, part.weights)
            assert batch.weights.examples == part.weights.examples

    first = batches()
    begun = next(first)
    state = first.get_state()
    assert_these([begun, *first], list(epoch))
    again = batches()
    again.set_state(state)
    assert_these(list(again), [epoch[1], epoch[2]])


@pytest.mark.parametrize(
    "wrong, match",
    [
        (
            {"n": 0},
            "n, the number of examples, must be an integer from 1 to 9223372036854775807, got 0",
        ),
        (
            {"batch_size": 0},
            "batch_size must be an integer from 1 to 2147483647, got 0",
        ),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"epoch": 0.5}, "epoch must be an integer >= 0, got 0.5"),
        ({"n": 3, "drop_last": True}, "3 examples are fewer than batch_size=4"),
    ],
)
def test_errors_name_the_value(wrong, match):
    with pytest.raises(ValueError, match=match):
        epochs(PLANS[1], **({"n": 10, "batch_size": 4} | wrong))
