"""Simulated sums in sections: how much each rank sends, how long sums take, and which ranks the group does not wait
for.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from cases import more
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded
from piece_by_piece import Play

import jaxcoded
from jaxcoded.plan.sections import SECTION_PIECES, SECTIONS_FROM
from jaxcoded.tools.planner import search
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate, stragglers
from jaxcoded.tools.simulator.sections import Sections, forms_sections

# A cable of 200 Mbit/s in both directions, without the headers of TCP.
CABLE = Network(latency=2e-4, bandwidth=200e6 / 8 * 1448 / 1514)
FREE = {"overhead": 0.0, "call": 0.0, "combine": np.inf}


def star(workers, s=0, m=1):
    return Layout.balanced(workers + 1, workers, s, m)


def seconds(layout, network, payload, **job):
    """Return the seconds of a round that follows other rounds."""
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
def test_traffic_sent_equals_traffic_received(shape, payload, seed, computes):
    rng = np.random.default_rng(seed)
    n, s = shape
    layout = star(n, s)
    layout.loads[0] = computes
    job = Sections(layout, CABLE, payload)
    there, has = rng.random(n) < 0.8, rng.random(n) < 0.9
    there[rng.integers(n)] = True
    joins = ~there & (rng.random(n) < 0.5)
    traffic = job.traffic(there, has, joins)
    assert traffic.terms_sent.sum() == pytest.approx(traffic.terms_received.sum())
    assert traffic.sections_sent.sum() == pytest.approx(traffic.sections_received.sum())
    assert all((column >= -1e-6 * payload).all() for column in traffic[:4])
    # every rank fetches all sections but its own, and absent ranks send nothing
    fetching = there.sum() + joins.sum()
    assert traffic.sections_received.sum() == pytest.approx(fetching * payload)
    assert not any(traffic[way][1:][joins].any() for way in (0, 1, 2))
    away = np.append(False, ~there & ~joins)
    assert not any(column[away].any() for column in traffic[:4])
    assert not traffic.used[1:][~(there & has)].any()


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("s", [0, 1, 2, 3, 5])
def test_ports_carry_the_predicted_traffic(s, computes):
    """A port moves messages and sections to all other ranks; equal copies take turns."""
    n = 12
    layout = star(n, s)
    layout.loads[0] = computes
    payload = 60 * 1024.0 * 100 * (n + 1)
    everybody = np.ones(n, bool)
    traffic = Sections(layout, CABLE, payload).traffic(everybody, everybody, ~everybody)
    own = payload - traffic.sections_received
    terms = n / (s + 1) + computes
    np.testing.assert_allclose(traffic.sections_sent, n * own)
    np.testing.assert_allclose(traffic.terms_received[1:], (terms - 1) * own[1:])
    np.testing.assert_allclose(traffic.terms_sent[1:], payload / (s + 1) - own[1:])
    assert traffic.terms_sent[0] == computes * (payload - own[0])
    # no port could be less busy by more than a piece for each rank
    busiest = max(_sent(traffic).max(), _received(traffic).max())
    assert busiest >= (terms + n) * payload / (n + 1) - own.max()
    for ports in (_sent(traffic), _received(traffic)):
        assert (
            ports.mean() <= busiest <= (terms + n) * payload / (n + 1) + (32 << 10) * n
        )


def _sent(traffic):
    return traffic.terms_sent + traffic.sections_sent


def _received(traffic):
    return traffic.terms_received + traffic.sections_received


def as_in_the_engine(layout, late=()):
    """Return the ranks that may form sections, and the usable messages with their
    lengths.
    """
    n, copies = layout.size - 1, int(layout.copies[0])
    there = [rank for rank in range(1, n + 1) if rank not in late]
    root = [0] * bool(layout.loads[0])
    choices = []
    if copies > 1:
        classes = np.arange(1, n + 1).reshape(-1, copies)
        for turn in range(copies):
            alike = [[int(entry) for entry in row if entry in there] for row in classes]
            choices.append([some[turn % len(some)] for some in alike] + root)
    else:
        needs = int(layout.needs[0])
        used = dict.fromkeys(there, 0)
        while len(choices) < 16:
            chosen = sorted(sorted(there, key=used.__getitem__)[:needs])
            if chosen + root in choices:
                break
            for rank in chosen:
                used[rank] += 1
            choices.append(chosen + root)
    lengths = [1.0, *layout.messages[1:].tolist()]
    return [*there, 0], [{rank: lengths[rank] for rank in some} for some in choices]


@pytest.mark.parametrize(
    ("n", "s", "m", "late"),
    [
        *((12, s, 1, ()) for s in (0, 1, 2, 3)),
        *((12, s, 1, (12,)) for s in (1, 2, 3)),
        *((12, s, 1, (1, 12)) for s in (1, 2, 3)),
        *((84, s, 1, ()) for s in (0, 1, 2)),
        *((84, s, 1, late) for s in (1, 2) for late in ((84,), (3, 9))),
        *((13, 3, 1, late) for late in ((), (5,))),
        *((12, s, 2, ()) for s in (0, 1, 2)),
        *((12, 2, m, (3, 9)) for m in (2, 4)),
    ],
)
@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("payload", [2e5, 2e6, 20e6])
def test_the_busiest_port_is_as_busy_as_the_engine_makes_it(
    n, s, m, late, computes, payload
):
    engine = pytest.importorskip(
        "jaxcoded.transport._engine", reason="built without the engine"
    )
    layout = star(n, s, m)
    layout.loads[0] = computes
    job = Sections(layout, CABLE, payload)
    there = np.array([rank not in late for rank in range(1, n + 1)])
    traffic = job.traffic(there, there, np.zeros(n, bool))
    busiest = max(_sent(traffic).max(), _received(traffic).max()) / payload
    makers, choices = as_in_the_engine(layout, late)
    _, in_engine = engine.section_shares(makers, choices, n + 1, job.pieces)
    # one piece more or less goes to all other ranks, and the engine, which assigns
    # pieces one after the other, does not find the minimum
    piece = len(makers) / job.pieces
    assert (
        busiest - piece <= in_engine <= busiest * (1.35 if computes else 1.15) + piece
    )


@pytest.mark.parametrize("bytes_", [65536, 4e5, 416e3, 2e6, 20e6, 1e9])
@pytest.mark.parametrize("n", [1, 12, 300])
def test_pieces_are_as_long_as_the_engines(bytes_, n):
    engine = pytest.importorskip(
        "jaxcoded.transport._engine", reason="built without the engine"
    )
    limits = engine.Limits()
    limits.sections_from = SECTIONS_FROM
    limits.section_pieces = SECTION_PIECES * (n + 1)
    in_engine = math.ceil(bytes_ / limits.piece_for(int(bytes_)))
    pieces = Sections(star(n), Network(), float(bytes_)).pieces
    assert pieces == pytest.approx(in_engine, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("payload", [2e5, 2e6, 20e6])
@pytest.mark.parametrize(
    ("n", "s"), [(3, 1), (6, 0), (6, 1), (12, 0), (12, 1), (12, 3), (20, 0), (39, 2)]
)
def test_near_rounds_played_piece_by_piece(n, s, payload, both_ways):
    engine = pytest.importorskip(
        "jaxcoded.transport._engine", reason="built without the engine"
    )
    network = dataclasses.replace(CABLE, **FREE)
    if not both_ways:  # ports that receive as fast as memory
        network = dataclasses.replace(
            network, bandwidth=4e8, send_bandwidth=CABLE.bandwidth
        )
    layout = star(n, s)
    job = Sections(layout, network, payload)
    everybody = np.ones(n, bool)
    traffic = job.traffic(everybody, everybody, ~everybody)
    piece = payload / job.pieces
    makers, choices = as_in_the_engine(layout)
    shares, _ = engine.section_shares(makers, choices, n + 1, job.pieces)
    played = Play(
        [
            (makers[maker], list(choices[choice]), count)
            for maker, choice, count in shares
        ],
        n + 1,
        piece / network.sending,
        piece / network.bandwidth,
        network.latency,
    )
    for simulated, ports in (
        (_sent(traffic), played.sent),
        (_received(traffic), played.received),
    ):
        assert max(ports) == pytest.approx(simulated.max() / piece, abs=n, rel=0.15)
    up = job.up(np.zeros(n + 1), np.zeros(n + 1))
    # real ports are idle for longer, above all in short rounds
    assert 0.75 <= up.last[1:].max() / max(played.here) <= 1.4


def test_time_of_the_busiest_port():
    """With equal ports and few ranks, a sum takes the time of the busiest port's
    traffic, of the pieces at both ends, and of latencies.
    """
    network = dataclasses.replace(CABLE, **FREE)
    piece = 60 * 1024.0
    payload = 100 * piece * 4
    carries = 1.5 * payload  # its message to three ranks, and a fourth of the sum
    expected = (carries + 3 * piece) / network.bandwidth
    taken = seconds(star(3), network, payload)
    assert taken == pytest.approx(expected / 0.9, rel=0.02)
    slow = dataclasses.replace(network, latency=0.01)
    more = seconds(star(3), slow, payload) - taken
    # reports of results, offers, six more latencies until the root has the sum, and one
    # until all have it
    assert 7 <= more / (0.01 - 2e-4) <= 8


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


def test_which_ranks_form_sections():
    assert forms_sections(star(12), CABLE, 1e6)
    assert forms_sections(star(12, 1), CABLE, SECTIONS_FROM)
    assert not forms_sections(star(12), CABLE, SECTIONS_FROM - 1)
    # inner families also form sections, if their parents have more than two children, and messages are as long as the
    # sum
    assert forms_sections(Layout.balanced(13, 3), CABLE, 1e6)
    assert not forms_sections(Layout.balanced(15, 2), CABLE, 1e6)
    assert not forms_sections(Layout.balanced(31, 5, 1, 2), CABLE, 1e6)
    assert forms_sections(star(12, 1, 2), CABLE, 1e6)
    # one host: ranks read each other's memory
    assert not forms_sections(star(12), Network(trips=1), 1e6)
    assert forms_sections(star(12), Network(trips=1, sections_from=1), 1e6)
    with pytest.raises(ValueError, match="sections_from must be"):
        Network(sections_from=-1)


@pytest.mark.parametrize(("s", "waits"), [(0, True), (1, False)])
def test_the_sum_waits_for_a_late_rank_that_it_needs(s, waits):
    slow = stragglers.FixedSlow(ranks=(12,), factor=50)
    job = {"payload": 2e6, "work": 1.2, "rounds": 20}
    out = simulate(star(12, s), CABLE, **job, stragglers=slow)
    usual = simulate(star(12, s), CABLE, **job)
    load = 0.1 * (s + 1)
    if waits:
        assert out.mean > 50 * load
        assert out.used[12] == 20
    else:
        # there is one section fewer, so not all sections have as many pieces
        assert out.mean == pytest.approx(usual.mean, rel=0.1)
        assert out.used[12] == 0 and out.skipped[12] > 10
        assert all(out.used[1:11] == 20)


def test_a_rank_that_comes_soon_also_forms_a_section():
    """The engine waits 2 ms after messages suffice. A later rank fetches the other
    ranks' sections or, once the root has all of them, the result from the root.
    """
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
        here = job.down(up.last)
        if in_time:
            assert here[12] == up.last[12]
        else:
            fetching = here[12] - up.last[0]
            assert fetching == pytest.approx(payload / CABLE.bandwidth, rel=0.02)
            # while it sends to the late rank, the root's port has less time for the
            # next round
            called[:] = here
            again = job.up(called, called).last[0]
            fresh = Sections(star(12, 1), CABLE, payload).up(called, called).last[0]
            assert again >= fresh
    assert job.up(np.zeros(13), np.zeros(13)).last[0] > 1.3 * up.last[0]


def test_a_dead_rank_without_redundancy_ends_the_job():
    dies = stragglers.Killed(ranks=(1,), round=4)
    job = {"payload": 1e6, "work": 1.0, "rounds": 10, "stragglers": dies}
    assert np.isfinite(simulate(star(12), CABLE, **job).ends).sum() == 3
    assert np.isfinite(simulate(star(12, 1), CABLE, **job).ends).all()


def test_shared_work_ends_with_a_sum_in_sections():
    plan = jaxcoded.make_plan(
        13, jaxcoded.Shared(replicas=2, blocks=6, root_computes=False)
    )
    off = dataclasses.replace(CABLE, sections_from=0)
    by_the_root, in_sections = (
        seconds(Layout.of(plan), network, 20e6, work=1.2) for network in (off, CABLE)
    )
    assert in_sections < 0.3 * by_the_root
    short = [seconds(Layout.of(plan), each, 1e3, work=1.2) for each in (off, CABLE)]
    assert short[0] == short[1]


@pytest.mark.parametrize(
    ("s", "late", "payload", "real"),
    [
        *((1, False, 2e6, 0.151), (1, False, 20e6, 1.39)),
        *((1, True, 2e6, 0.180), (1, True, 20e6, 1.60)),
        # a real round of 2 MB took 0.166 s, the simulated round is 16 % longer
        (0, False, 20e6, 1.69),
    ],
)
def test_figures_of_thirteen_hosts(s, late, payload, real):
    """Medians of real rounds of 13 hosts on few cores, with cables of 200 Mbit/s in
    both directions, as in `benchmarks/sections.py`. The late rank calls when the other
    ranks are done.
    """
    network = Network(latency=1e-4, bandwidth=23.9e6, overhead=3e-5)
    layout = star(12, s)
    job, called = Sections(layout, network, payload), np.zeros(13)
    for _ in range(3):
        begun = called[0]
        called[12] = np.inf if late else begun
        up = job.up(called, called)
        taken = up.last[np.isfinite(up.last)].max() - begun
        called[:] = up.last[0] + 2 * payload / network.bandwidth
    assert taken == pytest.approx(real, rel=0.15)
    off = dataclasses.replace(network, sections_from=0)
    assert seconds(layout, off, payload) > 4 * taken


# the shorter sum is closer to the length at which a tree is faster
@pytest.mark.slow
@pytest.mark.parametrize("payload", [2e6, more(20e6)])
def test_the_planner_takes_a_star_for_long_sums(payload):
    ranking = search.best_plans(13, payload, 0.1, CABLE, replicas=0)
    assert ranking.best_tree.candidate.fanout == 12
    off = dataclasses.replace(CABLE, sections_from=0)
    ranking = search.best_plans(13, payload, 0.1, off, replicas=0)
    assert ranking.best_tree.candidate.fanout < 12


def test_the_ring_moves_as_much():
    """A star in sections without redundancy moves as much as a ring, with other
    latencies.
    """
    quick = dataclasses.replace(CABLE, latency=0.0, **FREE)
    ring, sections = (seconds(scheme, quick, 50e6) for scheme in (Ring(4), star(3)))
    # the ring's ports are never idle
    assert sections == pytest.approx(ring / 0.9, rel=0.02)
    far = dataclasses.replace(CABLE, latency=0.05)
    ring, sections = (seconds(scheme, far, 1e6) for scheme in (Ring(13), star(12)))
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


@pytest.mark.parametrize(
    ("ranks", "fanout", "mbit", "payload", "real", "by_parents"),
    [
        *((13, 3, 200, 2e6, 0.358, 0.510), (13, 3, 200, 20e6, 3.54, 3.89)),
        (31, 5, 50, 2e6, 1.62, 3.55),
    ],
)
def test_figures_of_trees(ranks, fanout, mbit, payload, real, by_parents):
    """Figures of real rounds for trees. Without sections, real trees take longer than simulated trees."""
    network = Network(latency=1e-4, bandwidth=mbit * 0.1195e6, overhead=3e-5)
    layout = Layout.balanced(ranks, fanout, 1)
    taken = seconds(layout, network, payload)
    assert taken == pytest.approx(real, rel=0.15)
    off = dataclasses.replace(network, sections_from=0)
    assert seconds(layout, off, payload) < by_parents
