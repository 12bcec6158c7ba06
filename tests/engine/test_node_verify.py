"""Nodes compare surplus messages: honest rounds pass, and a rank with wrong messages is
detected, named and left out.
"""

import collections
import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from cases import more
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DONE,
    EXAMPLES,
    FAILED,
    MESSAGE,
    POLICIES,
    RESULT,
    Call,
    World,
    held,
    random_plan,
    random_world,
    tolerated,
)
from test_node_parity import run, sound_script

from jaxcoded import DEBUG, Check, Coded, make_plan

# mantissa bits and exponent bits of a number
FORMAT = {
    "float16": (10, 5),
    "bfloat16": (7, 8),
    "float32": (23, 8),
    "float64": (52, 11),
}


def flip(vector, element, bit):
    """Flip a bit of a number; bit 0 is the lowest one of its exponent."""
    unsigned = vector.view(f"u{vector.itemsize}")
    unsigned[element] ^= unsigned.dtype.type(1 << FORMAT[str(vector.dtype)][0] + bit)


@dataclasses.dataclass(frozen=True)
class Flipped(Call):
    """Some ranks' vectors have a flipped bit: rank, vector, element, bit of the exponent."""

    flips: tuple[tuple[int, int, int, int], ...] = ()

    def own(self, plan, rank):
        vectors = super().own(plan, rank)
        for liar, vector, element, bit in self.flips:
            if liar == rank:
                flip(vectors[vector], element, bit)
        return vectors

    def effect(self, plan, rank):
        """Return by how much the flips change the last wrong number of a rank's vectors."""
        for right, wrong in zip(super().own(plan, rank), self.own(plan, rank)):
            with np.errstate(invalid="ignore"):
                changed = wrong.astype(np.float64) - right.astype(np.float64)
            if changed.any() or not np.isfinite(changed).all():
                return np.abs(changed).max()
        return 0.0


def below(plan, rank):
    """Return the amplification, the layers and the widest family below a rank."""
    if plan.codings[rank] is None:
        return 1.0, 0, 0
    children = plan.coded_children(rank)
    theirs = [below(plan, child) for child in children]
    kappa = plan.codings[rank].code.amplification * max(t[0] for t in theirs)
    return (
        kappa,
        1 + max(t[1] for t in theirs),
        max(len(children), *(t[2] for t in theirs)),
    )


def shows(plan, call, liar):
    """Return whether a parent with the messages of all children must detect a wrong
    message. This follows from the bound of docs/theory.md, with the largest gradient
    that these messages show.
    """
    parent = plan.parents[liar]
    if parent not in plan.checked:
        return False
    code, children = plan.codings[parent].code, plan.coded_children(parent)
    honest = Call(call.segments, call.seed)
    messages, _ = honest.messages(plan)
    sizes = np.abs(code.B).sum((1, 2))
    scale = max(
        np.abs(v).max(initial=0) / size
        for child, rows in zip(children, sizes.reshape(len(children), -1))
        for v in messages[child]
        for size in rows
        if size
    )
    ((_, vector, *_),) = call.flips
    part, kind = divmod(vector, len(call.segments))
    dtype = jnp.dtype(call.segments[kind][0])
    u = float(jnp.finfo(dtype).eps) / 2
    share = 2.0**-8 + (8 * u if dtype.itemsize == 2 else 0)
    noise = 16 * (u if dtype.itemsize == 8 else 2.0**-24)
    bounds = 0.0
    for row in range(len(sizes)):
        kappa, layers, widest = below(plan, children[row // code.parts])
        sums = layers * (widest + 3)
        if dtype.itemsize == 2:
            carried = (1 + layers) * u + sums * 2.0**-24
        else:
            carried = (1 + sums) * u
        bounds = bounds + np.abs(code.parity_checks[:, row]) * sizes[row] * kappa * (
            share + carried + noise
        )
    # a part that no other rank can replace is not compared
    mine = np.abs(code.parity_checks[:, children.index(liar) * code.parts + part])
    with np.errstate(over="ignore"):
        return bool((mine * call.effect(plan, liar) > 2.02 * bounds * scale).any())


# Honest rounds.


@many
@given(seeds)
def test_honest_rounds_pass(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    kind = rng.choice(["allreduce", "allreduce", "reduce", "broadcast"])
    script = sound_script(plan, rng, rng.randint(1, 4), kind=kind)
    world = random_world(
        plan,
        0,
        rng,
        script=script,
        check=Check(rng.choice(POLICIES), wait=rng.random() < 0.5),
        **rng.choice([{}, {"twice": 0.2}, {"again": 0.1}]),
    )
    run(world, rng.choice([0, 200, 1000]))
    world.assert_done()
    assert not accusations(world)


@many
@given(seeds)
def test_no_rank_waits_for_late_ones(seed):
    """With ``wait=True`` nodes wait only until the deadline."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    waits = rng.random() < 0.5
    world = random_world(
        plan,
        0,
        rng,
        script=sound_script(plan, rng, 2),
        check=Check(wait=waits),
        limits={"deadline_seconds": 5.0},
    )
    late = tolerated(plan, rng)
    world.frozen |= late
    others = [
        rank
        for rank in range(plan.size)
        if not late.intersection([rank, *world.ancestors[rank]])
    ]
    world.settle()
    world.assert_done(others)
    world.frozen.clear()
    world.settle()
    world.assert_done()


def accusations(world):
    """Return the nodes' log messages about wrong messages."""
    texts = [text for news in world.news for text in news]
    return [text for text in texts if not text.startswith("no call of rank ")]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("below", ["leaves", "parents"])
def test_no_result_is_taken_for_a_message(below, policy):
    """A parent is stopped before it has read its children's messages. When it
    continues, some pieces of the result have replaced their vectors. Other parents have
    such pieces before they have formed their message.
    """
    plan = make_plan(13 if below == "leaves" else 40, Coded(fanout=3))
    parent = plan.tree.children[plan.root][0]
    children = plan.tree.children[parent]
    world = World(
        plan,
        [Call((("float32", 64),), number) for number in range(3)],
        random.Random(1),
        hosts=[int(rank in (parent, *children)) for rank in range(plan.size)],
        in_place=1.0,
        check=Check(policy),
        limits={"piece_bytes": 8, "announced_bytes": 32},
    )
    some = collections.Counter()

    def turn(may_have):
        """Let all ranks except the parent run; the children fetch no more pieces than ``may_have``."""
        for rank in set(range(plan.size)) - {parent}:
            for link in [link for link in world.queues if link[1] == rank]:
                while world.queues[link]:
                    world.deliver(link)
            world.advance(rank)
        for request in list(world.requests):
            asker, source, what, *_ = request
            asked = asker, what
            if parent in (asker, source) or (
                asker in children and some[asked] >= may_have[what]
            ):
                continue
            some[asked] += 1
            world.requests.remove(request)
            world.answer(request)
            world.arrive(world.answers.pop())
        world.clock += world.limits.orphan_seconds

    world.open = 1
    for rank in range(plan.size):
        world.submit(rank)
    while min(some[child, RESULT] for child in children) < 8:
        turn({RESULT: 8, MESSAGE: 0})
        assert world.clock < 1000
    for _ in range(100):
        turn({RESULT: 8, MESSAGE: 1000})
    assert all(world.running[child] for child in children)
    for child in children:  # the parent reads its mailbox, but nothing from above yet
        while world.queues[child, parent]:
            world.deliver((child, parent))
    while world.advance(parent):
        pass
    world.open = 3
    world.settle()
    world.assert_done()
    assert not accusations(world)


@many
@given(seeds)
def test_honest_ranks_are_never_accused(seed):
    """Ranks stop between any two pieces, while results replace their messages."""
    rng = random.Random(seed)
    plan = random_plan(rng, 3, stragglers=(1, 2))
    policy = rng.choice([None, *POLICIES])
    world = random_world(
        plan,
        0,
        rng,
        script=sound_script(plan, rng, rng.randint(1, 4)),
        check=Check(policy, wait=rng.random() < 0.3) if policy else DEBUG,
        limits={"deadline_seconds": 0.2},
    )
    world.in_place = rng.choice([0.5, 1, 1])
    parents = [r for r in range(plan.size) if plan.coded_children(r) and r != plan.root]
    while world.nodes[plan.root].next_round() <= len(world.script):
        for _ in range(rng.choice([0, 50, 200])):
            world.step()
        stop_between_pieces(world, rng.choice(parents or [plan.root]))
    world.settle()
    world.assert_done()
    assert not accusations(world)


def stop_between_pieces(world, parent):
    """Stop a rank, usually until other ranks have decided a round, and continue it
    before they do.
    """
    rng, root = world.rng, world.nodes[world.plan.root]
    world.frozen, before = {parent}, root.next_round()
    for _ in range(2000):
        world.step()
        world.clock += rng.choice([0, 0, world.limits.orphan_seconds / 10])
        if root.next_round() > before and rng.random() < 0.005:
            break
    world.frozen = set(range(world.plan.size)) - {parent}
    for _ in range(rng.choice([0, 30, 100])):
        world.step()
    world.frozen = set()


class Cancelling(Call):
    """Gradients that cancel in most sums. Every rank adds them in the dtype, in a
    different order. The first number counts the examples.
    """

    words = "gradients that cancel"
    fingerprint = 88

    @functools.cached_property
    def gradients(self):
        rng = np.random.default_rng(self.seed)
        out = []
        for dtype, count in self.segments:
            common = rng.standard_normal(count)
            signs = rng.permutation(np.arange(EXAMPLES) % 2 * 2 - 1)[:, None]
            rest = 10.0 ** rng.uniform(-7, 0) * rng.standard_normal((EXAMPLES, count))
            gradients = signs * common + rest
            gradients[:, 0] = 1
            out.append(gradients.astype(jnp.dtype(dtype)))
        return out

    def own(self, plan, rank):
        indices, coefficients = held(plan, rank)
        slices, order = plan.slices_above[rank], np.arange(len(indices))
        np.random.default_rng([self.seed, rank]).shuffle(order)
        out = []
        for part in range(plan.parts_above[rank]):
            for g in self.gradients:
                # only messages have 16 bits: ranks add in 32 bits
                total = np.zeros(g.shape[1] // slices, np.float32)
                for example in order:
                    pieces = g[indices[example]].astype(np.float32)
                    for c, piece in zip(
                        coefficients[example, part], pieces.reshape(slices, -1)
                    ):
                        total += np.float32(c) * piece
                out.append(total.astype(g.dtype))
        return out


def honest(code, dtype, rounds, seed):
    slices = 2 if code == "gaussian_mds" else 1
    plan = make_plan(7, Coded(fanout=6, stragglers=2, code=code, slices=slices))
    count = 16 * plan.padding_multiple
    script = [
        Cancelling(((dtype, count),), seed * rounds + r, apart=((0, 0, 1, 1),))
        for r in range(rounds)
    ]
    world = World(
        plan,
        script,
        random.Random(seed),
        inline=(1 << 20,),
        check=Check(wait=True),
    )
    world.settle()
    for r in range(rounds):
        assert world.ends[0][r + 1].outcome == DONE, world.ends[0][r + 1].error
    assert not any(world.news)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("code", ["fractional_repetition", "cyclic_repetition"])
@pytest.mark.parametrize("times", [1, more(50)])
def test_honest_gradients_that_cancel_pass(code, dtype, times):
    """The exhaustive run plays 10,000 rounds in all."""
    for seed in range(times):
        honest(code, dtype, 100, seed)


# Liars.

CODES = [
    # code, children, stragglers, slices; whether the check finds the exact child
    ("fractional_repetition", 4, 1, 1, False),
    ("fractional_repetition", 6, 2, 1, True),
    ("cyclic_repetition", 3, 1, 1, False),
    ("cyclic_repetition", 5, 2, 1, True),
    ("gaussian_mds", 8, 2, 2, True),
    ("polynomial", 7, 2, 2, True),
]


def named(text):
    """Return the ranks that a text calls wrong."""
    words = text.partition("what rank")[2].partition(" sent to rank ")[0]
    return {int(word) for word in words.replace(",", " ").split() if word.isdigit()}


def judge(world, policy, round, liar, *, found, one):
    """Check that a round with a wrong message has ended as it should."""
    ends = [ends[round] for ends in world.ends]
    at = f"round {round}, "
    texts = [text for news in world.news for text in news if at in text]
    if policy != "raise" and ends[0].outcome == DONE:
        assert not found or any(liar in named(text) for text in texts), texts
        without = ["; the sum does without it. So do later" in text for text in texts]
        assert all(without) if policy == "drop" else not any(without)
        return
    assert all(end == ends[0] for end in ends), ends
    if found:
        assert ends[0].outcome == FAILED
    if ends[0].outcome == FAILED:
        text = ends[0].error
        assert text.startswith(f"InconsistentMessages: round {round}, "), text
        # an error that is too small for the rank's parent to detect may show further up
        suspects = {liar} if found else {liar, *world.ancestors[liar]}
        assert suspects & named(text), text
        assert len(named(text)) == 1 or not one, text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("code", "children", "stragglers", "slices", "one"), CODES)
def test_a_flipped_bit_is_found(code, children, stragglers, slices, one, policy, dtype):
    """Any rank may send the wrong message, and any bit of the exponent may be flipped."""
    options = {"fanout": children, "stragglers": stragglers}
    plan = make_plan(children + 1, Coded(code=code, slices=slices, **options))
    rng = random.Random(f"{code} {policy} {dtype}")
    count = 8 * plan.padding_multiple
    segments, length = ((dtype, count),), count // slices
    script, seen = [], 0
    for liar in range(1, children + 1):
        for bit in range(FORMAT[dtype][1]):
            script.append(Call(segments, rng.randrange(2**32)))
            flips = ((liar, 0, rng.randrange(length), bit),)
            script.append(
                Lie(segments, rng.randrange(2**32), flips=flips, policy=policy)
            )
    check = Check(policy, wait=True)
    world = random_world(plan, 0, rng, script=script, check=check)
    world.settle()
    for round, call in enumerate(script, 1):
        if isinstance(call, Lie):
            (((liar, *_),), found) = call.flips, call.shows(plan)
            seen += found
            huge = call.effect(plan, liar) > 1e6
            judge(world, policy, round, liar, found=found, one=one and huge)
            if policy == "drop" and one and huge:
                assert world.ends[0][round].outcome == DONE
        else:
            assert all(ends[round].outcome == DONE for ends in world.ends)
    assert seen >= len(script) // 8  # most of these flips make a number larger


@dataclasses.dataclass(frozen=True)
class Lie(Flipped):
    """A round with a wrong message, whose result depends on the parents' policy."""

    policy: str = "warn"

    def shows(self, plan):
        ((liar, *_),) = self.flips
        finite = np.isfinite(self.effect(plan, liar))
        return not finite or shows(plan, self, liar)

    def check(self, plan, rank, vectors):
        if self.policy == "drop" and self.shows(plan):
            super().check(plan, rank, vectors)

    def check_message(self, plan, rank, segment, first, actual):
        """Check messages only of honest ranks without dishonest ranks below them."""
        for liar in self.liars:
            while liar >= 0:
                if liar == rank:
                    return True
                liar = plan.parents[liar]
        honest = Call(self.segments, self.seed)
        return honest.check_message(plan, rank, segment, first, actual)

    @property
    def liars(self):
        return [liar for liar, *_ in self.flips]


@pytest.mark.slow
@many
@given(seeds)
def test_a_liar_anywhere_is_found(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    policy = rng.choice(POLICIES)
    sound = sound_script(plan, rng, 2)
    liar = rng.choice([rank for rank in range(plan.size) if rank != plan.root])
    kinds = sound[1].segments
    vector = rng.randrange(len(kinds))
    length = kinds[vector][1] // plan.slices_above[liar]
    bit = rng.randrange(FORMAT[kinds[vector][0]][1])
    flips = ((liar, vector, rng.randrange(length), bit),)
    lie = Lie(kinds, sound[1].seed, flips=flips, policy=policy)
    world = random_world(
        plan,
        0,
        rng,
        script=[sound[0], lie, sound[0]],
        check=Check(policy, wait=True),
    )
    run(world, rng.choice([0, 300]))
    judge(world, policy, 2, liar, found=lie.shows(plan), one=False)
    for round in (1, 3):
        assert all(ends[round].outcome == DONE for ends in world.ends)


@pytest.mark.parametrize("then", ["it comes", "the deadline", "it is dead"])
def test_a_parent_waits_for_a_slow_message(then):
    """The parent waits for the message until the deadline if the message's rank lives, even if other messages suffice."""
    plan = make_plan(3, Coded(stragglers=1))
    flips = ((1, 0, 3, 3),)
    lie = Lie((("float32", 8),), 1, flips=flips, policy="raise")
    assert lie.shows(plan)
    world = World(
        plan,
        [lie],
        random.Random(0),
        hosts=[0, 1, 2],
        limits={"deadline_seconds": 5.0},
        check=Check(wait=True),
    )
    world.submit(1)
    world.advance(1)  # rank 1's offer is on its way
    world.frozen = {1}
    world.sweep_all()
    world.clock += 1
    world.sweep_all()
    assert not world.ends[0]
    if then == "it comes":
        world.frozen = set()
        world.sweep_all()
        assert named(world.ends[0][1].error) == {1, 2}
        return
    if then == "the deadline":
        world.clock += 4
    else:
        world.nodes[0].lost(1)
    world.settle()
    assert world.ends[0][1].outcome == DONE


@dataclasses.dataclass(frozen=True)
class NotFinite(Lie):
    """A call in which a rank's vectors have an infinity or NaN."""

    liar: int = 0
    value: float = np.nan

    def own(self, plan, rank):
        vectors = super().own(plan, rank)
        if rank == self.liar:
            vectors[-1][len(vectors[-1]) // 2] = self.value
        return vectors

    def shows(self, plan):
        return True

    @property
    def liars(self):
        return [self.liar]


@pytest.mark.parametrize("nan", [False, True])
def test_a_repeatedly_wrong_rank_is_named_once(nan):
    """The log names the rank only once, until its messages match again."""
    plan = make_plan(6, Coded(fanout=5, stragglers=2, code="cyclic_repetition"))
    segments = (("float32", 8),)
    script = []
    for seed, liar in enumerate([2, 2, 2, 0, 2, 4, 2, 2]):
        call = Call(segments, seed)
        if liar and nan:
            call = NotFinite(segments, seed, policy="drop", liar=liar)
        elif liar:
            flips = ((liar, 0, 3, 7),)
            call = Lie(segments, seed, flips=flips, policy="drop")
        script.append(call)
    rng = random.Random(0)
    world = random_world(plan, 0, rng, script=script, check=Check("drop", wait=True))
    world.settle()
    world.assert_done()
    texts = [(text.partition(",")[0], named(text)) for text in world.news[0]]
    assert texts == [
        ("round 1", {2}),
        ("round 5", {2}),
        ("round 6", {4}),
        ("round 7", {2}),
    ]
    assert not any(world.news[1:])


@many
@given(seeds)
def test_nan_is_traced_to_its_rank(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    policy, liar = rng.choice(POLICIES), rng.randrange(plan.size)
    (sound,) = sound_script(plan, rng, 1)
    wrong = NotFinite(
        sound.segments,
        sound.seed,
        policy=policy,
        liar=liar,
        value=rng.choice([np.nan, np.inf, -np.inf]),
    )
    world = random_world(
        plan, 0, rng, script=[sound, wrong, sound], check=Check(policy, wait=True)
    )
    run(world, rng.choice([0, 300]))
    ends = [ends[2] for ends in world.ends]
    assert len({end.outcome for end in ends}) == 1
    if policy == "drop" and ends[0].outcome == DONE:
        texts = world.news[plan.parents[liar]]
        assert liar != plan.root
    elif policy == "warn":
        texts = world.news[plan.root]
        assert ends[0].outcome == DONE
    else:
        texts = list({end.error for end in ends})
        assert ends[0].outcome == FAILED
    (text,) = texts
    sent = f"what rank {liar} has sent to rank {plan.parents[liar]} has NaN or inf"
    itself = f"what rank {liar} adds itself has NaN or infinities"
    assert itself in text or (sent in text and liar != plan.root), text
    for round in (1, 3):
        assert all(ends[round].outcome == DONE for ends in world.ends)


class Shaken(World):
    """A call in which a piece of a rank's first message changes on its way."""

    liar, flipped = 2, False

    def fetch(self, request, address, size):
        data = super().fetch(request, address, size)
        if self.flipped or not data or (request[1], request[2]) != (self.liar, MESSAGE):
            return data
        self.flipped, numbers = True, np.frombuffer(data, np.float32).copy()
        flip(numbers, 0, 0)
        return numbers.tobytes()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_piece_changed_on_its_way_is_fetched_again(policy):
    plan = make_plan(4, Coded(fanout=3, stragglers=1, code="cyclic_repetition"))
    call = Call((("float32", 9),), 1)
    check = Check(policy, wait=True)
    world = Shaken(plan, [call], random.Random(0), check=check)
    world.settle()
    assert world.flipped
    world.assert_done()
    (text,) = world.news[0]
    assert "messages that did not fit together did so when rank 0 fetched them" in text
