"""Simulated sums in sections: who sends how much, how long it takes, and for whom nobody waits."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded
from piece_by_piece import Play

import jaxcoded
from jaxcoded.planner import search
from jaxcoded.simulator import Layout, Network, Ring, simulate, stragglers
from jaxcoded.simulator.network import SECTIONS_FROM
from jaxcoded.simulator.sections import Sections, forms_sections

# A cable of 200 Mbit/s without the headers of TCP, both ways.
CABLE = Network(latency=2e-4, bandwidth=200e6 / 8 * 1448 / 1514)
FREE = {"overhead": 0.0, "call": 0.0, "combine": np.inf}


def star(workers, s=0):
    return Layout.balanced(workers + 1, workers, s)


def seconds(layout, network, payload, **job):
    """Of a round among others."""
    job = {"work": 0.0, "rounds": 6} | job
    return simulate(layout, network, payload=payload, **job).seconds[1:].mean()


stars = st.integers(1, 70).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, min(n - 1, 6)))
)


@given(
    stars,
    st.floats(7e4, 1e8),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@bounded
def test_what_is_sent_is_received(shape, payload, seed, computes):
    rng = np.random.default_rng(seed)
    n, s = shape
    layout = star(n, s)
    if computes:
        layout.loads[0] = layout.loads.max()
    job = Sections(layout, CABLE, payload)
    there, has = rng.random(n) < 0.8, rng.random(n) < 0.9
    there[rng.integers(n)] = True
    joins = ~there & (rng.random(n) < 0.5)
    it = job.traffic(there, has, joins)
    assert it.terms_sent.sum() == pytest.approx(it.terms_received.sum())
    assert it.sections_sent.sum() == pytest.approx(it.sections_received.sum())
    assert all((column >= -1e-6 * payload).all() for column in it[:4])
    # everybody fetches all but its own section, and who is not there sends nothing
    fetching = there.sum() + joins.sum()
    assert it.sections_received.sum() == pytest.approx(fetching * payload)
    assert not any(it[way][1:][joins].any() for way in (0, 1, 2))
    away = np.append(False, ~there & ~joins)
    assert not any(column[away].any() for column in it[:4])
    assert not it.used[1:][~(there & has)].any()


@pytest.mark.parametrize(
    ("n", "s", "share"), [(12, 0, 1), (12, 1, 1 / 2), (12, 3, 1 / 4), (6, 2, 1 / 3)]
)
def test_ports_carry_as_much_as_the_engine_says(n, s, share):
    """V / (s + 1) up and V down, less what a rank has itself; the root's own vector goes to all."""
    payload = 256 * 1024.0 * 12 * (n + 1)
    everybody = np.ones(n, bool)
    it = Sections(star(n, s), CABLE, payload).traffic(everybody, everybody, ~everybody)
    own = payload / (n + 1)
    np.testing.assert_allclose(it.sections_sent, payload - own)
    np.testing.assert_allclose(it.sections_received, payload - own)
    np.testing.assert_allclose(it.terms_received[1:], own * n * share)
    np.testing.assert_allclose(it.terms_sent[0], payload - own)
    # each of the copies forms a section itself, and a turn is a section
    np.testing.assert_allclose(it.terms_sent[1:], share * payload, atol=1.6 * own)


def terms(n, s, copies, count):
    """From whose messages each section is formed where everybody is there."""
    for k in range(count):
        if copies > 1:
            yield [0, *(first + k % copies for first in range(1, n + 1, copies))]
        else:
            yield [0, *((k * n // count + i) % n + 1 for i in range(n - s))]


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("payload", [2e5, 2e6, 20e6])
@pytest.mark.parametrize(
    ("n", "s"), [(3, 1), (6, 0), (6, 1), (12, 0), (12, 1), (12, 3), (20, 0), (39, 2)]
)
def test_near_rounds_played_piece_by_piece(n, s, payload, both_ways):
    network = dataclasses.replace(CABLE, **FREE)
    if not both_ways:  # ports that receive as fast as memory
        network = dataclasses.replace(
            network, bandwidth=4e8, send_bandwidth=CABLE.bandwidth
        )
    job = Sections(star(n, s), network, payload)
    everybody = np.ones(n, bool)
    traffic = job.traffic(everybody, everybody, ~everybody)
    piece = payload / job.pieces
    played = Play(
        list(terms(n, s, job.copies, traffic.sections)),
        n + 1,
        job.pieces,
        piece / network.sending,
        piece / network.bandwidth,
        network.latency,
    )
    sent = traffic.terms_sent + traffic.sections_sent
    received = traffic.terms_received + traffic.sections_received
    np.testing.assert_allclose(sent / piece, played.sent)
    np.testing.assert_allclose(received / piece, played.received)
    up = job.up(np.zeros(n + 1), np.zeros(n + 1))
    assert 0.75 <= up.last[1:].max() / max(played.here) <= 1.25


def test_time_of_the_busiest_port():
    """Equal ports and few ranks: what it carries, and latencies."""
    network = dataclasses.replace(CABLE, **FREE)
    payload = 256 * 1024.0 * 12 * 4
    carries = 2 * payload * 3 / 4  # all messages, and all sections, but for its own
    expected = carries / network.bandwidth + 6 * network.latency
    # the offer, and before that the result
    expected += network.latency
    assert seconds(star(3), network, payload) == pytest.approx(expected, rel=1e-9)
    slow = dataclasses.replace(network, latency=0.01)
    more = seconds(star(3), slow, payload) - seconds(star(3), network, payload)
    assert more == pytest.approx(7 * (0.01 - 2e-4), rel=1e-6)


@given(stars, st.floats(7e4, 3e7), st.floats(1.0, 4.0))
@bounded
def test_more_takes_longer(shape, payload, times):
    layout = star(*shape)
    shorter, longer = (
        seconds(layout, CABLE, each) for each in (payload, payload * times)
    )
    # pieces are whole, so that sections differ by one
    assert longer >= 0.8 * shorter
    assert seconds(layout, CABLE, 8 * payload) > seconds(layout, CABLE, payload)


@given(stars, st.floats(0.0, 1e7), st.sampled_from(["none", "exponential", "pareto"]))
@bounded
def test_short_sums_and_other_networks_are_as_before(shape, payload, model):
    layout = star(*shape)
    off = dataclasses.replace(CABLE, sections_from=0)
    job = {"payload": payload, "work": 1.0, "stragglers": model, "rounds": 8}
    before = simulate(layout, off, **job)
    least = dataclasses.replace(CABLE, sections_from=int(payload) + 1)
    for network in (least, *[CABLE] * (payload < SECTIONS_FROM)):
        assert not forms_sections(layout, network, payload)
        np.testing.assert_array_equal(
            simulate(layout, network, **job).ends, before.ends
        )


def test_who_forms_sections():
    assert forms_sections(star(12), CABLE, 1e6)
    assert forms_sections(star(12, 1), CABLE, SECTIONS_FROM)
    assert not forms_sections(star(12), CABLE, SECTIONS_FROM - 1)
    assert not forms_sections(Layout.balanced(13, 3), CABLE, 1e6)
    # messages are half as long as the sum
    assert not forms_sections(Layout.balanced(13, 12, 1, 2), CABLE, 1e6)
    # one host: ranks read each other's memory
    assert not forms_sections(star(12), Network(trips=1), 1e6)
    assert forms_sections(star(12), Network(trips=1, sections_from=1), 1e6)
    with pytest.raises(ValueError, match="sections_from must be"):
        Network(sections_from=-1)


@pytest.mark.parametrize(("s", "waits"), [(0, True), (1, False)])
def test_a_late_rank_is_waited_for_if_it_is_needed(s, waits):
    slow = stragglers.FixedSlow(ranks=(12,), factor=50)
    job = {"payload": 2e6, "work": 1.2, "rounds": 20}
    out = simulate(star(12, s), CABLE, **job, stragglers=slow)
    usual = simulate(star(12, s), CABLE, **job)
    load = 0.1 * (s + 1)
    if waits:
        assert out.mean > 50 * load
        assert out.used[12] == 20
    else:
        # one section fewer, and so not all of them are of as many pieces
        assert out.mean == pytest.approx(usual.mean, rel=0.1)
        assert out.used[12] == 0 and out.skipped[12] > 10
        assert all(out.used[1:11] == 20)


def test_who_comes_soon_forms_a_section_too():
    """2 ms after messages suffice, as the engine waits; later it fetches what the others form, and
    once the root has all, the result from the root."""
    payload, called = 2e6, np.zeros(13)
    for later, used, in_time in (
        (0.001, True, True),
        (0.003, False, True),
        (0.5, False, False),
    ):
        job = Sections(star(12, 1), CABLE, payload)
        called[12] = later
        up = job.up(called, called)
        assert up.used[12] == used
        assert np.isfinite(up.last[12]) == in_time
        here = job.down(up, np.full(13, -np.inf), 1.0)
        if in_time:
            assert here[12] == up.last[12]
        else:
            fetching = here[12] - up.last[0]
            assert fetching == pytest.approx(payload / CABLE.bandwidth, rel=0.02)
            # meanwhile the root has less to spare for the next round
            called[:] = here
            again = job.up(called, called).last[0]
            fresh = Sections(star(12, 1), CABLE, payload).up(called, called).last[0]
            assert again >= fresh
    assert job.up(np.zeros(13), np.zeros(13)).last[0] > 2 * up.last[0]


def test_a_dead_rank_without_redundancy_ends_the_job():
    dies = stragglers.Killed(ranks=(1,), round=4)
    job = {"payload": 1e6, "work": 1.0, "rounds": 10, "stragglers": dies}
    assert np.isfinite(simulate(star(12), CABLE, **job).ends).sum() == 3
    assert np.isfinite(simulate(star(12, 1), CABLE, **job).ends).all()


def test_shared_work_ends_with_a_sum_in_sections():
    plan = jaxcoded.make_plan(
        13, code="shared(replicas=2, blocks=6)", root_computes=False
    )
    off = dataclasses.replace(CABLE, sections_from=0)
    by_the_root, in_sections = (
        seconds(Layout.of(plan), network, 20e6, work=1.2) for network in (off, CABLE)
    )
    assert in_sections < 0.3 * by_the_root
    short = [seconds(Layout.of(plan), it, 1e3, work=1.2) for it in (off, CABLE)]
    assert short[0] == short[1]


def test_figures_of_thirteen_hosts():
    """In `benchmarks/README.md` they take 0.2 and 1.4 to 2.0 s, by the root 1.5 and 6 to 10 s."""
    off = dataclasses.replace(CABLE, sections_from=0)
    for s in (0, 1):
        assert 0.15 < seconds(star(12, s), CABLE, 2e6) < 0.25
        assert 1.4 < seconds(star(12, s), CABLE, 20e6) < 2.1
        assert 6 < seconds(star(12, s), off, 20e6) < 11


@pytest.mark.parametrize("payload", [2e6, 20e6])
def test_the_planner_takes_a_star_for_long_sums(payload):
    ranking = search.best_plans(13, payload, 0.1, CABLE, replicas=0)
    assert ranking.best_tree.candidate.fanout == 12
    off = dataclasses.replace(CABLE, sections_from=0)
    ranking = search.best_plans(13, payload, 0.1, off, replicas=0)
    assert ranking.best_tree.candidate.fanout < 12


def test_the_ring_moves_as_much():
    """A star in sections without redundancy is the ring's two halves, but for its latencies."""
    quick = dataclasses.replace(CABLE, latency=0.0, **FREE)
    ring, sections = (seconds(it, quick, 50e6) for it in (Ring(4), star(3)))
    assert sections == pytest.approx(ring, rel=0.02)
    far = dataclasses.replace(CABLE, latency=0.05)
    ring, sections = (seconds(it, far, 1e6) for it in (Ring(13), star(12)))
    assert sections < 0.5 * ring


def test_a_star_of_a_hundred_thousand_ranks():
    out = simulate(
        Layout.balanced(100_001, 100_000, 1000),
        Network(),
        payload=4e6,
        work=1e4,
        stragglers=stragglers.Pareto(),
        rounds=3,
    )
    assert np.isfinite(out.mean)
    assert out.used.sum() > 0 and all(itertools.islice(out.ends > 0, 3))
