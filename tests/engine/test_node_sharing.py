"""Nodes share the work of a round: each block is in the sum once, whichever ranks are
late.
"""

import dataclasses
import functools
import itertools
import random
import re
import struct

import numpy as np
import pytest
import simulation
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulation import (
    DONE,
    DTYPES,
    EXAMPLES,
    FAILED,
    HEADER,
    MESSAGE,
    NEWS,
    OFFER,
    PENDING,
    Call,
    Garbling,
    Header,
    Running,
    beside,
    vectors,
)

from jaxcoded import Shared, make_plan

SHARES, HERE, ORDER = 16, 13, 14  # as `Flag` and `Kind` in message.h
GRANT = 0  # as `Order::Kind` in ledger.h
ONLY_TOLD = 2  # as `Audit` in node.h


@dataclasses.dataclass(frozen=True)
class Sum(Call):
    """A sum of the vectors that the ranks computed in the round before."""

    computed: dict = dataclasses.field(default_factory=dict, hash=False, compare=False)

    def own(self, plan, rank):
        return [
            wide.astype(gradients.dtype)
            for wide, gradients in zip(self.computed[rank], self.gradients)
        ]


@dataclasses.dataclass(frozen=True)
class Partial(Call):
    """A sum that may lack a part of the batch; `World` checks which part."""

    def check(self, plan, rank, vectors):
        pass


@dataclasses.dataclass(frozen=True)
class PartialSum(Sum, Partial):
    pass


@dataclasses.dataclass
class Sharing(Running):
    """A call in progress whose work is shared; ``own`` are the lent vectors."""

    of: Sum | None = None  # the later round that sums the vectors
    sums: list = dataclasses.field(default_factory=list)  # float64
    work: tuple | None = None  # the block being computed, and whether to begin again
    over: bool = False
    taken: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Audited(Call):
    """A sum whose last vector compares the blocks that two ranks have computed."""

    @functools.cached_property
    def gradients(self):
        return Call.gradients.func(
            dataclasses.replace(self, segments=self.segments[:-1])
        )

    def check(self, plan, rank, vectors):
        *vectors, audit = vectors
        super().check(plan, rank, vectors)
        each = 1 + 3 * len(vectors)
        assert not audit[: plan.size].any()
        first, second = audit[plan.size :].reshape(2, each)
        assert first[0] in (0, 1) and second[0] in (0, 1)
        if first[0] and second[0]:
            np.testing.assert_array_equal(first, second)


class World(simulation.World):
    """Ranks that share the work of some rounds.

    Attributes:
        wrong: ranks that compute something different from the other ranks.
        shared: the rounds with shared work.
        computed: number of blocks computed, by round.
        dealt: the finished rounds with shared work: number, call, and the blocks of
            each member.
    """

    def __init__(self, plan, script, rng, *, shared, **options):
        super().__init__(plan, script, rng, **options)
        self.shared = shared
        self.computed = {}
        self.wrong = set()
        self.parts = {}  # parts of the batch in vectors, by round
        self.dealt = []
        self.said = set()  # ranks that have reported that they are present
        self.out = set()  # ranks that no longer take part in a round
        self.versions = {}  # versions of each rank's vectors, as it has reported them
        self.starts = plan.placement.examples(EXAMPLES)
        for node in self.nodes:
            node.share_blocks(plan.placement.holders)

    def sent(self, source, to, message):
        head = Header(message)
        if head.kind == HERE:
            self.said.add(source)
        if head.flags & SHARES and head.kind == OFFER:
            if to not in self.dead:
                self.queues[source, to].append(message)
            generation, blocks, _, out = struct.unpack_from("<4I", head.body)
            self.versions[source] = generation << 32 | blocks
            if out:
                self.out.add(source)
            return
        super().sent(source, to, message)

    def may_change(self, source, what, version):
        """Programs add blocks to vectors that other ranks may still read. No rank uses
        pieces of an earlier version."""
        running = self._offering(source)
        return (
            what == MESSAGE
            and isinstance(running, Sharing)
            and (running.work is not None or version < self.versions[source])
        )

    def _check_own(self, source, round, piece, data):
        if isinstance(self._offering(source), Sharing):
            self._check_blocks(source, piece, data, self.limits.slices)
        else:
            super()._check_own(source, round, piece, data)

    def _check_message(self, source, round, piece, data):
        running = self._offering(source)
        if isinstance(running, Sharing):
            self._check_blocks(source, piece, data)
        elif not isinstance(running.call, Sum):
            super()._check_message(source, round, piece, data)
        elif not self._may_be_overwritten(source, round, piece):
            self._check_blocks(source, piece, data)

    def _check_blocks(self, source, piece, data, slices=1):
        """Check that this piece holds what a program has computed so far."""
        running = self._offering(source)
        if isinstance(running, Sharing):
            vectors = zip(running.sums, running.own)
            sums = [wide.astype(vector.dtype) for wide, vector in vectors]
        else:
            sums = running.call.own(self.plan, source)
        segment, offset, size = self._place(running, piece, slices)
        expected = sums[segment].view(np.uint8)[offset : offset + size]
        assert expected.tobytes() == data, (source, running.round, piece)

    def submit(self, rank):
        node = self.nodes[rank]
        round = node.next_round()
        if round not in self.shared:
            super().submit(rank)
            return
        call = self.call_of(rank, round)
        out, own = (
            [np.full(n, np.nan, np.dtype(dtype)) for dtype, n in call.segments]
            for _ in range(2)
        )
        if self.in_place and self.rng.random() < self.in_place:
            out = own
        self.running[rank] = running = Sharing(round, call, own, out, len(own))
        if not call.segments:  # the next round sums the vectors
            call = running.of = self.script[round]
        running.message = [(DTYPES[dtype], n) for dtype, n in call.segments]
        running.sums = [np.zeros(n) for _, n in call.segments]
        if running.of:
            call.computed[rank] = running.sums
            call = running.call
        audits = (
            [(2.0**-23, count) for _, count in call.segments[:-1]]
            if isinstance(call, Audited)
            else []
        )
        node.share(call.fingerprint, call.signature, vectors(out), audits=audits)
        self._comes(rank)
        self.check_end(rank)

    def check_end(self, rank):
        running = self.running[rank]
        super().check_end(rank)
        if self.running[rank] or rank in self.dead:
            return
        # the program does not know yet that the call is over, and asks for a block
        if isinstance(running, Sharing) and not running.over:
            assert self.nodes[rank].take_block() is None

    def _comes(self, rank):
        running = self.running[rank]
        for vector, wide in zip(running.own, running.sums):
            vector[:] = wide
        self.nodes[rank].come_for_block(vectors(running.own))

    def may_extend(self, rank):
        running = self.running[rank]
        if not isinstance(running, Sharing):
            return super().may_extend(rank)
        if rank in self.frozen or rank in self.idle or running.over:
            return False
        if running.work is None:
            running.work = self.nodes[rank].take_block()
            if running.work is not None:
                for vector in running.own:  # the rank's vectors are not lent any more
                    vector[:] = np.nan
        return running.work is not None or self.nodes[rank].no_more_blocks()

    def extend(self, rank):
        running = self.running[rank]
        if not isinstance(running, Sharing):
            super().extend(rank)
            return
        if running.work is None:
            running.over = True
            self.nodes[rank].complete(vectors(running.out))
            self.check_end(rank)
            return
        block, fresh, audit = running.work
        running.work = None
        assert rank in self.plan.placement.holders[block]
        self.computed[running.round] = self.computed.get(running.round, 0) + 1
        first, last = self.starts[block : block + 2]
        assert not (fresh and running.of)
        of = running.of or running.call
        factor = 1.5 if rank in self.wrong else 1
        given = [factor * g[first:last].astype(float).sum(0) for g in of.gradients]
        if isinstance(of, Audited):
            rows = [
                1,
                *itertools.chain(*((0, np.linalg.norm(g), g.sum()) for g in given)),
            ]
            zeros = np.zeros(len(rows))
            second = audit == ONLY_TOLD
            places = [zeros if second or not audit else rows, rows if second else zeros]
            given = [0 * g if second else g for g in given]
            given.append(np.concatenate([np.zeros(self.plan.size), *places]))
        for wide, rows in zip(running.sums, given, strict=True):
            wide[:] = (0 if fresh else wide) + rows
        self._comes(rank)

    def leave_share(self, rank):
        """Let an exception end the program between two blocks."""
        self.running[rank].left = True
        self.running[rank].over = True
        self.nodes[rank].leave_call()
        self.check_end(rank)

    def _check_result(self, rank, running):
        if self.wrong:
            return
        if not running.left:
            super()._check_result(rank, running)
            if rank == self.plan.root:
                self._check_bits(running)
                if isinstance(running, Sharing):
                    division = self.nodes[rank].division()
                    self.dealt.append((running.round, running.call.signature, division))

    def _check_bits(self, running):
        """Check that the sum is that of the members' vectors, in the ledger's order."""
        lent = running.round in self.shared and running.call.segments
        if not (lent or isinstance(running.call, Sum)):
            return
        division = self.nodes[self.plan.root].division()
        blocks = [*itertools.chain(*division)]
        assert len(blocks) == len(set(blocks)), division
        own, others = division[:1], [*filter(None, division[1:])]
        choices = [others]
        if isinstance(running.call, PartialSum):  # the sum of the ranks that have come
            choices = [
                some
                for n in range(len(others) + 1)
                for some in itertools.combinations(others, n)
            ]
        actual = [vector.tobytes() for vector in self._data(running)]
        assert any(
            self._sums(running, [*filter(None, own), *some]) == actual
            for some in choices
        ), (running.round, division)
        self.parts[running.round] = len(blocks) / len(self.plan.placement.holders)

    def _data(self, running):
        return running.out[: len(running.call.gradients)]

    def _sums(self, running, division):
        """Return the bytes of the sums of these members' vectors, in order."""
        out = []
        for gradients, actual in zip(running.call.gradients, self._data(running)):
            total = None
            for blocks in division:
                vector = np.zeros(actual.size)
                for block in blocks:
                    first, last = self.starts[block : block + 2]
                    vector += gradients[first:last].astype(float).sum(0)
                vector = vector.astype(actual.dtype)
                total = vector if total is None else total + vector
            total = np.zeros_like(actual) if total is None else total
            out.append(total.tobytes())
        return out


def in_sections(rng):
    """Draw whether sums are formed in sections, and how much of a section is announced
    at a time.
    """
    rng = beside(rng)
    return {
        "sections_from": rng.choice([0, 1]),
        "announced_bytes": rng.choice([8, 32, 64, 1 << 20]),
    }


def world(
    rng,
    *,
    size=None,
    work=None,
    rounds=4,
    handed_over=None,
    approximate=False,
    audited=None,
    **options,
):
    """Draw a family of any size, in which some rounds share the work. With
    ``approximate`` all rounds share the work, and a part of the batch suffices after a
    deadline. With ``audited`` all rounds share the work, each in one call.
    """
    size = size or rng.randint(2, 6)
    if audited is None:
        audited = not (handed_over or approximate) and rng.random() < 0.3
    if handed_over is None:
        handed_over = not audited and rng.random() < 0.4
    root_computes = size == 2 or rng.random() < 0.7
    others = size - 1 - (not root_computes)
    replicas = rng.randint(1, min(3, others)) if others else 0
    blocks = rng.randint(1, 4)
    if work is None:
        work = Shared(replicas=replicas, blocks=blocks, root_computes=root_computes)
    plan = make_plan(size, work)
    kinds = (Partial, PartialSum) if approximate else (Call, Sum)
    script = [
        kinds[0](
            tuple(
                (rng.choice(["float32", "float64"]), rng.choice([1, 3, 20]))
                for _ in range(rng.randint(1, 3))
            ),
            seed,
        )
        for seed in range(rounds)
    ]
    shared = {r for r in range(1, rounds + 1) if rng.random() < 0.8}
    if handed_over:  # calls of blocks and of their sum alternate
        shared = set(range(1, rounds, 2))
        script = [
            kinds[0]((), 0)
            if round in shared
            else kinds[1](script[round - 1].segments, round)
            for round in range(1, rounds + 1)
        ]
    elif approximate:
        shared = set(range(1, rounds + 1))
    elif audited:
        shared = set(range(1, rounds + 1))
        script = [
            Audited((*segments, ("float32", size + 2 * (1 + 3 * len(segments)))), round)
            for round, segments in enumerate(call.segments for call in script)
        ]
    limits = {"piece_bytes": rng.choice([16, 64, 1 << 18]), "telemetry_rounds": 4}
    limits |= in_sections(rng)
    if approximate:
        action = simulation._engine.OnDeadline.approximate
        limits |= {"on_deadline": action, "deadline_seconds": 1.0}
    options = {
        "hosts": [rng.randint(0, 1) for _ in range(size)],
        "inline": rng.choice([(0,), (0, 10**6), (10**6,)]),
        "twice": rng.choice([0, 0.1]),
        "again": rng.choice([0, 0.1]),
        "unreadable": rng.choice([0, 0.3]),
        "rests": rng.choice([0, 0.2]),
        "in_place": beside(rng).choice([0, 0.5, 1]),
        "limits": limits,
    } | options
    return World(plan, script, rng, shared=shared, **options)


def some(rng, ranks, most):
    return set(rng.sample(sorted(ranks), rng.randint(0, most)))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_every_block_once(seed):
    """At any moment ranks stop and continue, and programs stay away."""
    rng = random.Random(seed)
    run = world(rng)
    workers = set(range(run.plan.size)) - {run.plan.root}
    for _ in range(rng.randint(1, 6)):
        run.frozen = some(rng, workers, len(workers))
        run.idle = some(rng, range(run.plan.size), run.plan.size - 1)
        pace = [rng.choice([0.1, 1]) for _ in range(run.plan.size)]
        for _ in range(rng.randint(1, 150)):
            run.step(pace)
    run.frozen, run.idle = set(), set()
    run.settle()
    run.assert_done()


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
@example(seed=188)
def test_nothing_happens_while_programs_stay_away(seed):
    """Programs stay away in the middle of a round: no block moves back and forth
    between ranks, and no rank keeps waking up.
    """
    rng = random.Random(seed)
    run = world(rng)
    for _ in range(rng.randint(1, 5)):
        run.idle = some(rng, range(run.plan.size), run.plan.size)
        for _ in range(rng.randint(1, 100)):
            run.step()
        run.clock += rng.choice([0, 1, 100])
        run.settle()
        run.rest()
    run.idle = set()
    run.settle()
    assert_done_if_anybody_could(run)


def assert_done_if_anybody_could(run, left=()):
    """Check that each round is done, or failed for a good reason; return whether all rounds are done. With blocks on
    the host a rank given up as late cannot begin again, and is missing. ``left`` has each ``(rank, round)`` in which a
    program left its loop: its vector is lost even if the root needed it.
    """
    failed = {
        round: end.error
        for ends in run.ends
        for round, end in ends.items()
        if end.outcome == FAILED
    }
    for round, error in failed.items():
        assert {end[round].error for end in run.ends if round in end} == {error}
        if "it gets nothing of " in error:
            named = re.findall(r"rank (\d+)", error.partition("nothing of ")[2])
            assert named and all((int(rank), round - 1) in left for rank in named)
        elif "after group.blocks failed" in error:
            assert "nobody who is left holds" in failed[round - 1]
        else:
            assert "nobody who is left holds" in error
            assert not run.script[round - 1].segments
    if not failed:
        run.assert_done()
    return not failed


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_replayed(seed):
    """A replay under another schedule: the same ranks compute the same blocks, and the
    bits are equal.
    """
    rng = random.Random(seed)
    run = world(rng, audited=False)

    def played(replay):
        for _ in range(rng.randint(1, 6)):
            replay.frozen = some(rng, range(1, replay.plan.size), replay.plan.size - 1)
            replay.idle = some(rng, range(replay.plan.size), replay.plan.size - 1)
            for _ in range(rng.randint(1, 150)):
                replay.step()
        replay.frozen, replay.idle = set(), set()
        replay.settle()
        return replay

    if not assert_done_if_anybody_could(played(run)):
        return
    limits = in_sections(rng) | {"piece_bytes": 16}
    again = World(run.plan, run.script, rng, shared=run.shared, limits=limits)
    for rank, node in enumerate(again.nodes):
        node.replay([] if rank else run.dealt)  # the root alone has the file
    played(again).assert_done()
    assert again.dealt == run.dealt
    assert again.results == run.results


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_replayed_without_a_rank_that_computed(seed):
    """All other ranks get an error with a message, although they hold the rank's data."""
    rng = random.Random(seed)
    plan = make_plan(4, Shared(replicas=3, blocks=2))
    script = [Call((("float32", 5),), seed)]
    run = World(plan, script, rng, shared={1})
    run.settle()
    again = World(plan, script, rng, shared={1})
    for rank, node in enumerate(again.nodes):
        node.replay([] if rank else run.dealt)  # the root alone has the file
    for _ in range(rng.randint(0, 30)):
        again.step()
    victim = rng.choice([1, 2, 3])
    if 1 in again.ends[0]:
        return
    again.kill(victim, known=True)
    again.settle()
    for rank in {0, 1, 2, 3} - {victim}:
        assert "needs every rank that computed" in again.ends[rank][1].error


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_any_ranks_are_stopped_for_good(seed):
    """From any moment on, ranks are stopped whose blocks other ranks hold; later they
    come back.
    """
    rng = random.Random(seed)
    run = world(rng, audited=False, handed_over=False)
    run.shared = set(range(1, len(run.script) + 1))
    workers = set(range(run.plan.size)) - {run.plan.root}
    for _ in range(rng.randint(0, 200)):
        run.step()
    most = min(run.plan.placement.replicas, len(workers))
    run.frozen = some(rng, workers, most)
    run.settle()
    run.assert_done(set(range(run.plan.size)) - run.frozen)
    run.frozen = set()
    run.settle()
    run.assert_done()


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_any_ranks_die(seed):
    """Ranks whose blocks other ranks hold die, one after the other, with or without a
    report.
    """
    rng = random.Random(seed)
    run = world(rng, handed_over=False)
    run.shared = set(range(1, len(run.script) + 1))
    known = rng.random() < 0.5
    workers = set(range(run.plan.size)) - {run.plan.root}
    killed = rng.sample(
        sorted(workers), rng.randint(0, min(run.plan.placement.replicas, len(workers)))
    )
    for rank in killed:
        for _ in range(rng.randint(0, 120)):
            run.step()
        run.kill(rank, known=known)
    run.settle()
    run.assert_done(set(range(run.plan.size)) - set(killed))


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_any_rank_raises_between_two_blocks(seed):
    """Other ranks compute the rank's blocks, and the rank continues in the next round."""
    rng = random.Random(seed)
    run = world(rng)
    gone = set()
    for _ in range(rng.randint(1, 300)):
        run.step()
        rank = rng.randrange(run.plan.size)
        running = run.running[rank]
        may = isinstance(running, Sharing) and not running.over
        left = {r for r, each in enumerate(run.running) if each and each.left}
        few = len(left | {rank}) <= run.plan.placement.replicas
        if may and few and rank != run.plan.root and rng.random() < 0.05:
            gone.add((rank, running.round))
            run.leave_share(rank)
    run.settle()
    assert_done_if_anybody_could(run, gone)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_any_ranks_are_stopped_while_blocks_are_computed(seed):
    """Programs own the vectors. The sum excludes the vectors of ranks that are given up, and does not wait for them."""
    rng = random.Random(seed)
    run = world(rng, size=rng.randint(3, 6), rounds=2, handed_over=True)
    workers = set(range(run.plan.size)) - {run.plan.root}
    run.open = 1
    for _ in range(rng.randint(0, 200)):
        run.step()
    most = min(run.plan.placement.replicas, len(workers))
    run.frozen = some(rng, workers, most)
    # the round waits for a rank that reported itself present when all blocks were
    # computed: only this rank has its sums
    chosen = run.frozen & run.said
    run.settle()
    there = set(range(run.plan.size)) - run.frozen
    # A rank given up as late cannot begin again, and is missing. The root's error does not say this.
    gone = run.frozen | run.out | {run.plan.root}
    if any(set(holders) <= gone for holders in run.plan.placement.holders):
        return
    run.open = 2
    run.settle()
    if not chosen:
        run.assert_done(there)
    run.frozen = set()
    run.settle()
    run.assert_done()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_a_part_of_the_batch_after_the_deadline(seed):
    """Live ranks continue if any other ranks stop, die or stay away."""
    rng = random.Random(seed)
    run = world(rng, approximate=True)
    workers = set(range(run.plan.size)) - {run.plan.root}
    known = rng.random() < 0.5
    for _ in range(rng.randint(1, 5)):
        run.frozen = some(rng, workers - run.dead, len(workers - run.dead))
        run.idle = some(rng, range(run.plan.size), run.plan.size - 1)
        for _ in range(rng.randint(1, 150)):
            run.step()
        living = sorted(workers - run.dead)
        if living and rng.random() < 0.2:
            run.kill(rng.choice(living), known=known)
    run.idle = set()
    run.frozen -= run.dead
    run.settle()
    run.assert_done(set(range(run.plan.size)) - run.frozen - run.dead)
    run.frozen = set()
    run.settle()
    run.assert_done(set(range(run.plan.size)) - run.dead)


@pytest.mark.parametrize("handed_over", [False, True])
def test_how_much_of_the_batch_is_in_it(handed_over):
    """The sum holds all blocks of the live ranks; later rounds do not wait for silent
    ranks.
    """
    run = world(
        random.Random(0),
        size=4,
        work=Shared(blocks=4),
        handed_over=handed_over,
        approximate=True,
    )
    plan = run.plan
    run.open = 2 if handed_over else 1
    run.settle()
    run.assert_done()
    assert set(run.parts.values()) == {1}
    run.frozen = {1, 2}
    lost = [set(ranks) <= run.frozen for ranks in plan.placement.holders]
    assert any(lost)
    run.open = len(run.script)
    for _ in range(200):  # in steps much shorter than the deadline
        while run.sweep() == NEWS:
            pass
        run.clock += run.limits.orphan_seconds
    run.assert_done({0, 3})
    rest = {r: part for r, part in run.parts.items() if r > (2 if handed_over else 1)}
    assert [*rest.values()] == pytest.approx([1 - np.mean(lost)] * len(rest))
    assert rest


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("shared", [{1, 2, 3, 4}, {1, 2}])
def test_a_rank_that_is_late_in_a_failed_round(replicas, shared):
    """The rank's call is over as it begins. The next round uses the rank's vectors, and
    computes no block twice.
    """
    plan = make_plan(4, Shared(replicas=replicas, blocks=2))
    script = [Call((("float32", 500),), seed) for seed in range(4)]
    drawn = random.Random(0)
    world = World(plan, script, drawn, shared=shared, hosts=[0, 1, 2, 3])
    world.open = 1
    world.settle()
    world.open = 2
    world.idle = {2}
    world.deviations[1, 2] = Call((("float32", 500),), 77)
    world.settle()
    world.idle.clear()
    world.settle()
    assert {ends[2].outcome for ends in world.ends} == {FAILED}
    world.open = 4
    world.settle()
    for ends in world.ends:
        assert (ends[3].outcome, ends[4].outcome) == (DONE, DONE)
    blocks = len(plan.placement.holders)
    assert all(world.computed[round] == blocks for round in shared - {1, 2})


def test_what_follows_blocks_is_their_sum():
    plan = make_plan(3, Shared(blocks=2))
    other = Call((("float32", 5),), 1, kind="broadcast")
    run = World(plan, [Call((), 0), other], random.Random(0), shared={1})
    run.script[1] = Sum(other.segments, 1)
    run.open = 1
    run.settle()
    run.script[1] = other
    run.open = 2
    run.settle()
    for rank in range(3):
        assert "after group.blocks the sum" in run.ends[rank][2].error


def test_no_rank_is_late():
    """Every rank computes its own blocks, and no other blocks."""
    plan = make_plan(4, Shared(replicas=2, blocks=3))
    script = [Call((("float32", 5),), seed) for seed in range(3)]
    run = World(plan, script, random.Random(0), shared={1, 2, 3})
    run.settle()
    run.assert_done()
    assert run.computed == {1: 12, 2: 12, 3: 12}


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("action", ["raise", "approximate"])
def test_the_deadline_while_the_sum_is_formed(action, sections):
    """A stopped rank's vector does not come: the root does not repeat the section
    orders again and again.
    """
    plan = make_plan(4, Shared(replicas=0, blocks=1))
    limits = {
        "piece_bytes": 16,
        "announced_bytes": 16,
        "sections_from": 1 if sections else 10**6,
        "on_deadline": getattr(simulation._engine.OnDeadline, action),
        "deadline_seconds": 1.0,
    }
    call = Partial((("float32", 40),), 0)
    run = World(
        plan, [call], random.Random(0), shared={1}, hosts=[0, 1, 2, 3], limits=limits
    )
    last = "forms pieces" if sections else "child 1 offers 10 of round 1"
    while last not in run.nodes[0].status():
        run.step()
    run.frozen = {1}
    for _ in range(200):  # in steps much shorter than the deadline
        while run.sweep() == NEWS:
            pass
        run.clock += run.limits.orphan_seconds
    if action == "approximate":
        run.assert_done({0, 2, 3})
    orders = sum(message[0] == simulation.DELEGATE for message in run.queues[0, 1])
    assert orders < 20
    run.frozen = set()
    run.settle()
    if action == "approximate":
        run.assert_done()
        return
    for ends in run.ends:
        assert ends[1].outcome == FAILED
        assert "DeadlineExceeded: round 1 was not" in ends[1].error
        assert "rank 0 waits for rank 1" in ends[1].error


def test_the_deadline_while_what_was_computed_is_fetched():
    """A rank offers its message to the sum that follows the blocks, and stops before
    the message is fetched."""
    call = Sum((("float32", 40),), 1)
    run = World(
        make_plan(4, Shared(replicas=0, blocks=1)),
        [Call((), 0), call],
        random.Random(0),
        shared={1},
        hosts=[0, 1, 2, 3],
        limits={
            "on_deadline": getattr(simulation._engine.OnDeadline, "raise"),
            "deadline_seconds": 1.0,
        },
    )
    run.open = 1
    run.sweep_all()
    run.open = 2
    run.submit(1)
    run.advance(1)
    run.frozen = {1}
    run.settle()
    for rank in (0, 2, 3):
        assert run.ends[rank][2].outcome == FAILED
        assert "rank 0 waits for rank 1" in run.ends[rank][2].error


@pytest.mark.parametrize("deadline", [0.0, 1.0], ids=["none", "passes"])
def test_the_root_sleeps_while_its_program_repeats_a_finished_block(deadline):
    plan = make_plan(3, Shared(replicas=2, blocks=4))
    run = World(
        plan,
        [Call((("float32", 40),), 0)],
        random.Random(0),
        shared={1},
        limits={"deadline_seconds": deadline},
    )
    run.submit(0)
    assert run.may_extend(0)  # rank 0 takes a block
    run.idle = {0}
    for _ in range(100):
        run.sweep_all()
        run.clock += run.limits.orphan_seconds
    assert run.nodes[0].frontier() == 2 and run.running[0] is not None
    run.rest()
    run.idle = set()
    run.settle()
    run.assert_done()


def test_a_late_rank_forms_a_section():
    """The round is over, and programs continue to use the memory of their vectors."""
    plan = make_plan(4, Shared(replicas=0, blocks=1))
    limits = {"piece_bytes": 16, "announced_bytes": 16, "sections_from": 1}
    call = Call((("float32", 40),), 0)
    run = World(plan, [call], random.Random(0), shared={1}, limits=limits)
    while "forms pieces" not in run.nodes[0].status():
        run.step()
    run.frozen, run.idle = {2}, {1, 3}
    while 1 not in run.ends[0]:
        run.sweep()
        run.clock += run.limits.orphan_seconds
    run.idle = set()
    assert run.may_extend(1) and run.may_extend(3)
    fetched = len(run.fetched)
    run.frozen = set()
    for source in (0, 1, 3):
        while run.queues[source, 2]:
            run.deliver((source, 2))
            run.advance(2)
    assert any(fetch[0] == 2 and fetch[1] in (1, 3) for fetch in run.fetched[fetched:])
    run.settle()
    run.assert_done()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_rank_that_computes_something_else(seed):
    """The rank is detected in the first round in which another rank also computes one
    of its blocks. Blocks of late ranks are not compared.
    """
    rng = random.Random(seed)
    run = world(rng, size=rng.randint(3, 5), rounds=30, audited=True)
    if not run.plan.placement.replicas:
        return
    culprit = rng.choice(run.plan.placement.ranks)
    run.wrong = {culprit}
    run.settle()
    failed = [round for round, end in run.ends[0].items() if end.outcome == FAILED]
    assert failed
    for ends in run.ends:
        assert failed == [r for r, end in ends.items() if end.outcome == FAILED]
    for round in failed:
        text = run.ends[0][round].error
        assert text.startswith(f"InconsistentMessages: round {round}, "), text
        named = re.search(r"what ranks (\d+), (\d+) have computed of block", text)
        assert str(culprit) in named.groups(), text
        assert len(set(named.groups())) == 2, text


@pytest.mark.parametrize(
    ("killed", "kind", "remedy"),
    [
        (True, "TooManyErasures", "go on with group.recovered(), or give"),
        (False, "CodedError", "all ranks are to make the same calls before they close"),
    ],
)
def test_blocks_that_no_live_rank_holds(killed, kind, remedy):
    """All remaining ranks get an error with a message."""
    plan = make_plan(4, Shared(blocks=2, root_computes=False))
    run = World(plan, [Call((("float32", 5),), 0)], random.Random(0), shared={1})
    for rank in (1, 2):
        run.kill(rank, known=True) if killed else run.leave(rank)
    run.settle()
    for rank in (0, 3):
        end = run.ends[rank][1]
        text = f"{kind}: round 1: nobody who is left holds the 2 blocks"
        assert end.error.startswith(text), end
        how = "is dead" if killed else "has left the group"
        named = set(map(int, re.findall(rf"rank (\d+), which {how}", end.error)))
        assert named == {1, 2}, end
        assert f": {remedy}" in end.error
    assert run.nodes[0].outcome() != PENDING


def test_deadline():
    """A rank that no other rank can replace is late. The error says how much each rank still has to compute."""
    plan = make_plan(3, Shared(replicas=0, blocks=2))
    action = simulation._engine.OnDeadline
    limits = {"on_deadline": getattr(action, "raise"), "deadline_seconds": 1.0}
    script = [Call((("float32", 5),), seed) for seed in range(2)]
    run = World(plan, script, random.Random(0), shared={1, 2}, limits=limits)
    run.open = 1
    run.settle()
    run.assert_done()
    run.open = 2
    for rank in range(3):
        run.submit(rank)
    run.idle = {1}
    run.settle()
    run.idle = set()
    run.settle()
    for rank in range(3):
        error = run.ends[rank][2].error
        assert "rank 0 waits for rank 1, which has 2 blocks to compute" in error


# --- Damaged messages ---

# as `Progress` in share.h
GENERATION, ADDED, ANSWERED, RETURNED = 0, 1, 2, 4


class GarblingWorld(Garbling, World):
    pass


def garbling(rng, **options):
    run = world(rng, **options)
    run.__class__ = GarblingWorld
    return run


def progress(message):
    return list(struct.unpack_from("<8I", message, HEADER.size))


def telling(message, field, value):
    report = progress(message)
    report[field] = value
    start = HEADER.size + 32
    return message[: HEADER.size] + struct.pack("<8I", *report) + message[start:]


def shares(message):
    head = Header(message)
    return head.kind == OFFER and head.flags & SHARES


def assert_failed_once(run, words):
    """Check that a single round fails, on all ranks, with these words."""
    texts = set()
    for ends in run.ends:
        ((round, end),) = [(r, e) for r, e in ends.items() if e.outcome == FAILED]
        texts.add((round, end.error))
        assert [e.outcome for e in ends.values()].count(DONE) == len(run.script) - 1
    ((_, text),) = texts
    assert words in text


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("field", [GENERATION, ADDED, ANSWERED])
def test_impossible_reports_about_blocks(field, before):
    """The message comes before or after the root's call."""
    plan = make_plan(3, Shared(blocks=2))
    script = [Call((("float32", 5),), seed) for seed in range(3)]
    run = GarblingWorld(plan, script, random.Random(0), shared={1, 2, 3})
    seen = []

    def garble(link, message):
        of = shares(message) and link == (1, 0) and Header(message).round == 2
        if not of or (run.running[0] is None) != before or (seen and not before):
            return message
        seen.append(message)
        return telling(message, field, 7)

    run.open = 1
    run.settle()
    run.open = 3
    run.garble = garble
    if before:
        run.idle = {0}
        run.settle()
        run.idle = set()
    run.settle()
    assert seen
    words = "rank 0 cannot read a message from rank 1 (about its blocks)"
    assert_failed_once(run, words)


def test_a_block_that_is_returned_and_computed():
    plan = make_plan(3, Shared(blocks=4))
    script = [Call((("float32", 5),), seed) for seed in range(3)]
    run = GarblingWorld(plan, script, random.Random(0), shared={1, 2, 3})
    seen = []

    def garble(_, message):
        of = shares(message) and Header(message).round == 1
        if not of or not progress(message)[RETURNED]:
            return message
        seen.append(message)
        return telling(message, ADDED, 5)

    run.garble = garble
    for rank in range(3):
        run.submit(rank)
    run.idle = {1}
    run.settle()
    run.idle = set()
    run.settle()
    assert seen
    assert_failed_once(run, "about its blocks")


@pytest.mark.parametrize("block", [0, 99], ids=["another rank's", "no rank's"])
def test_blocks_that_a_rank_does_not_hold(block):
    """The rank must not compute them, as it lacks their data."""
    plan = make_plan(4, Shared(blocks=4))
    script = [Call((("float32", 5),), seed) for seed in range(3)]
    run = GarblingWorld(plan, script, random.Random(0), shared={1, 2, 3})
    assert 2 not in plan.placement.holders[0]
    seen = []

    def garble(link, message):
        head = Header(message)
        of = head.kind == ORDER and head.ready == GRANT and link[1] == 2
        if seen or not of:
            return message
        seen.append(message)
        start = HEADER.size
        return message[:start] + struct.pack("<I", block) + message[start + 4 :]

    run.garble = garble
    run.idle = {1}
    run.settle()
    run.idle = set()
    run.settle()
    assert seen
    assert_failed_once(run, "rank 2 cannot read a message from rank 0 (kind 14, round")


def test_later_messages_do_not_fail_a_decided_round():
    """The root's program has not returned yet, and other ranks are done."""
    plan = make_plan(3, Shared(blocks=2))
    script = [Call((("float32", 5),), seed) for seed in range(3)]
    run = GarblingWorld(plan, script, random.Random(0), shared={1, 2, 3})
    seen = []

    def garble(link, message):
        if seen or not (shares(message) and Header(message).round == 3):
            return message
        assert run.running[0].round == 2
        seen.append(message)
        return message[:-8]

    run.garble = garble
    run.open = 1
    run.settle()
    run.open = 3
    while not (run.nodes[0].no_more_blocks() and run.running[0]):
        run.step()
    run.idle = {0}
    run.settle()
    assert seen
    run.idle = set()
    run.settle()
    assert_failed_once(run, "rank 0 cannot read a message from rank")
    assert all(ends[2].outcome == DONE for ends in run.ends)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_shared_work_with_messages_that_are_cut_anywhere(seed):
    """Each round gives the right sum or an error, the same on all ranks."""
    rng = random.Random(seed)
    run = garbling(rng, handed_over=False)
    share = rng.choice([0.01, 0.1])

    def garble(_, message):
        if rng.random() > share:
            return message
        if not (shares(message) or message[0] == ORDER):
            return message
        return message[: rng.randint(HEADER.size, len(message))]

    run.garble = garble
    for _ in range(rng.choice([0, 300])):
        run.step()
    run.garble = lambda link, message: message
    run.settle()
    for round in range(1, len(run.script) + 1):
        ends = {ends[round] for ends in run.ends}
        assert len(ends) == 1, ends
        assert ends.pop().outcome in (DONE, FAILED)


@pytest.mark.parametrize("root_computes", [False, True])
@pytest.mark.parametrize("sections", [1, 10**6])
def test_all_workers_stop_before_their_first_block(sections, root_computes):
    """At the deadline the approximate sum contains nothing from these ranks."""
    strategy = Shared(replicas=0, blocks=1, root_computes=root_computes)
    limits = {
        "piece_bytes": 16,
        "announced_bytes": 16,
        "sections_from": sections,
        "on_deadline": simulation._engine.OnDeadline.approximate,
        "deadline_seconds": 1.0,
    }
    world = World(
        make_plan(4, strategy),
        [Partial((("float32", 40),), 0)],
        random.Random(0),
        shared={1},
        hosts=[0, 1, 2, 3],
        limits=limits,
    )
    for rank in (1, 2, 3):
        world.submit(rank)
        while world.queues[rank, 0]:
            world.deliver((rank, 0))
    world.submit(0)
    world.frozen = {1, 2, 3}
    for _ in range(60):
        while world.sweep() == simulation.NEWS:
            pass
        world.clock += 0.05
    assert world.ends[0][1].outcome == simulation.DONE, world.nodes[0].status()


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_says_nothing_for_a_moment_in_sections(dies):
    """A rank is silent for a moment while the round is overdue: another rank is dead, or the deadline passes. The
    silent rank's vector is used once it answers.
    """
    plan = make_plan(4, Shared(replicas=0, blocks=1))
    limits = {
        "piece_bytes": 16,
        "announced_bytes": 16,
        "sections_from": 1,
        "on_deadline": simulation._engine.OnDeadline.approximate,
        "deadline_seconds": 10.0,
    }
    script = [Partial((("float32", 40),), seed) for seed in range(2)]
    run = World(
        plan, script, random.Random(0), shared={1, 2}, hosts=[0] * 4, limits=limits
    )
    run.open = 1
    run.settle()
    if dies:
        run.kill(3, known=True)
        run.settle()
    else:
        run.idle = {2}
    run.open = 2
    if run.idle:
        start = run.clock
        while run.sweep() == NEWS:
            pass
        run.clock = start + limits["deadline_seconds"] - 0.1
        run.idle = set()
    while "forms pieces" not in run.nodes[0].status():
        run.step()
    run.frozen = {1}
    until = run.clock + 0.3
    while run.clock < until:
        while run.sweep() == NEWS:
            pass
        run.clock += 0.025
    run.frozen = set()
    until = run.clock + 60
    living = run.ends[: 4 - dies]
    while any(2 not in ends for ends in living) and run.clock < until:
        run.sweep()
        run.clock += 0.05
    assert all(2 in ends and ends[2].outcome == DONE for ends in living)
