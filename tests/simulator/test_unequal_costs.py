"""Examples of unequal cost in the simulator: parts of ranks as `Epoch` makes them, and steps computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded

import jaxcoded
from jaxcoded.group.epoch import Epoch
from jaxcoded.tools.simulator import (
    Costs,
    Layout,
    Network,
    Ring,
    ideal_seconds,
    simulate,
)
from jaxcoded.tools.simulator.costs import Parts

FREE = Network(latency=0.0, overhead=0.0, call=0.0, bandwidth=np.inf)
STRATEGIES = [
    jaxcoded.Uncoded(),
    jaxcoded.Uncoded(fanout=2, root_computes=False),
    jaxcoded.Coded(stragglers=1, fanout=3),
    jaxcoded.Coded(stragglers=2, code="cyclic_repetition"),
    jaxcoded.Shared(replicas=2, blocks=4),
]


def plan_of(strategy, ranks=7):
    return jaxcoded.make_plan(ranks, strategy)


def steps(layout, costs, model=None, *, work=1.0, rounds=8, **how):
    """Return the seconds of each step."""
    return simulate(
        layout,
        FREE,
        payload=0.0,
        work=work,
        stragglers=model,
        rounds=rounds,
        costs=costs,
        **how,
    ).seconds


@pytest.mark.parametrize(
    "strategy, known",
    [(strategy, True) for strategy in STRATEGIES]
    + [(strategy, False) for strategy in STRATEGIES[:-1]],
    ids=repr,
)
def test_ranks_have_the_parts_of_an_epoch(strategy, known):
    """The batch is the whole data set, in another order. Shared work is simulated only with known costs."""
    plan, layout = plan_of(strategy), Layout.of(plan_of(strategy))
    costs = Costs.of(np.random.default_rng(3).pareto(1.5, 120) + 0.1, 120)
    parts = Parts(costs if known else costs.unknown, layout, seed=0)
    batch = costs.batches(0)[0]
    for place, rank in enumerate(layout.ranks.tolist()):
        epoch = Epoch(plan, rank, 120, 120, costs=batch if known else None)
        there = np.unique(epoch[0].indices[..., epoch[0].weights.values != 0])
        found = parts.loads(0, layout.loads)[place]
        assert found == pytest.approx(batch[there].sum() / 120)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("model", ["none", "pareto", "bursty(begin=0.2)"])
def test_equal_costs_change_nothing(strategy, model):
    layout = Layout.of(plan_of(strategy))
    size = 5040  # which all numbers of ranks divide
    plain, equal = (
        steps(layout, c, model) for c in (None, Costs.of(np.ones(size), size))
    )
    np.testing.assert_allclose(equal, plain, rtol=1e-3)


@pytest.mark.parametrize("balanced", [False, True])
def test_equal_costs_on_a_ring_and_a_tree_without_a_plan(balanced):
    equal = Costs.of(np.ones(5040), 5040)
    for layout in (Ring(7), Layout.balanced(7, 2)):
        plain = steps(layout, None, "pareto", balanced=balanced)
        found = steps(layout, equal, "pareto", balanced=balanced)
        np.testing.assert_allclose(found, plain, rtol=2e-3)


@pytest.mark.parametrize(
    "strategy, seconds",
    [
        # worker 1 has the examples of 6 s and 2 s, worker 2 two of 2 s
        (jaxcoded.Uncoded(root_computes=False), 8.0),
        (jaxcoded.Shared(replicas=0, blocks=2, root_computes=False), 8.0),
        # worker 2 also computes the second one of worker 1
        (jaxcoded.Shared(replicas=1, blocks=2, root_computes=False), 6.0),
        # both compute all
        (jaxcoded.Coded(stragglers=1), 12.0),
    ],
    ids=repr,
)
def test_by_hand(strategy, seconds):
    costs = Costs.of([2.0, 6.0, 2.0, 2.0], 4)
    found = steps(Layout.of(plan_of(strategy, 3)), costs, work=12.0)
    np.testing.assert_allclose(found, seconds)


def test_by_number():
    """Each rank has two of the examples of 5, 5, 1 and 1 s. By cost each has 6 s of work; by number the slower rank has
    6 or 10 s, depending on the drawn batch."""
    costs = Costs.of([5.0, 5.0, 1.0, 1.0], 4)
    for layout in (Ring(2), Layout.of(plan_of(jaxcoded.Uncoded(), 2))):
        np.testing.assert_allclose(steps(layout, costs, work=12.0), 6.0)
        found = steps(layout, costs.unknown, work=12.0, rounds=40)
        assert set(found.round(9)) == {6.0, 10.0}


@given(
    ranks=st.integers(3, 8),
    replicas=st.integers(0, 3),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
@bounded
def test_no_faster_than_possible(ranks, replicas, blocks, seed):
    """A step takes at least as long as all work divided at will, and as the most expensive example on the fastest
    rank."""
    random = np.random.default_rng(seed)
    shared = jaxcoded.Shared(replicas=min(replicas, ranks - 1), blocks=blocks)
    costs = Costs.of(random.pareto(1.5, 200) + 0.01, 100)
    found = steps(Layout.of(plan_of(shared, ranks)), costs, "exponential", seed=seed)
    ideal = ideal_seconds(
        ranks, work=1.0, stragglers="exponential", rounds=8, seed=seed, costs=costs
    )
    largest = costs.batches(seed).max(axis=1) / 100
    at = np.arange(8) % len(largest)
    # a late rank has finished its earlier blocks
    assert (np.cumsum(found) >= np.cumsum(ideal) * (1 - 1e-9)).all()
    assert (found >= largest[at] * (1 - 1e-9)).all()


@pytest.mark.parametrize("shape", [1.5, 3.0])
def test_shared_work_is_near_the_ideal(shape):
    """With 12 blocks for each rank, shared work is near the ideal of 120 ms."""
    examples = 1 + np.random.default_rng(1).pareto(shape, 20_000)
    costs = Costs.of(examples, 13 * 12 * 8)
    layout = Layout.of(plan_of(jaxcoded.Shared(), 13))
    found = steps(layout, costs, work=13 * 0.12, rounds=60)
    ideal = ideal_seconds(13, work=13 * 0.12, rounds=60, costs=costs)
    largest = 13 * 0.12 * costs.batches(0).max(axis=1) / costs.batch_size
    batch = 13 * 0.12 * costs.batches(0).mean(axis=1) / 13
    at = np.arange(60) % len(largest)
    np.testing.assert_allclose(ideal, np.maximum(batch, largest)[at])
    assert found.mean() <= 1.1 * ideal.mean()


def test_what_is_not_simulated():
    costs = Costs.of([1.0, 2.0, 3.0], 3)
    with pytest.raises(
        ValueError, match="shared work is simulated only with known costs"
    ):
        steps(Layout.of(plan_of(jaxcoded.Shared())), costs.unknown)
    with pytest.raises(ValueError, match=r"Layout.of\(plan\), not Layout.balanced"):
        steps(Layout.balanced(7, 6, stragglers=1), costs)


@pytest.mark.parametrize(
    "costs, size, error, match",
    [
        ([0.0, 0.0], 2, ValueError, "must not all be 0"),
        ([1.0, 2.0], 3, ValueError, "batch_size must be an integer from 1 to 2, got 3"),
        ([1.0, -2.0], 1, ValueError, "got -2 for example 1"),
        (["a"], 1, TypeError, "must have one number for each example"),
        ([], 1, ValueError, "one number for each example, got none"),
    ],
)
def test_wrong_costs(costs, size, error, match):
    with pytest.raises(error, match=match):
        Costs.of(costs, size)
