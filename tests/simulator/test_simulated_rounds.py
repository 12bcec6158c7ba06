"""Compare the simulator with rounds computed rank by rank and piece by piece."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded

import jaxcoded
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate, stragglers

FREE = {"latency": 0.0, "overhead": 0.0, "call": 0.0, "bandwidth": np.inf}
BY_ROOT = {"sections_from": 0}


def by_hand(plan, network, payload, work, model, rounds, seed):
    """Return when the root has each result, and which ranks left out their work.

    This covers only parents for which any n − s children suffice, and ports of
    unlimited speed.
    """
    tree, delays = plan.tree, model.rounds(plan.size, seed)
    free = dict.fromkeys(range(plan.size), 0.0)
    ends, skipped = [], [0] * plan.size

    def pieces_of(length):
        return max(1, int(np.ceil(length / network.piece)))

    def moving(length, sources):
        """Return the seconds to ask for a piece and to receive one from each source."""
        piece = length / pieces_of(length)
        inlined = length <= network.inline
        taken = sources * network.overhead
        if not inlined:
            taken += sources * piece / network.bandwidth
        return (0 if inlined else (network.trips - 1) * network.latency), taken

    for drawn in itertools.islice(delays, rounds):
        called = {}
        for rank in range(plan.size):
            mine = work * float(plan.load_of(rank))
            spent = mine * drawn.factor[rank] + drawn.seconds[rank] if mine else 0.0
            called[rank] = free[rank] + spent
        there = {}  # when each rank has each piece of its sum
        for rank in reversed(tree.order):
            children = tree.children[rank]
            length = payload / plan.slices_above[rank]
            if not children:
                there[rank] = [called[rank]] * pieces_of(length)
                continue
            below = payload / plan.slices_above[children[0]]
            needs = len(children) - plan.tolerance(rank)
            offers = sorted((there[c][0] + network.latency, c) for c in children)[
                :needs
            ]
            clock = 0.0
            for time, _ in offers:  # in order of time
                handling = network.overhead
                if below <= network.inline:
                    handling += below / network.bandwidth
                clock = max(clock, time) + handling
            ask, take = moving(below, needs)
            clock, mine = max(clock, called[rank]) + ask, []
            for number in range(pieces_of(below)):
                latest = max(there[c][number] for _, c in offers)
                clock = max(clock, latest + network.latency + ask) + take
                mine.append(clock)
            there[rank] = mine
        here = {plan.root: there[plan.root]}
        ask, _ = moving(payload, 1)
        for rank in tree.order[1:]:
            above = tree.parents[rank]
            siblings = len(tree.children[above])
            piece = payload / pieces_of(payload)
            take = siblings * network.overhead
            if payload > network.inline:
                take += piece / network.bandwidth
            clock, mine = 0.0, []
            for time in here[above]:
                clock = max(clock, time + network.latency + ask) + take
                mine.append(clock)
            here[rank] = mine
        ends.append(here[plan.root][-1] + network.call)
        for rank in range(plan.size):
            result = here[rank][-1]
            if free[rank] >= result:
                skipped[rank] += 1
                free[rank] += payload / network.combine + network.call
            else:
                free[rank] = max(called[rank], result) + network.call
    return np.array(ends), np.array(skipped)


MODELS = ("none", "exponential", "pareto", "fixed(ranks=(-1, 1))", "bursty(begin=0.2)")


@given(
    size=st.integers(3, 30),
    fanout=st.integers(2, 6),
    s=st.integers(0, 2),
    model=st.sampled_from(MODELS),
    payload=st.sampled_from([0.0, 1e3, 1e5, 3e6]),
    work=st.sampled_from([0.0, 0.1, 10.0]),
    seed=st.integers(0, 100),
)
@bounded
def test_against_rounds_by_hand(size, fanout, s, model, payload, work, seed):
    try:
        plan = jaxcoded.make_plan(
            size, jaxcoded.Coded(fanout=fanout, stragglers=s, code="random_generator")
        )
    except ValueError:
        return  # no such plan exists
    network = Network(
        latency=1e-3, bandwidth=1e8, send_bandwidth=np.inf, combine=np.inf, **BY_ROOT
    )
    delays = stragglers.named(model)
    arguments = network, payload, work, delays, 12, seed
    ends, skipped = by_hand(plan, *arguments)
    out = simulate(
        Layout.of(plan),
        network,
        payload=payload,
        work=work,
        stragglers=delays,
        rounds=12,
        seed=seed,
    )
    if payload <= network.piece:
        np.testing.assert_allclose(out.ends, ends, rtol=1e-9)
        np.testing.assert_array_equal(out.skipped, skipped)
    else:  # assume that pieces between the first and the last are evenly spaced
        np.testing.assert_allclose(out.ends, ends, rtol=0.02)


@pytest.mark.parametrize("size", [8, 13, 40])
@pytest.mark.parametrize("fanout", [3, 4, 7])
@pytest.mark.parametrize(("s", "m"), [(0, 1), (1, 1), (2, 1), (1, 2), (0, 2)])
def test_balanced_layout_is_that_of_the_plan(size, fanout, s, m):
    if s + m > fanout:
        with pytest.raises(ValueError, match="need fanout"):
            Layout.balanced(size, fanout, s, m)
        return
    plan = jaxcoded.make_plan(
        size, jaxcoded.Coded(fanout=fanout, stragglers=s, slices=m)
    )
    found, expected = Layout.balanced(size, fanout, s, m), Layout.of(plan)
    for name in ("loads", "messages", "needs", "copies"):
        by_rank = np.empty((2, size))
        by_rank[0][found.ranks] = getattr(found, name)
        by_rank[1][expected.ranks] = getattr(expected, name)
        np.testing.assert_allclose(by_rank[0], by_rank[1], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("late", [12, 1])
def test_a_rank_that_is_always_late_costs_nothing(late):
    """The late rank is a leaf or has children, and leaves out most of its work."""
    slow = stragglers.FixedSlow(ranks=(late,), factor=10.5)
    layout, network = Layout.balanced(13, 3, 1), Network(**FREE, **BY_ROOT)
    job = {"payload": 1e6, "work": 1.5, "rounds": 50}
    usual = simulate(layout, network, **job)
    out = simulate(layout, network, **job, stragglers=slow)
    np.testing.assert_allclose(out.seconds, usual.seconds)
    assert usual.skipped.sum() == 0
    assert out.skipped[late] >= 50 * 8 / 10 and out.skipped.sum() == out.skipped[late]
    assert out.used[late] == 0
    uncoded = simulate(Layout.balanced(13, 3), network, **job, stragglers=slow)
    assert uncoded.mean == pytest.approx(10.5 * 1.5 / 12, rel=0.01)


@pytest.mark.parametrize(("s", "ends"), [(0, False), (1, True)])
def test_killed(s, ends):
    out = simulate(
        Layout.balanced(13, 3, s),
        Network(),
        payload=1e6,
        work=1.0,
        stragglers=stragglers.Killed(ranks=(1,), round=4),
        rounds=10,
    )
    assert np.isfinite(out.ends).sum() == (10 if ends else 3)
    assert np.isfinite(out.mean) == ends
    assert out.used[1] <= 3
    assert out.skipped[1] == 0  # rank 1 is dead, not late


def test_stopped_rank_passes_on_nothing():
    """Ranks below the stopped rank ask further up after a while, and take part again."""
    network = Network(**FREE, **BY_ROOT)
    job = {"payload": 1e6, "work": 0.15, "rounds": 30}
    layout = Layout.balanced(13, 3, 1)
    model = stragglers.Stopped(ranks=(1,), round=3, seconds=0.4)
    out = simulate(layout, network, **job, stragglers=model)
    usual = simulate(layout, network, **job)
    np.testing.assert_allclose(out.ends, usual.ends)
    below = [4, 5, 6]
    # rounds take 40 ms, so its patience is 160 ms
    assert all(3 <= out.skipped[rank] <= 5 for rank in below)
    assert out.skipped[1] >= 9
    assert out.skipped[2] == out.skipped[7] == 0


def test_ring_waits_for_the_slowest():
    network = Network(latency=1e-3, bandwidth=1e8, overhead=0, call=0, combine=np.inf)
    out = simulate(Ring(10), network, payload=1e6, work=1.0, rounds=5)
    # 18 steps of 1 ms and 100 KB
    np.testing.assert_allclose(out.seconds, 0.1 + 18 * (1e-3 + 1e-3))
    slow = stragglers.FixedSlow(ranks=(3,), factor=10)
    out = simulate(Ring(10), network, payload=1e6, work=1.0, rounds=5, stragglers=slow)
    np.testing.assert_allclose(out.seconds, 1.0 + 18 * (1e-3 + 1e-3))


def test_star_sends_to_one_after_the_other():
    """The root's port limits the time in both directions."""
    free = {"latency": 0, "overhead": 0, "call": 0, "combine": np.inf} | BY_ROOT
    job = {"payload": 50e6, "work": 0, "rounds": 4}
    whole = Network(bandwidth=1e8, piece=50_000_000, **free)
    out = simulate(Layout.balanced(11, 10), whole, **job)
    # 10 × 0.5 s up, and then 10 × 0.5 s down before the next round
    assert out.seconds.tolist() == pytest.approx([5.0, 10.0, 10.0, 10.0])
    # pieces go down while other pieces come up
    out = simulate(Layout.balanced(11, 10), Network(bandwidth=1e8, **free), **job)
    assert out.seconds.tolist() == pytest.approx([5.0] * 4, rel=0.02)


def test_pieces_flow_through_the_layers():
    """Depth costs latency, not bandwidth."""
    network = Network(latency=0, bandwidth=1e8, overhead=0, call=0, combine=np.inf)
    deep = Layout.balanced(1 + 2 + 4 + 8, 2)
    out = simulate(deep, network, payload=50e6, work=0, rounds=2)
    assert out.seconds[0] == pytest.approx(2 * 0.5, rel=0.05)


def test_a_hundred_thousand_ranks():
    layout = Layout.balanced(101_011, 47, 1)
    out = simulate(
        layout,
        Network(),
        payload=4e6,
        work=1e4,
        stragglers=stragglers.Pareto(),
        rounds=3,
    )
    assert np.isfinite(out.mean) and out.used.shape == (101_011,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"payload": -1},
        {"work": np.nan},
        {"network": {"bandwidth": 0}},
        {"network": {"latency": -1}},
        {"network": {"trips": 0}},
    ],
)
def test_misuse(wrong):
    job = {"payload": 1.0, "work": 1.0} | wrong
    with pytest.raises(ValueError, match="must be"):
        simulate(Layout.balanced(4, 3), Network(**job.pop("network", {})), **job)


def test_misuse_of_layouts():
    with pytest.raises(TypeError, match=r"Layout.of takes a Plan.*got Plan"):
        simulate(
            jaxcoded.make_plan(4, jaxcoded.Coded()), Network(), payload=1.0, work=1.0
        )
    with pytest.raises(ValueError, match="size must be an integer"):
        Ring(1)
    with pytest.raises(ValueError, match="size must be an integer"):
        Layout.balanced(1, 3)
