"""Rounds of a whole tree of nodes, in any order of events, give exact sums on all
ranks.
"""

import random
import re

import numpy as np
import pytest
from cases import more
from hypothesis import given
from independent import random_missing
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DONE,
    FAILED,
    MESSAGE,
    RESULT,
    Call,
    World,
    Zeros,
    _engine,
    comparing,
    random_plan,
    random_script,
    random_world,
    too_many,
)

from jaxcoded import DEBUG, Coded, make_plan


@many
@given(seeds)
def test_nothing_waits_for_time_to_pass(seed):
    """If all ranks are present, no node waits for anything but messages."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    world = random_world(plan, 4, rng)
    world.sweep_all()
    world.assert_done()


@pytest.mark.parametrize("length", range(1, 9))
def test_pieces_that_come_together(length):
    """More pieces arrive together than a node passes on at a time."""
    plan = make_plan(2, Coded(stragglers=0))
    script = [Call((("float64", length),), seed) for seed in range(8)]
    limits = {"piece_bytes": 8, "announced_bytes": 8}
    world = World(plan, script, random.Random(0), hosts=[0, 1], limits=limits)
    world.sweep_all()
    world.assert_done()


@pytest.mark.slow
@many
@given(seeds)
def test_stragglers_delay_no_rank(seed):
    """From some moment on, as many children of every parent as it tolerates do nothing."""
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, 3), rng.randint(1, 6)
    world = random_world(plan, rounds, rng, **comparing(plan, rng))
    stragglers = random_missing(plan, np.random.default_rng(seed))
    for _ in range(rng.choice([0, 0, 30, 200, 1000])):
        world.step()
    for rank in stragglers:
        rng.choice([world.frozen, world.idle]).add(rank)
    for _ in range(rng.choice([0, 500])):
        world.step()
    world.settle()
    world.assert_done(set(range(plan.size)) - stragglers)
    # once they continue, they catch up
    world.frozen.clear()
    world.idle.clear()
    world.settle()
    world.assert_done()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["one", "many"])
@pytest.mark.parametrize("slices", [more(1), 2])
def test_a_stop_at_any_moment(hosts, slices):
    """An inner rank and a leaf are stopped after any number of events, in the middle of their pieces."""
    plan = make_plan(21, Coded(fanout=4, slices=slices, root_computes=True))
    cut = set()
    for moment in range(0, 1200, 60):
        rng = random.Random(moment)
        script = [Call((("float32", 24), ("float64", 8)), n) for n in range(3)]
        world = World(
            plan,
            script,
            rng,
            hosts=list(range(21)) if hosts == "many" else None,
            limits={"piece_bytes": 8, "announced_bytes": 16},
        )
        for _ in range(moment):
            world.step()
        cut |= {len(world.parts(rank)) for rank in (1, 9)}
        world.frozen |= {1, 9}
        world.settle()
        world.assert_done(set(range(21)) - world.frozen)
        world.frozen.clear()
        world.settle()
        world.assert_done()
    # some ranks were stopped between their first piece and their last
    assert len(cut) > 2


def test_a_late_rank_is_needed_until_a_sum_is_whole():
    """While a sum is being formed, a rank whose message it needs may die: `lag` counts
    the sum from its last piece on.
    """
    seen = 0
    for seed in range(20):
        plan = make_plan(4, Coded(stragglers=1))
        world = World(
            plan,
            [Call((("float32", 24),), 0)],
            random.Random(seed),
            limits={"piece_bytes": 8, "announced_bytes": 8},
        )
        world.idle.add(3)
        while not world.nodes[3].lag():
            seen += "knows of 1" in world.nodes[3].status()
            world.step()
        assert world.nodes[plan.root].frontier() == 2
        world.idle.clear()
        world.settle()
        world.assert_done()
    assert seen > 20  # steps in which the rank knew that the sum had begun


@pytest.mark.slow
@many
@given(seeds)
def test_a_rank_far_behind(seed):
    """The rank gets the results of all rounds that it missed, and learns their number."""
    rng = random.Random(seed)
    plan = random_plan(rng, 3, stragglers=(1, 2))
    late = random_missing(plan, np.random.default_rng(seed))
    rounds = rng.randint(2, 30)
    world = random_world(plan, rounds, rng, **comparing(plan, rng))
    world.idle |= late
    world.settle()
    world.assert_done(set(range(plan.size)) - late)
    for rank in late:
        assert world.nodes[rank].lag() == rounds
    world.idle.clear()
    world.settle()
    world.assert_done()
    for node in world.nodes:
        assert node.lag() == 0


@pytest.mark.parametrize("hosts", [[0] * 7, list(range(7))])
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_below_a_frozen_rank_results_come_from_further_above(hosts, inline):
    plan = make_plan(7, Coded(parents=[-1, 0, 0, 1, 1, 2, 2], stragglers=1))
    script = random_script(plan, random.Random(0), 12)
    world = World(plan, script, random.Random(0), hosts=hosts, inline=(inline,))
    world.frozen.add(1)
    healthy = {0, 2, 3, 4, 5, 6}
    for world.open in range(1, 13):
        world.sweep_all()
        # ranks 3 and 4 wait for rank 1, but only in the first round
        assert world.done(3, 1) == (world.open > 1)
        world.clock += 10
        world.settle()
        world.assert_done(healthy)
    # ranks 3 and 4 already know what rank 1 would tell them now
    world.frozen.clear()
    world.settle()
    world.assert_done()


@pytest.mark.slow
@many
@given(seeds)
def test_beyond_the_stragglers_of_the_code(seed):
    """Without enough children the root decides nothing, and names the ranks that it
    waits for. One more child suffices.
    """
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    script = random_script(plan, rng, 6)
    world = random_world(plan, 6, rng, script=script)
    children = plan.coded_children(plan.root)
    missing = too_many(plan, rng)
    rounds = world.open = rng.randint(0, 3)
    world.settle()
    world.assert_done()
    rng.choice([world.idle, world.frozen]).update(missing)
    world.open = 6
    for _ in range(rng.choice([0, 300])):
        world.step()
    world.settle()
    assert max(world.results, default=0) == rounds
    assert not world.done(plan.root, rounds + 1)
    words = world.nodes[plan.root].waiting_for()
    head, names, needs = re.fullmatch(
        r"(round \d+: rank \d+) waits for ranks? ([\d, ]+)"
        r"(?:; it needs (\d+) of its \d+ children| or parts of theirs)",
        words,
    ).groups()
    assert head == f"round {rounds + 1}: rank {plan.root}"
    assert set(map(int, names.split(", "))) == set(missing)
    assert needs is None or int(needs) <= len(children)
    for ranks in (world.idle, world.frozen):
        ranks.discard(missing[-1])
    world.settle()
    world.assert_done(set(range(plan.size)) - set(missing))
    assert world.nodes[plan.root].waiting_for() == ""


def test_words_of_messages_that_do_not_suffice():
    """The error names the awaited ranks, the ranks without a contribution, and the ranks that are left out."""
    plan = make_plan(6, Coded(fanout=5, stragglers=2, code="cyclic_repetition"))
    segments = (("float32", 9),)
    world = random_world(plan, 0, random.Random(1), script=[Call(segments, 1)])
    world.skips = {(2, 1)}
    world.idle = {1, 3}
    world.settle()
    assert world.nodes[0].waiting_for() == (
        "round 1: rank 0 waits for ranks 1, 3; it needs 3 of its 5 children; "
        "rank 2 has nothing to contribute"
    )
    plan = make_plan(6, Coded(fanout=5, stragglers=1, code="cyclic_repetition"))
    call = Call(segments, 1, erased=frozenset({1}))
    world = random_world(plan, 0, random.Random(1), script=[call])
    world.idle = {2, 1}
    world.settle()
    words = world.nodes[0].waiting_for()
    assert words.startswith("round 1: rank 0 waits for rank 2; it needs "), words


@many
@given(seeds)
def test_too_many_skip(seed):
    """Any ranks of any tree skip. The round ends on all ranks with the exact sum. If
    the other ranks do not suffice, it ends with an error that names the ranks that
    skipped.
    """
    rng = random.Random(seed)
    plan, rounds = random_plan(rng), rng.randint(1, 8)
    action = rng.choice(["wait", "raise"])
    limits = {"on_deadline": getattr(_engine.OnDeadline, action)}
    world = random_world(
        plan, rounds, rng, limits=limits, check=DEBUG if rng.random() < 0.3 else None
    )
    for rank in range(plan.size):
        share = rng.choice([0, 0.2, 0.5])
        for round in range(1, rounds + 1):
            if rank != plan.root and rng.random() < share:
                world.skips.add((rank, round))
    for _ in range(rng.choice([0, 200, 1000])):
        world.step()
    world.settle()
    for round in range(1, rounds + 1):
        skipped = [(rank, round) in world.skips for rank in range(plan.size)]
        fails = plan.missing(skipped)[plan.root]
        ends = {ends.get(round) for ends in world.ends}
        assert len(ends) == 1, (round, ends, world.describe(plan.root))
        (end,) = ends
        assert end is not None, world.describe(plan.root)
        assert end.outcome == (FAILED if fails else DONE), (end, skipped)
        if fails:
            assert end.error.startswith(f"TooManyErasures: round {round}: rank "), end
            lacks = re.search(r"these contribute nothing: (.*); any ", end.error)[1]
            named = set(map(int, re.findall(r"rank (\d+)\b(?! \(as)", lacks)))
            assert named and all(skipped[rank] for rank in named), (end, skipped)


@many
@given(seeds)
def test_too_many_die(seed):
    """Any ranks of any tree are known to be dead. Rounds end on all live ranks: with
    the exact sum or, if the other ranks do not suffice, with an error that names the
    dead.
    """
    rng = random.Random(seed)
    plan, rounds = random_plan(rng), rng.randint(1, 8)
    limits = {"on_deadline": getattr(_engine.OnDeadline, rng.choice(["wait", "raise"]))}
    world = random_world(plan, rounds, rng, limits=limits)
    share = rng.choice([0.1, 0.3, 0.6])
    dead = {
        rank for rank in range(plan.size) if rank != plan.root and rng.random() < share
    }
    world.frozen |= dead
    notices = [(rank, above) for rank in dead for above in world.ancestors[rank]]
    rng.shuffle(notices)
    for rank, above in notices:
        for _ in range(rng.choice([0, 20, 100])):
            world.step()
        world.nodes[above].lost(rank)
    world.settle()
    fails = plan.missing([rank in dead for rank in range(plan.size)])[plan.root]
    for round in range(1, rounds + 1):
        ends = {world.ends[rank].get(round) for rank in set(range(plan.size)) - dead}
        assert len(ends) == 1, (round, ends, world.describe(plan.root))
        (end,) = ends
        assert end is not None, world.describe(plan.root)
        assert end.outcome == (FAILED if fails else DONE), (end, dead)
        if fails:
            assert end.error.startswith(f"TooManyErasures: round {round}: rank "), end
            named = set(map(int, re.findall(r"rank (\d+), which is dead", end.error)))
            assert named and named <= dead, (end, dead)


@many
@given(seeds)
def test_any_ranks_die_at_any_moment(seed):
    """Ranks die at any moment, also between an offer and its fetch. Rounds end on all
    live ranks: with the exact sum or, if too many are dead, with an error that names
    some of them.
    """
    rng = random.Random(seed)
    plan, rounds = random_plan(rng, 2), rng.randint(1, 6)
    limits = {"on_deadline": getattr(_engine.OnDeadline, rng.choice(["wait", "raise"]))}
    world = random_world(plan, rounds, rng, limits=limits, **comparing(plan, rng))
    others = [rank for rank in range(plan.size) if rank != plan.root]
    few = sorted(random_missing(plan, np.random.default_rng(seed)))
    dying = rng.choice([few, rng.sample(others, rng.randint(0, len(others)))])
    for rank in dying:
        for _ in range(rng.choice([0, 10, 50, 300])):
            world.step()
        world.kill(rank, known=True)
    world.settle()
    fails = plan.missing([rank in dying for rank in range(plan.size)])[plan.root]
    for round in range(1, rounds + 1):
        ends = {
            world.ends[rank].get(round) for rank in set(range(plan.size)) - world.dead
        }
        assert len(ends) == 1, (round, ends, world.describe(plan.root))
        (end,) = ends
        assert end is not None, world.describe(plan.root)
        assert end.outcome == DONE or (fails and end.outcome == FAILED), (end, dying)
        if end.outcome == FAILED:
            assert end.error.startswith(f"TooManyErasures: round {round}: rank "), end
            named = set(map(int, re.findall(r"rank (\d+), which is dead", end.error)))
            assert named and named <= world.dead, (end, dying)


# Calls other than the all-reduce.


def test_erased_children_get_no_requests():
    plan = make_plan(7, Coded(parents=[-1, 0, 0, 0, 1, 1, 1]))
    for erased in (1, 2, 3, 5):
        call = Call((("float32", 100),), 0, erased=frozenset({erased}))
        world = World(plan, [call] * 3, random.Random(0), limits={"piece_bytes": 64})
        world.settle()
        world.assert_done()
        assert not any(s == erased and w == MESSAGE for _, s, w, *_ in world.fetched)


def test_a_piece_is_sent_up_while_the_next_arrives():
    plan = make_plan(4, Coded(parents=[-1, 0, 1, 1]))
    call = Call((("float32", 64),), 0)
    limits = {"piece_bytes": 32}  # announced_bytes exceeds the message
    world = World(plan, [call], random.Random(0), hosts=range(4), limits=limits)
    for rank in range(4):
        world.submit(rank)
    for _ in range(10):
        for link in [link for link, queue in world.queues.items() if queue]:
            world.deliver(link)
        for request in [r for r in world.requests if r[4] == 0]:  # the first piece
            world.requests.remove(request)
            world.answer(request)
        while world.answers:
            world.arrive(world.answers.pop())
        for rank in range(4):
            world.advance(rank)
    assert world.parts(1) == [1]
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("deadline", [10.0, 700.0])
@pytest.mark.parametrize("code", ["cyclic_repetition", "fractional_repetition"])
def test_a_long_wait_for_calls_does_not_extend_the_wait_for_a_stopped_child(
    code, deadline
):
    """A child stops within its message. The other messages suffice."""
    plan = make_plan(5, Coded(stragglers=1, code=code))
    world = World(
        plan,
        [Zeros((("float32", 256 * plan.padding_multiple),), 1)],
        random.Random(3),
        hosts=list(range(5)),
        limits={
            "piece_bytes": 64,
            "announced_bytes": 64,
            "deadline_seconds": deadline,
        },
    )
    world.idle = {1, 2, 3, 4}
    world.sweep_all()
    world.clock += 600
    world.idle = set()
    sources = []
    while len(sources) < 8:
        world.step()
        sources = [
            source
            for to, source, what, *_ in world.fetched
            if (to, what) == (0, MESSAGE)
        ]
    world.frozen = {sources[-1]}
    begun = world.clock
    while not world.done(0):
        world.sweep_all()
        world.clock += 0.05
        assert world.clock < begun + 10


@pytest.mark.parametrize("calls", [True, False])
def test_a_slow_parent_is_not_passed_over(calls):
    """The root, and maybe the parent, calls late; the leaf does not fetch from the root."""
    plan = make_plan(3, Coded(parents=[-1, 0, 1], stragglers=0))
    call = Call((("float32", 64),), 0)
    limits = {"piece_bytes": 32}
    world = World(plan, [call], random.Random(0), hosts=range(3), limits=limits)
    world.idle = {0} if calls else {0, 1}
    for _ in range(100):
        world.sweep_all()
        world.clock += 0.1
    assert world.most_waiting[2, 0] == 0  # the parent answered that it is alive
    world.idle.clear()
    world.settle()
    world.assert_done()
    sources = {source for asker, source, what, *_ in world.fetched if asker == 2}
    assert sources == {1}


def test_a_late_rank_asks_for_those_below_it_while_it_catches_up():
    """The late rank calls one round after the other while its parent is stopped."""
    plan = make_plan(9, Coded(parents=[-1, 0, 0, 1, 1, 3, 3, 2, 2]))
    script = [Call((("float32", 16),), seed) for seed in range(61)]
    world = World(plan, script, random.Random(0))
    late, below = 3, 5
    world.open = 60
    world.idle.add(late)
    world.settle()
    assert world.done(below, 60)
    world.frozen.add(1)
    world.open = 61
    since = world.clock
    while world.nodes[late].next_round() < 60:
        world.submit(late)  # the round's result has already arrived
        for _ in range(4):
            world.sweep_all()
            world.clock += world.limits.orphan_seconds / 5
        if world.done(below):
            break
    assert world.done(below)
    assert world.clock - since < 20 * world.limits.orphan_seconds


def test_a_rank_that_stops_after_a_long_wait_is_passed_over():
    """The root is ten minutes late; then its child stops."""
    plan = make_plan(9, Coded(parents=[-1, 0, 0, 1, 1, 3, 3, 2, 2]))
    script = [Call((("float32", 16),), seed) for seed in range(11)]
    world = World(plan, script, random.Random(0))
    world.open = 10
    world.settle()
    world.idle.add(0)
    world.open = 11
    for _ in range(6000):
        world.sweep_all()
        world.clock += 0.1
    world.frozen.add(1)
    world.idle.clear()
    since = world.clock
    while not world.done(5):
        world.sweep_all()
        world.clock += 0.1
        assert world.clock - since < 30
    world.assert_done({0, 3, 5, 6})


def test_ranks_fetch_from_their_parent_again_once_it_continues():
    """Ranks below a stopped parent get a result from the root. Once the parent
    continues, they fetch from it again, and never from the root, whose port has other
    work.
    """
    plan = make_plan(7, Coded(fanout=2, stragglers=1))
    below = plan.tree.children[1]
    world = World(
        plan,
        [Call((("float32", 160),), number) for number in range(6)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits={"piece_bytes": 64, "announced_bytes": 128},
    )
    world.open, world.frozen = 1, {1}
    world.settle()
    world.assert_done(set(range(plan.size)) - {1})

    def from_root():
        fetched = world.fetched
        return {
            r
            for to, source, what, r, _ in fetched
            if (source, what) == (0, RESULT) and to in below
        }

    assert from_root() == {1}
    world.open, world.frozen = 6, set()
    world.sweep_all()
    world.assert_done()
    assert from_root() <= {1, 2}  # until the parent has sent something


def test_a_parent_that_is_stopped_again_delays_no_rank_for_longer():
    """The time of an answer from a rank that was stopped meanwhile does not count."""
    plan = make_plan(7, Coded(fanout=2, stragglers=1))
    script = [Call((("float32", 4),), number) for number in range(40)]
    hosts = list(range(plan.size))
    world = World(plan, script, random.Random(0), hosts=hosts)
    below = plan.tree.children[1]
    world.open = 0
    for _ in range(5):
        for stopped in (False, False, True, True):
            world.frozen = {1} if stopped else set()
            world.open += 1
            begun = world.clock
            while any(world.nodes[r].next_round() <= world.open for r in below):
                world.sweep()
                world.clock += 0.01
            assert world.clock - begun < 1
        world.clock += 10
        world.frozen = set()
        for _ in range(20):
            world.sweep()
            world.clock += 0.01
