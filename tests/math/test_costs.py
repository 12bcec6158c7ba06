"""Examples of unequal cost, divided among ranks and their blocks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded

import jaxcoded
from jaxcoded.group.epoch import Epoch
from jaxcoded.plan.costs import divided, longest_first
from jaxcoded.plan.placement import Placement

costs_of = st.lists(
    st.floats(0, 100) | st.sampled_from([0.0, 1.0, 1e6]), min_size=1, max_size=60
).map(np.array)


def least_makespan(costs, places):
    """Return the least makespan, by trying all divisions."""
    divisions = itertools.product(range(places), repeat=len(costs))
    return min(
        np.bincount(where, costs, minlength=places).max()
        for where in map(list, divisions)
    )


@pytest.mark.parametrize("seed", range(6))
def test_near_the_best_division(seed):
    """The division is within Graham's bound of the best division."""
    random, places = np.random.default_rng(seed), 2 + seed % 2
    costs = random.pareto(1.5, 8) + 0.1
    found = longest_first(costs, [8] * places)
    most = max(costs[place].sum() for place in found)
    assert most <= (4 / 3 - 1 / (3 * places)) * least_makespan(costs, places) + 1e-12


@bounded
@given(costs=costs_of, ranks=st.integers(1, 5), blocks=st.integers(1, 4))
def test_every_example_is_in_one_block(costs, ranks, blocks):
    found = Placement(tuple(range(ranks)), 0, blocks).divided(costs)
    assert len(found) == ranks * blocks
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(len(costs)))
    total = [
        sum(costs[block].sum() for block in found[rank * blocks : (rank + 1) * blocks])
        for rank in range(ranks)
    ]
    assert max(total) <= costs.sum() / ranks + costs.max() + 1e-6


@bounded
@given(costs=costs_of, data=st.data())
def test_rooms_are_kept(costs, data):
    ranks = data.draw(st.integers(1, 4))
    cuts = data.draw(
        st.lists(
            st.integers(0, len(costs)), min_size=2 * ranks - 1, max_size=2 * ranks - 1
        )
    )
    sizes = np.diff([0, *sorted(cuts), len(costs)]).reshape(ranks, 2).tolist()
    found = divided(costs, sizes)
    assert [len(block) for block in found] == np.ravel(sizes).tolist()
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(len(costs)))


def test_what_costs_most_comes_first_and_alone():
    costs = np.ones(48)
    costs[17] = 30.0
    found = Placement((0, 1), 1, 4).divided(costs)
    (owner,) = (block for block, examples in enumerate(found) if 17 in examples)
    assert owner % 4 == 0
    assert found[owner].tolist() == [17]
    by_rank = np.array([costs[block].sum() for block in found]).reshape(2, 4).sum(1)
    assert by_rank.tolist() == [39.0, 38.0]


def test_examples_that_cost_nothing_are_dealt_out():
    found = Placement((0, 1, 2), 1, 2).divided(np.zeros(12))
    assert [len(block) for block in found] == [2] * 6


PLANS = {
    "uncoded": jaxcoded.make_plan(6, jaxcoded.Uncoded()),
    "speeds": jaxcoded.make_plan(4, jaxcoded.Uncoded(speeds=[1, 2, 3, 2])),
    "shared": jaxcoded.make_plan(6, jaxcoded.Shared(replicas=0, blocks=4)),
    "cyclic": jaxcoded.make_plan(7, jaxcoded.Coded(code="cyclic_repetition")),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_of_an_epoch_cost_the_same(plan):
    """Ranks' costs are in proportion to their loads, and each rank reads as many examples as without costs."""
    random = np.random.default_rng(2)
    costs = np.sort(random.pareto(2.5, 480) + 1)  # the worst order
    ratios = []
    for known in (None, costs):
        epochs = [
            Epoch(plan, rank, 480, 240, costs=known)
            for rank in range(plan.size)
            if plan.load_of(rank)
        ]
        loads = np.array([float(plan.load_of(epoch._rank)) for epoch in epochs])
        for number in range(2):
            read = [
                batch.indices[batch.weights.values != 0]
                for batch in (epoch[number] for epoch in epochs)
            ]
            cost = np.array([costs[indices].sum() for indices in read]) / loads
            ratios.append(cost.max() / cost.mean())
    assert min(ratios[:2]) > 1.05
    assert max(ratios[2:]) < 1.02, ratios


def test_a_batch_of_an_epoch_is_the_same_set():
    plan, costs = PLANS["uncoded"], np.random.default_rng(0).pareto(1.5, 50)
    usual, by_cost = (
        Epoch(plan, 0, 50, 16, seed=3, costs=known) for known in (None, costs)
    )
    assert len(by_cost.indices(3)) == 2
    for number in range(4):
        one, other = by_cost.indices(number), usual.indices(number)
        assert sorted(one) == sorted(other)
    assert any(
        by_cost.indices(number).tolist() != usual.indices(number).tolist()
        for number in range(4)
    )
    assert by_cost[0].weights.number != usual[0].weights.number


@pytest.mark.parametrize(
    ("costs", "error", "text"),
    [
        ([1.0, 2.0], ValueError, r"shape \(3,\), one for each example, got \(2,\)"),
        (np.ones((3, 1)), ValueError, r"got \(3, 1\)"),
        (1.0, ValueError, r"got \(\)"),
        ([1.0, -2.0, 3.0], ValueError, "got -2 for example 1"),
        ([1.0, 2.0, np.nan], ValueError, "got nan for example 2"),
        ([np.inf, 2.0, 3.0], ValueError, "got inf for example 0"),
        (["a", "b", "c"], TypeError, "one number for each example"),
        ([1j, 2, 3], TypeError, "one number for each example"),
        ([[1], [1, 2], [3]], TypeError, "one number for each example"),
    ],
)
def test_invalid_costs(costs, error, text):
    with pytest.raises(error, match=text):
        Epoch(PLANS["uncoded"], 0, 3, 3, costs=costs)
