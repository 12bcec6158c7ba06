"""How much of a long sum each rank forms in sections, and from which messages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoded.tools.simulator import sections, sharing

engine = pytest.importorskip(
    "jaxcoded.transport._engine", reason="built without the engine"
)


def traffic(makers, choices, ports, given):
    """Count the pieces that each port sends and fetches."""
    sends, fetches = [0] * ports, [0] * ports
    for maker, choice, pieces in given:
        for _ in range(pieces):
            for other, length in choices[choice].items():
                if other != makers[maker]:
                    sends[other] += length
                    fetches[makers[maker]] += length
            for other in makers:
                if other != makers[maker]:
                    sends[makers[maker]] += 1
                    fetches[other] += 1
    return sends, fetches


def repeated(workers, copies, late=()):
    """Return makers and choices of fractional repetition below a root without data, which has the last port. Late ranks
    are absent.
    """
    makers = [port for port in range(workers + 1) if port not in late]
    choices = []
    for turn in range(copies):
        there = [
            [port for port in range(first, first + copies) if port not in late]
            for first in range(0, workers, copies)
        ]
        choices.append({some[turn % len(some)]: 1.0 for some in there})
    return makers, choices


@st.composite
def families(draw):
    ports = draw(st.integers(2, 12))
    numbers = st.integers(0, ports - 1)
    makers = draw(st.sets(numbers, min_size=1).map(sorted))
    lengths = st.sampled_from([1.0, 1.0, 0.5, 0.25])  # lengths of coded messages
    choice = st.dictionaries(numbers, lengths, min_size=1)
    return makers, draw(st.lists(choice, min_size=1, max_size=4)), ports


@given(families(), st.integers(1, 300))
def test_every_piece_is_formed_once_and_the_busiest_port_is_counted(family, pieces):
    makers, choices, ports = family
    shares, busiest = engine.section_shares(makers, choices, ports, pieces)
    assert sum(count for *_, count in shares) == pieces
    assert all(count > 0 for *_, count in shares)
    assert len({tuple(share[:2]) for share in shares}) == len(shares)
    if pieces <= 16 * len(makers):  # more pieces are assigned several at a time
        most = max(map(max, traffic(makers, choices, ports, shares)))
        assert busiest == pytest.approx(most / pieces)


@given(families(), st.integers(1, 5))
def test_the_division_is_near_the_best(family, pieces):
    makers, choices, ports = family
    makers, choices = makers[:4], choices[:2]
    ways = list(itertools.product(range(len(makers)), range(len(choices))))
    best = min(
        max(map(max, traffic(makers, choices, ports, [(*way, 1) for way in chosen])))
        for chosen in itertools.combinations_with_replacement(ways, pieces)
    )
    _, busiest = engine.section_shares(makers, choices, ports, pieces)
    # one piece more or less goes to all other ranks
    assert busiest * pieces <= best + len(makers)


@pytest.mark.parametrize(
    "workers, copies", [(12, 1), (12, 2), (12, 3), (30, 2), (84, 2)]
)
def test_all_ports_are_as_busy_where_all_are_there(workers, copies):
    """For ``t`` messages and ``n`` ranks each port moves ``(t + n − 1) / n`` lengths of the sum, less what a rank
    already has.
    """
    makers, choices = repeated(workers, copies)
    even = (workers // copies + workers) / (workers + 1)
    _, busiest = engine.section_shares(makers, choices, workers + 1, 8 * (workers + 1))
    assert even - 1 / copies / 8 < busiest < 1.03 * even


def test_a_rank_without_a_present_copy_forms_less():
    makers, choices = repeated(12, 2, late=[11])
    shares, busiest = engine.section_shares(makers, choices, 13, 78)
    formed = dict.fromkeys(makers, 0)
    for maker, _, pieces in shares:
        formed[makers[maker]] += pieces
    assert formed[10] < min(formed[rank] for rank in range(10))
    assert busiest < 1.55  # 1.9 with equal sections


def test_one_maker_forms_all_of_it():
    choice = dict.fromkeys(range(3), 1.0)
    shares, busiest = engine.section_shares([2], [choice], 3, 100)
    assert shares == [(0, 0, 100)]
    assert busiest == 2


def test_the_simulator_knows_how_long_the_engine_waits():
    limits = engine.Limits()
    assert sections._STALL == limits.stall_seconds
    assert sharing._PATIENCE == limits.orphan_seconds
