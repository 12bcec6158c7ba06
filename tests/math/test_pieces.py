"""Which sums of a group are formed in sections."""

import pytest

from jaxcoded import Coded, make_plan
from jaxcoded.transport.pieces import delegating, pays_between_hosts, pays_on_one_host


@pytest.mark.parametrize(
    ("hosts", "expected"), [("aabcabc", {0, 1, 2}), ("abcbbcc", {0})]
)
def test_parents_of_children_on_other_hosts(hosts, expected):
    tree = make_plan(7, Coded(fanout=2, stragglers=0))
    assert delegating(tree, hosts) == expected


def test_trees_that_follow_hosts_and_chains():
    hosts = ["a", "a", "a", "b", "b"]
    by_host = make_plan(5, Coded(by_host=True), hosts=hosts)
    chain = make_plan(5, Coded(parents=[-1, 0, 1, 2, 3], stragglers=0))
    assert pays_between_hosts(by_host, hosts)
    assert not pays_between_hosts(chain, hosts)


@pytest.mark.parametrize(("fanout", "pays"), [(2, False), (3, True), (5, True)])
def test_two_layers_with_a_host_for_each_rank(fanout, pays):
    tree = make_plan(1 + fanout + fanout**2, Coded(fanout=fanout))
    assert pays_between_hosts(tree, range(tree.size)) == pays


@pytest.mark.parametrize(
    ("size", "stragglers", "cores", "pays"),
    [
        (13, 1, 1, False),
        (13, 1, 2, False),
        (13, 1, 4, True),
        (13, 0, 2, True),
        (2, 0, 16, False),  # one rank adds while the other copies
    ],
)
def test_one_host(size, stragglers, cores, pays):
    star = make_plan(size, Coded(fanout=size - 1, stragglers=stragglers))
    assert pays_on_one_host(star, cores) == pays
