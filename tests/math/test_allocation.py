import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, paper_parents

from jaxcoded import Coded, make_plan
from jaxcoded.plan.tree import regular_size


def loads(plan, batch):
    return plan.strategy.loads(plan, batch)


def shares(plan, rank, batch):
    return plan.strategy.shares(plan, rank, batch)


def assignment(plan, rank, batch):
    return plan.strategy.assignment(plan, rank, batch)


PLANS = {
    "regular": make_plan(13, Coded(fanout=3)),
    "repetition": make_plan(21, Coded(fanout=4)),
    "truncated": make_plan(10, Coded(parents=paper_parents(10, 3))),
    "irregular": make_plan(17, Coded(stragglers=2)),
    "root computes": make_plan(8, Coded(fanout=3, root_computes=True)),
    "slices": make_plan(11, Coded(slices=2)),
    "three slices": make_plan(5, Coded(slices=3)),
    "mixed slices": make_plan(7, Coded(slices=2, parents=[-1, 0, 0, 0, 1, 1, 2])),
    "chain": make_plan(6, Coded(fanout=1, stragglers=0)),
    "root last": make_plan(5, Coded(parents=[4, 4, 0, 0, -1])),
    "two": make_plan(2, Coded(stragglers=0)),
    "one": make_plan(1, Coded()),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
batches = st.integers(1, 300)


@bounded
@given(
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(1, 60),
    st.booleans(),
    st.integers(1, 2000),
)
def test_no_rank_computes_much_more_than_its_load(s, m, more, root_computes, batch):
    plan = make_plan(
        s + m + more, Coded(stragglers=s, slices=m, root_computes=root_computes)
    )
    assert loads(plan, batch).max() <= math.ceil(plan.load * batch) + plan.tree.depth


@each_plan
@bounded
@given(batch=batches)
def test_bound_on_explicit_trees(plan, batch):
    assert loads(plan, batch).max() <= math.ceil(plan.load * batch) + plan.tree.depth


@pytest.mark.parametrize(
    ("n", "L", "s", "m"),
    [
        (3, 2, 1, 1),
        (4, 2, 3, 1),
        (4, 3, 1, 1),
        (5, 2, 2, 1),
        (4, 2, 1, 2),
        (4, 1, 1, 3),
    ],
)
@pytest.mark.parametrize("root_computes", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_loads_are_equal_where_the_batch_divides(n, L, s, m, root_computes, times):
    plan = make_plan(
        regular_size(n, L),
        Coded(fanout=n, stragglers=s, slices=m, root_computes=root_computes),
    )
    # batches that make every partition a whole number: r·d·(n/(s+m))^l / n for the
    # layers l below a parent
    batch = times * plan.load.denominator * n**L * (s + m) ** L
    expected = np.full(plan.size, plan.load * batch, dtype=np.int64)
    if not root_computes:
        expected[0] = 0
    np.testing.assert_array_equal(loads(plan, batch), expected)


def test_loads_of_the_reference_job():
    # 12 workers of the (3, 2) tree at s = 1: 4/15 of the batch each
    np.testing.assert_array_equal(loads(PLANS["regular"], 15 * 6), [0] + [24] * 12)


@each_plan
@pytest.mark.parametrize("batch", [1, 2, 7, 40])
def test_shares_are_distinct_examples_and_as_many_as_the_loads_say(plan, batch):
    for rank in range(plan.size):
        indices, coefficients = shares(plan, rank, batch)
        assert len(set(indices.tolist())) == len(indices) == loads(plan, batch)[rank]
        assert coefficients.shape == (
            len(indices),
            plan.parts_above[rank],
            plan.slices_above[rank],
        )
        assert indices.dtype == np.int64 and coefficients.dtype == np.float64
        assert ((0 <= indices) & (indices < batch)).all()


@each_plan
@pytest.mark.parametrize("batch", [1, 2, 7, 40])
def test_padding(plan, batch):
    lengths = set()
    for rank in range(plan.size):
        own, coefficients = shares(plan, rank, batch)
        indices, weights = assignment(plan, rank, batch)
        flat = weights.reshape(len(indices), -1)
        real = flat.any(axis=1)
        lengths.add(len(indices))
        assert indices.dtype == np.int64 and weights.dtype == np.float64
        # the indices without the padding are the rank's examples, in some order
        order, expected = np.argsort(indices[real]), np.argsort(own)
        np.testing.assert_array_equal(indices[real][order], own[expected])
        np.testing.assert_array_equal(
            flat[real][order], coefficients[expected].reshape(-1, flat.shape[1])
        )
        # padding repeats an example of this rank, or example 0
        assert set(indices[~real]) <= (set(own) if len(own) else {0})
    assert len(lengths) == 1 and lengths.pop() >= 1


@each_plan
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_shape_of_the_weights(plan, batch):
    grids = set()
    for rank in range(plan.size):
        indices, weights = assignment(plan, rank, batch)
        if plan.strategy.slices == 1:
            assert weights.shape == indices.shape
            continue
        chunks, chunk_size, M = weights.shape
        grids.add((chunks, chunk_size))
        assert chunks * chunk_size == len(indices) and M == plan.slices_above[rank]
        for chunk in weights:
            real = chunk[chunk.any(axis=1)]
            assert (real == real[:1]).all()
    assert len(grids) <= 1


def test_without_slices_nothing_is_padded_beyond_the_largest_load():
    plan = PLANS["irregular"]
    assert len(assignment(plan, 0, 100)[0]) == loads(plan, 100).max()


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(21, Coded(fanout=4)),
        make_plan(7, Coded(fanout=2)),
        make_plan(13, Coded(fanout=3, stragglers=2)),
        make_plan(43, Coded(fanout=6, stragglers=2)),
    ],
    ids=["4 children", "2 children", "s = 2", "6 children"],
)
@pytest.mark.parametrize("batch", [1, 5, 64, 101])
def test_siblings_of_a_repetition_group_have_bitwise_equal_assignments(plan, batch):
    def subtree(rank):
        return [
            rank,
            *(below for child in plan.coded_children(rank) for below in subtree(child)),
        ]

    compared = 0
    for rank, coding in enumerate(plan.codings):
        if coding is None:
            continue
        assert coding.code.name == "fractional_repetition"
        children, replicas = plan.coded_children(rank), coding.code.stragglers + 1
        for first in range(0, len(children), replicas):
            for sibling in children[first + 1 : first + replicas]:
                for one, other in zip(
                    subtree(children[first]), subtree(sibling), strict=True
                ):
                    for a, b in zip(
                        assignment(plan, one, batch), assignment(plan, other, batch)
                    ):
                        assert a.tobytes() == b.tobytes()
                        compared += 1
    assert compared


def test_every_example_has_enough_holders():
    plan = make_plan(13, Coded(fanout=12, stragglers=2, slices=2))
    held = np.zeros(50, int)
    for rank in range(plan.size):
        held[shares(plan, rank, 50)[0]] += 1
    assert (held == 4).all()


def test_weights_of_replicas_are_ones():
    indices, weights = assignment(
        make_plan(5, Coded(fanout=4)), 3, 6
    )  # the second group of two
    assert indices.tolist() == [3, 4, 5] and weights.tolist() == [1, 1, 1]


def test_one_rank_reads_the_batch():
    indices, weights = assignment(make_plan(1, Coded()), 0, 4)
    assert indices.tolist() == [0, 1, 2, 3] and weights.tolist() == [1, 1, 1, 1]


def test_shares_in_the_large():
    """Before rounding, every worker of a regular tree computes exactly r of the batch."""
    plan = PLANS["regular"]
    for rank in range(1, plan.size):
        assert plan.assigned[rank] / plan.capacities[rank] * plan.load == Fraction(
            4, 15
        )
