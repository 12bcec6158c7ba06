"""Find the number of bytes from which on sums in sections are faster."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcoded.tools.planner.crossover import sections_pay_from
from jaxcoded.tools.simulator import Layout, Network, simulate


def seconds(layout, network, payload, least):
    network = dataclasses.replace(network, sections_from=least)
    job = simulate(layout, network, payload=payload, work=0.0, rounds=3)
    return job.seconds[-1]


@given(
    ranks=st.integers(2, 40),
    s=st.integers(0, 2),
    gigabits=st.sampled_from([0.1, 1, 10, 100]),
    latency=st.sampled_from([1e-5, 1e-4, 1e-3]),
)
@settings(max_examples=40)
def test_sections_pay_above_the_crossover_and_not_below(ranks, s, gigabits, latency):
    layout = Layout.balanced(ranks, ranks - 1, min(s, ranks - 2))
    network = Network.of(gigabits, latency=latency)
    least = sections_pay_from(layout, network)
    for power in range(12, 27):
        payload = 1 << power
        gain = seconds(layout, network, payload, 0) / seconds(
            layout, network, payload, 1
        )
        if least and payload >= least:
            assert gain > 1
        elif payload == (least or 1 << 27) // 2:
            assert gain <= 1


def test_latency_moves_the_crossover_up():
    star = Layout.balanced(13, 12, 1)
    latencies = (1e-5, 1e-4, 1e-3, 1e-2)
    found = [
        sections_pay_from(star, Network.of(10, latency=latency))
        for latency in latencies
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize(("fanout", "pays"), [(2, False), (3, True), (4, True)])
def test_trees_that_form_some(fanout, pays):
    found = sections_pay_from(Layout.balanced(13, fanout), Network.of(1))
    assert (found > 0) == pays
