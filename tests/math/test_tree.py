import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, paper_parents

from jaxcoded import Coded, make_plan
from jaxcoded.plan.tree import (
    Tree,
    balanced_parents,
    default_fanout,
    parents_by_host,
    regular_size,
)


def fanouts(parents):
    return [parents.count(rank) for rank in sorted(set(parents) - {-1})]


def test_ranks_below_an_explicit_root():
    tree = Tree((2, 2, -1, 0, 3, 2))
    assert (tree.size, tree.root, tree.depth) == (6, 2, 3)
    assert tree.children == ((3,), (), (0, 1, 5), (4,), (), ())
    assert tree.order == (2, 0, 1, 5, 3, 4)
    assert tree.layers == (1, 1, 0, 2, 3, 1)


def test_the_own_number_marks_the_root_too():
    assert Tree((1, 1, 1)) == Tree((1, -1, 1))


def test_ranks_of_numpy_are_ranks():
    tree = Tree(tuple(np.array([-1, 0, 0])))
    assert tree == Tree((-1, 0, 0)) and hash(tree) == hash(Tree((-1, 0, 0)))


def test_one_rank():
    tree = Tree((-1,))
    assert (tree.root, tree.depth, tree.children) == (0, 0, ((),))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), r"exactly one root \(parent -1\), got roots \[\]"),
        ((1, 2, 0), r"exactly one root \(parent -1\), got roots \[\]"),
        ((-1, -1, 0), r"exactly one root \(parent -1\), got roots \[0, 1\]"),
        ((-1, 1, 0), r"exactly one root \(parent -1\), got roots \[0, 1\]"),
        ((-1, 0, 3), "the parent of rank 2 must be an integer from -1 to 2, got 3"),
        ((-1, 0, -2), "the parent of rank 2 must be an integer from -1 to 2, got -2"),
        ((-1, 0, 3, 2), "parents contain a cycle through rank 2"),
        (
            (-1, 0, None),
            "the parent of rank 2 must be an integer from -1 to 2, got None",
        ),
        ((-1, 0, "0"), "the parent of rank 2 must be an integer from -1 to 2, got '0'"),
        ((-1, 0, 0.0), "the parent of rank 2 must be an integer from -1 to 2, got 0.0"),
        (
            (-1, 0, False),
            "the parent of rank 2 must be an integer from -1 to 2, got False",
        ),
        (
            (-1, 0, [0]),
            r"the parent of rank 2 must be an integer from -1 to 2, got \[0\]",
        ),
    ],
)
def test_misuse_of_parents(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


@pytest.mark.parametrize(
    ("n", "L", "size"),
    [(3, 2, 13), (4, 3, 85), (9, 2, 91), (5, 3, 156), (12, 2, 157), (2, 1, 3)],
)
def test_regular_trees_are_those_of_the_paper(n, L, size):
    assert regular_size(n, L) == size
    assert balanced_parents(size, n, 1) == tuple(paper_parents(size, n))
    assert Tree(balanced_parents(size, n, 1)).depth == L


@bounded
@given(st.integers(1, 6), st.integers(0, 12), st.integers(1, 2000))
def test_a_given_fanout_is_kept_and_spread(needed, more, workers):
    fanout, size = needed + more, needed + workers
    parents = balanced_parents(size, fanout, needed)
    counts = fanouts(parents)
    assert Tree(parents).size == size and Tree(parents).root == 0
    assert sorted(parents) == list(parents)  # ranks are numbered breadth first
    assert max(counts) <= fanout
    short = [count for count in counts if count < needed]
    # p parents can have needed … fanout children each iff p·needed ≤ size − 1 ≤ p·fanout
    possible = any(p * needed <= size - 1 <= p * fanout for p in range(1, size))
    assert not short if possible else len(short) == 1
    full = [count for count in counts if count >= needed]
    assert max(full) - min(full) <= 1


@bounded
@given(st.integers(1, 8), st.integers(1, 2000))
def test_default_fanout_reaches_at_the_smallest_depth(needed, workers):
    size = needed + workers
    fanout = default_fanout(size, needed)
    depth = Tree(balanced_parents(size, fanout, needed)).depth
    assert needed <= fanout <= max(8, 2 * needed)
    assert depth == 1 or regular_size(max(8, 2 * needed), depth - 1) < size


@pytest.mark.parametrize(
    ("size", "s"),
    [(11, 2), (12, 2), (10, 3), (20, 3), (40, 3), (16, 6), (23, 7)],
)
def test_default_tree_keeps_the_stragglers_at_every_parent_where_a_tree_can(size, s):
    plan = make_plan(size, Coded(stragglers=s))
    assert all(
        coding.code.stragglers == s for coding in plan.codings if coding is not None
    )


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30))
@bounded
def test_trees_that_follow_hosts(hosts):
    tree = Tree(parents_by_host(hosts))
    assert tree.root == 0 and tree.depth <= 2
    leaders = tree.children[0]
    # the first rank of each host
    assert [hosts[rank] for rank in leaders] == list(dict.fromkeys(hosts[1:]))
    assert all(
        hosts[:rank].count(hosts[rank]) == (hosts[rank] == hosts[0]) for rank in leaders
    )
    for rank, parent in enumerate(tree.parents):
        assert rank in (0, *leaders) or hosts[parent] == hosts[rank]


def test_plans_that_follow_hosts():
    hosts = ["a", "b", "c", "a", "b", "c"]
    assert make_plan(6, Coded(by_host=True), hosts=hosts).parents == (-1, 0, 0, 0, 1, 2)
    star = make_plan(4, Coded(stragglers=1, by_host=True), hosts=list("abcd"))
    assert star.parents == make_plan(4, Coded(fanout=3, stragglers=1)).parents
    alone = make_plan(13, Coded(by_host=True), hosts=["a"] * 13)
    assert alone.parents == make_plan(13, Coded()).parents


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "needs the name of each rank's host"),
        ({"fanout": 3}, "give fanout or by_host, not both"),
        ({"parents": [-1, 0, 0, 0]}, "give parents or by_host, not both"),
    ],
)
def test_plans_that_cannot_follow_hosts(asked, text):
    with pytest.raises(ValueError, match=text):
        make_plan(4, Coded(by_host=True, **asked))
    with pytest.raises(ValueError, match="hosts has 3 entries for size=4 ranks"):
        make_plan(4, Coded(by_host=True), hosts="abc")
