"""Damaged messages cause an error that describes them, and nothing else is lost."""

import random

import numpy as np
import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    ALERT,
    ASK,
    BYE,
    DELEGATE,
    DONE,
    FAILED,
    FAILURE,
    FORMED,
    HEADER,
    INLINED,
    NOTE,
    OFFER,
    PENDING,
    RESULT,
    RESULTS,
    SIGNATURE,
    STATES,
    Call,
    Garbling,
    Header,
    World,
    random_plan,
    random_world,
)

from jaxcoded import Coded, make_plan

ROUNDS = 6
UNREADABLE = r"rank {} cannot read a message from rank {}"


class GarblingWorld(Garbling, World):
    pass


def cut(message):
    """Remove the last 8 bytes."""
    return message[:-8]


def more(message):
    """Claim twice as many pieces, plus a thousand."""
    head = Header(message)
    fields = [head.kind, head.flags, head.segments, 2 * head.ready + 1000]
    return HEADER.pack(*fields, *HEADER.unpack_from(message)[4:]) + head.body


def longer_table(message):
    """Claim the largest possible number of vectors."""
    head = Header(message)
    fields = [head.kind, head.flags, 2**32 - 1, head.ready]
    return HEADER.pack(*fields, *HEADER.unpack_from(message)[4:]) + head.body


def other_dtype(message):
    """Return a table whose first vector has an unknown dtype."""
    return _with_number(message, 0, 77)


def longer_vector(message):
    """Return a table whose first vector is longer than any memory, but whose bytes can
    be counted.
    """
    return _with_number(message, 1, 2**39)


def shorter_vector(message):
    """Return a table whose first vector is one number shorter, with as many pieces."""
    return _with_number(message, 1, 99)


def endless_vector(message):
    """Return a table whose first vector has more bytes than can be counted."""
    return _with_number(message, 1, 2**62)


def late_round(message):
    """Claim a round number that no group reaches."""
    return _with_field(message, 4)


def late_decided(message):
    """Claim that a round that no group reaches is decided."""
    return _with_field(message, 5)


def late_done(message):
    """Claim that all ranks have everything before a round that no group reaches."""
    return _with_field(message, 6)


def _with_field(message, index):
    fields = list(HEADER.unpack_from(message))
    fields[index] = 2**60
    return HEADER.pack(*fields) + message[HEADER.size :]


def other_vector(message):
    """Return a table whose first vector has other pieces than the known ones."""
    return _with_number(message, 1, 1)


def _with_number(message, index, value):
    at = HEADER.size + 8 * index
    return message[:at] + np.uint64(value).tobytes() + message[at + 8 :]


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (OFFER, cut),
        (OFFER, more),
        (OFFER, longer_table),
        (RESULTS, cut),
        (RESULTS, more),
        (RESULTS, longer_table),
        (RESULTS, other_dtype),
        (RESULTS, shorter_vector),
        (RESULTS, longer_vector),
        (RESULTS, endless_vector),
        (OFFER, late_round),
        (OFFER, late_decided),
        (OFFER, late_done),
        (RESULTS, late_round),
        (RESULTS, late_decided),
        (RESULTS, other_vector),
    ],
)
def test_one_round_fails_and_the_others_do_not(kind, damage, inline):
    plan = make_plan(4, Coded(parents=[-1, 0, 1, 2], stragglers=0))
    script = [Call((("float32", 100), ("float64", 9)), seed) for seed in range(ROUNDS)]
    world = GarblingWorld(
        plan,
        script,
        random.Random(0),
        inline=(inline,),
        limits={"piece_bytes": 64, "announced_bytes": 128},
    )
    if inline and (kind, damage) == (OFFER, longer_table):
        pytest.skip("it has no table")
    if not inline and damage is shorter_vector:
        pytest.skip("the next word of the same result may put it right")
    link = (2, 1) if kind == OFFER else (1, 2)
    seen = []

    def garble(on, message):
        head = Header(message)
        if seen or (on, head.kind, head.round) != (link, kind, 3):
            return message
        if damage is other_vector and not inline and head.ready < 3:
            return message  # the first messages stay right
        if inline:
            assert head.flags & INLINED
        seen.append(message)
        return damage(message)

    world.garble = garble
    world.settle()
    assert seen
    texts = set()
    for rank in range(4):
        outcomes = [world.ends[rank][round].outcome for round in range(1, ROUNDS + 1)]
        # a rank with a result of other lengths detects the mismatch when it calls, and
        # then tells the other ranks
        failed = 1 + (damage is shorter_vector and rank in (2, 3))
        assert outcomes.count(FAILED) == failed, world.describe(rank)
        assert outcomes.count(DONE) == ROUNDS - failed
        at = ROUNDS - outcomes[::-1].index(FAILED)
        texts.add((at, world.ends[rank][at].error))
    ((at, text),) = texts
    assert at in (3, 4)
    assert text.startswith("CodedError: ")
    assert UNREADABLE.format(*reversed(link)) in text
    assert text.endswith("do all ranks run the same jaxcoded?")


def test_an_alert_of_a_round_that_no_group_reaches():
    """The messages after the alert still count."""
    plan = make_plan(4, Coded(parents=[-1, 0, 1, 2], stragglers=0))
    script = [Call((("float32", 9),), seed) for seed in range(9)]
    world = GarblingWorld(plan, script, random.Random(0))
    for round in 3, 7:
        world.deviations[3, round] = Call((("float64", 9),), 0)
    seen = []

    def garble(on, message):
        if seen or on[1] != 0 or Header(message).kind != ALERT:
            return message
        seen.append(message)
        return late_round(message)

    world.garble = garble
    for world.open in range(1, 10):
        world.settle()
    assert seen
    for rank in range(4):
        failed = {r: e.error for r, e in world.ends[rank].items() if e.outcome != DONE}
        assert any(
            "cannot read a message from rank" in text for text in failed.values()
        )
        late = [text for round, text in failed.items() if round >= 7]
        assert late and all(text.startswith("GroupMismatch: ") for text in late), failed


def test_a_parent_that_asks_does_not_delay_a_waiting_child():
    """The parent asks why a child does not call. The child waits for a result whose
    announcement was lost.
    """
    plan = make_plan(2, Coded(stragglers=0))
    script = [Call((("float32", 9),), seed) for seed in range(ROUNDS)]
    limits = {"stuck_seconds": 0.05}
    world = GarblingWorld(plan, script, random.Random(0), limits=limits)
    for world.open in (1, 2, 3):  # long rounds, after which ranks wait longer
        world.idle = {0}
        world.sweep_all()
        world.clock += 1
        world.idle = set()
        world.sweep_all()
    seen = []

    def garble(link, message):
        kind = Header(message).kind
        seen.append(kind)
        return cut(message) if kind == RESULTS and seen.count(RESULTS) == 1 else message

    world.garble = garble
    world.open = ROUNDS
    world.settle()
    assert ASK in seen
    for rank in range(2):
        outcomes = [world.ends[rank][round].outcome for round in range(1, ROUNDS + 1)]
        assert sorted(outcomes) == [DONE] * (ROUNDS - 1) + [FAILED], outcomes


@pytest.mark.parametrize(
    "damage", [cut, lambda message: _with_number(message, 0, 2**39)]
)
def test_a_snapshot_that_cannot_be(damage):
    plan = make_plan(2, Coded(stragglers=0))
    world = GarblingWorld(plan, [Call((("float32", 4),), 0)], random.Random(0))
    world.nodes[0].keep_state(5, b"state")
    world.nodes[1].ask_state()
    garbled = []

    def garble(link, message):
        if message[0] != STATES or garbled:
            return message
        garbled.append(link)
        return damage(message)

    world.garble = garble
    for _ in range(10):
        world.sweep()
        world.clock += world.limits.orphan_seconds
    assert garbled
    assert (world.nodes[1].state_round(), world.nodes[1].state()) == (5, b"state")
    for rank in range(2):
        assert UNREADABLE.format(1, 0) in world.ends[rank][1].error


FIRST = 6  # word of the sections


def sections(message):
    """Return a section plan's numbers as a list, its number of sections and of ranks,
    and its terms.
    """
    numbers = np.frombuffer(message[HEADER.size :], np.uint64).tolist()
    return numbers, numbers[0], numbers[1], numbers[2]


def _with_numbers(message, numbers):
    return message[: HEADER.size] + np.array(numbers, np.uint64).tobytes()


def same_version(message):
    """Give all sections the same version."""
    numbers, count, _, _ = sections(message)
    for i in range(count):
        numbers[FIRST + 1 + 2 * i] = numbers[FIRST + 1 + 2 * i] >> 32 << 32 | 7
    return _with_numbers(message, numbers)


def no_pieces(message):
    """Add an empty section."""
    numbers, count, _, _ = sections(message)
    end, (_, whose) = numbers[FIRST - 2 + 2 * count] % 2**32, numbers[FIRST : FIRST + 2]
    numbers[0] += 1
    numbers[FIRST + 2 * count : FIRST + 2 * count] = [end << 32 | end, whose + 2**20]
    return _with_numbers(message, numbers)


def no_such_maker(message):
    """Let a rank that does not exist form the sections."""
    numbers, count, _, _ = sections(message)
    for i in range(count):
        numbers[FIRST + 1 + 2 * i] = 2**40 | numbers[FIRST + 1 + 2 * i] % 2**32
    return _with_numbers(message, numbers)


def other_makers(message):
    """Let the root form the sections."""
    numbers, count, _, _ = sections(message)
    for i in range(count):
        numbers[FIRST + 1 + 2 * i] %= 2**32
    return _with_numbers(message, numbers)


def no_such_member(message):
    """Name a rank that does not exist as a member."""
    numbers, count, _, _ = sections(message)
    numbers[FIRST + 2 * count] = 99
    return _with_numbers(message, numbers)


def no_such_term(message):
    """Let a rank that does not exist supply the terms."""
    numbers, count, members, _ = sections(message)
    numbers[FIRST + 2 * count + members] = 99
    return _with_numbers(message, numbers)


def no_such_purpose(message):
    """Give the sections an unknown purpose."""
    numbers, *_ = sections(message)
    numbers[FIRST - 1] = 3
    return _with_numbers(message, numbers)


def longer_body(message):
    """Add 8 bytes."""
    return message + bytes(8)


def shifted(message):
    """Claim that another section was formed."""
    fields = list(HEADER.unpack_from(message))
    fields[5] = (fields[5] + 1) % 3
    return HEADER.pack(*fields) + message[HEADER.size :]


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (DELEGATE, cut),
        (DELEGATE, longer_body),
        (DELEGATE, same_version),
        (DELEGATE, no_pieces),
        (DELEGATE, no_such_maker),
        (DELEGATE, other_makers),
        (DELEGATE, no_such_member),
        (DELEGATE, no_such_term),
        (DELEGATE, no_such_purpose),
        (FORMED, cut),
        (FORMED, longer_body),
        (FORMED, shifted),
        (FORMED, more),
        (FORMED, longer_table),
    ],
)
def test_of_sections(kind, damage, inlined):
    """One round fails on all ranks, or the message has no effect, and all other sums
    are right.
    """
    plan = make_plan(3, Coded(fanout=2, stragglers=0))
    script = [Call((("float64", 100),), seed) for seed in range(ROUNDS)]
    world = GarblingWorld(
        plan,
        script,
        random.Random(0),
        hosts=[0, 1, 2],
        limits={"piece_bytes": 64, "announced_bytes": 128, "sections_from": 1},
    )
    world.inline[1, 2] = 1 << 20 if inlined else 0
    seen = []

    def garble(on, message):
        head = Header(message)
        link = (0, 2) if kind == DELEGATE else (1, 2)
        if seen or (on, head.kind, head.round) != (link, kind, 3):
            return message
        if kind == DELEGATE and not sections(message)[-1]:
            return message  # this rank forms nothing
        if damage is longer_table and head.flags & INLINED:
            return message  # this rank has no section
        seen.append(message)
        return damage(message)

    world.garble = garble
    world.settle()
    if damage is longer_table and inlined:
        return
    assert seen
    outcomes = {
        r: {world.ends[rank][r] for rank in range(3)} for r in range(1, ROUNDS + 1)
    }
    assert all(len(ends) == 1 for ends in outcomes.values()), outcomes
    failed = {r: ends.pop().error for r, ends in outcomes.items()}
    failed = {r: error for r, error in failed.items() if error}
    if damage is not shifted or failed:
        ((round, error),) = failed.items()
        assert round in (3, 4)
        assert UNREADABLE.format(2, 0 if kind == DELEGATE else 1) in error


def star_of_hosts(sections_from):
    """Return four ranks on separate hosts, whose sums of at least ``sections_from``
    bytes are formed in sections.
    """
    plan = make_plan(4, Coded(fanout=3, stragglers=0))
    script = [Call((("float64", 100),), seed) for seed in range(ROUNDS)]
    return GarblingWorld(
        plan,
        script,
        random.Random(0),
        hosts=range(4),
        limits={
            "piece_bytes": 64,
            "announced_bytes": 128,
            "sections_from": sections_from,
        },
    )


@pytest.mark.parametrize("forger", [1, 0])
def test_only_the_maker_of_a_section_announces_it(forger):
    """If another rank claims that it has formed the section, all ranks get an error. The root's claim counts, as the
    root may relay the maker's claim.
    """
    world = star_of_hosts(1)
    seen = []

    def garble(on, message):
        head = Header(message)
        if (on, head.kind, head.round) == ((3, 2), FORMED, 3) and not seen:
            seen.append(message)
            world.nodes[2].deliver(forger, message)
        return message

    world.garble = garble
    world.settle()
    assert seen
    for rank in range(4):
        errors = [world.ends[rank][r].error for r in range(1, ROUNDS + 1)]
        if forger:
            (error,) = filter(None, errors)
            assert UNREADABLE.format(2, 1) in error
        else:
            assert not any(errors)


@pytest.mark.parametrize("kind", [RESULTS, NOTE])
def test_siblings_know_no_results(kind):
    """A sibling's claim is ignored, and changes nothing."""
    world = star_of_hosts(10_000)
    seen, fetched = [], set()
    fetch = world.fetch

    def garble(on, message):
        head = Header(message)
        if (on, head.kind, head.round) != ((0, 2), RESULTS, 3) or seen:
            return message
        seen.append(message)
        if kind == RESULTS:
            world.nodes[2].deliver(1, message)
        else:
            news = HEADER.pack(kind, 0, 0, 0, 3, 1000, 0, 0, 0)
            world.nodes[2].deliver(1, news)
        return HEADER.pack(NOTE, 0, 0, 0, 3, 3, 0, 0, 0)  # the root's message is lost

    def watched(request, *where):
        fetched.add(request[:3])
        return fetch(request, *where)

    world.garble, world.fetch = garble, watched
    world.settle()
    assert seen
    for rank in range(4):
        assert all(world.ends[rank][r].outcome == DONE for r in range(1, ROUNDS + 1))
        assert world.nodes[rank].lag() == 0
    assert (2, 1, RESULT) not in fetched


@many
@given(seeds)
def test_messages_that_are_cut_anywhere(seed):
    """Each round gives the right sum or an error, the same on all ranks."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2, 9)
    world = random_world(plan, ROUNDS, rng)
    world.__class__ = GarblingWorld
    share = rng.choice([0.01, 0.1])

    def garble(_, message):
        head = Header(message)
        # a text that is cut is still a valid text
        if rng.random() > share or head.kind in (ALERT, BYE, SIGNATURE):
            return message
        if head.kind == RESULTS and head.flags & FAILURE:
            return message
        return message[: rng.randint(HEADER.size, len(message))]

    world.garble = garble
    for _ in range(rng.choice([0, 300])):
        world.step()
    world.garble = lambda link, message: message
    world.settle()
    for rank in range(plan.size):
        assert set(world.ends[rank]) == set(range(1, ROUNDS + 1)), world.describe(rank)
    for round in range(1, ROUNDS + 1):
        ends = {world.ends[rank][round] for rank in range(plan.size)}
        assert len(ends) == 1, ends
        assert ends.pop().outcome in (DONE, FAILED)
    assert PENDING not in {node.outcome() for node in world.nodes}
