"""Nodes compare messages: sums stay the same in any order of events, and a mismatch is
detected before any rank gets the sum.
"""

import dataclasses
import functools
import random

import numpy as np
import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import DONE, FAILED, PENDING, Call, World, random_plan, random_world

from jaxcoded import DEBUG, Check, Coded, make_plan


@dataclasses.dataclass(frozen=True)
class Wrong(Call):
    """A sum to which some ranks contribute wrong values."""

    culprits: tuple[int, ...] = ()

    def own(self, plan, rank):
        vectors = super().own(plan, rank)
        if rank in self.culprits:
            rng = np.random.default_rng([self.seed, rank])
            wide = [v.astype(np.float64) for v in vectors]
            vectors = [
                (w + np.abs(w).max() * rng.standard_normal(len(w))).astype(v.dtype)
                for v, w in zip(vectors, wide)
            ]
        return vectors


def run(world, steps):
    for _ in range(steps):
        world.step()
    world.settle()


def sound_script(plan, rng, rounds, **more):
    """Return calls with vectors so long that no check sees only rounding."""
    multiple = plan.padding_multiple
    kinds = ["float16", "bfloat16", "float32", "float64"]
    if plan.amplification > 10:
        kinds = kinds[2:]
    return [
        Call(
            tuple(
                (kind, 8 * multiple)
                for kind in rng.sample(kinds, rng.choice([1, 1, 2]))
            ),
            rng.randrange(2**32),
            **more,
        )
        for _ in range(rounds)
    ]


@pytest.mark.slow
@many
@given(seeds)
def test_no_rank_is_left_behind(seed):
    """Sums wait for all ranks, even if the code tolerates missing ranks."""
    rng = random.Random(seed)
    plan = random_plan(rng, 2)
    world = random_world(plan, 0, rng, script=sound_script(plan, rng, 1), check=DEBUG)
    late = rng.choice([rank for rank in range(plan.size) if rank != plan.root])
    world.frozen.add(late)
    run(world, rng.choice([0, 300]))
    assert not any(world.ends)
    assert str(late) in world.nodes[plan.parents[late]].waiting_for()
    world.frozen.clear()
    world.settle()
    world.assert_done()


@many
@given(seeds)
def test_ranks_without_a_contribution_are_left_out(seed):
    rng = random.Random(seed)
    plan = make_plan(rng.choice([7, 13]), Coded(fanout=3, stragglers=1))
    world = random_world(plan, 0, rng, script=sound_script(plan, rng, 2), check=DEBUG)
    world.skips = {(rng.choice(plan.coded_children(plan.root)), 1)}
    run(world, rng.choice([0, 500]))
    world.assert_done()


def test_a_parent_that_lacks_too_many_is_left_out():
    """Rank 1 has a single child, which is erased or has nothing to contribute."""
    plan = make_plan(5, Coded(parents=[-1, 0, 0, 0, 1]))
    for erased, skips in [({4}, set()), (set(), {(4, 1)})]:
        call = Call((("float32", 9),), 1, erased=frozenset(erased))
        world = random_world(plan, 0, random.Random(5), script=[call], check=DEBUG)
        world.skips = skips
        world.settle()
        world.assert_done()


CODES = [
    # code, children, stragglers; whether the check finds the exact child
    ("fractional_repetition", 4, 1, False),
    ("fractional_repetition", 6, 2, True),
    ("cyclic_repetition", 3, 1, False),
    ("cyclic_repetition", 5, 2, True),
    ("random_generator", 6, 2, True),
    ("polynomial", 6, 2, True),
    ("expander(degree=3)", 6, 2, False),
    ("adaptive", 4, 2, True),
    ("progressive", 4, 2, True),
]


@pytest.mark.parametrize(("code", "children", "stragglers", "found"), CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_message_is_found(code, children, stragglers, found, dtype):
    if dtype == "bfloat16" and code == "adaptive":
        return  # this code's amplification leaves no digits
    slices = 2 if code == "polynomial" else 1
    plan = make_plan(
        children + 1,
        Coded(fanout=children, stragglers=stragglers, code=code, slices=slices),
    )
    for culprit in range(1, children + 1):
        rng = random.Random(culprit)
        segments = ((dtype, 24 * plan.padding_multiple),)
        wrong = Wrong(segments, 5, culprits=(culprit,))
        script = [Call(segments, 4), wrong, Call(segments, 6)]
        world = random_world(plan, 0, rng, script=script, check=DEBUG)
        run(world, 300)
        for rank in range(plan.size):
            ends = world.ends[rank]
            assert [ends[r].outcome for r in (1, 2, 3)] == [1, FAILED, 1], ends
            text = ends[2].error
            assert text == world.ends[0][2].error
            assert text.startswith("InconsistentMessages: round 2, ")
            named = text.partition("what rank")[2].partition(" sent to rank 0")[0]
            if found:
                assert named == f" {culprit} has", text
            else:
                assert str(culprit) in named and named.startswith("s "), text


@dataclasses.dataclass(frozen=True)
class NotFinite(Call):
    """A sum to which rank 3 contributes NaN."""

    def own(self, plan, rank):
        vectors = super().own(plan, rank)
        return [v * np.nan for v in vectors] if rank == 3 else vectors


def test_a_later_offer_is_not_read_as_the_message_of_this_round():
    """Rank 1 is stopped while it fetches the message of rank 3. When it continues, rank 3 offers its message of the
    next round, within the offer.
    """
    plan = make_plan(4, Coded(parents=[-1, 0, 0, 1], stragglers=1, root_computes=False))
    script = [
        Call((("float64", 12),), 1),
        NotFinite((("float64", 8),), 2),
        Call((("float64", 12),), 3),
    ]
    world = World(
        plan,
        script,
        random.Random(0),
        hosts=list(range(4)),
        inline=(64,),
        limits={"piece_bytes": 16, "announced_bytes": 16},
        check=Check("raise"),
    )
    world.open = 1
    for rank in (3, 1):
        world.submit(rank)
        world.advance(rank)
    while world.queues[3, 1]:
        world.deliver((3, 1))
    world.advance(1)
    assert any((to, source) == (1, 3) for to, source, *_ in world.requests)
    world.frozen = {1}
    asked = [request for request in world.requests if request[0] == 1]
    world.requests = [each for each in world.requests if each not in asked]
    world.settle()
    world.assert_done({0, 2, 3})
    world.frozen = set()
    world.requests += asked
    world.open = 2
    world.submit(3)
    for _ in range(3):
        for link in ((3, 1), (1, 3)):
            while world.queues[link]:
                world.deliver(link)
        for rank in [3] + 10 * [1]:  # rank 1 reads a piece in each turn
            world.advance(rank)
    world.open = 3
    world.settle()
    for ends in world.ends:
        assert ends[1].outcome == ends[3].outcome == DONE, ends
        assert "round 1" not in ends[2].error


@dataclasses.dataclass(frozen=True)
class Scaled(Wrong):
    """A sum of very large or very small numbers."""

    scale: float = 1.0

    @functools.cached_property
    def gradients(self):
        return [
            (self.scale * g).astype(g.dtype)
            for g in Call(self.segments, self.seed).gradients
        ]

    def check(self, plan, rank, vectors):
        pass  # bounds of rounding are relative


@pytest.mark.parametrize("culprits, outcome", [((), DONE), ((4,), FAILED)])
@pytest.mark.parametrize(
    ("dtype", "tiny", "small"), [("float16", 1e-6, 3e-4), ("float32", 1e-44, 1e-35)]
)
@pytest.mark.parametrize(
    "plan",
    [
        make_plan(6, Coded(stragglers=2, code="cyclic_repetition")),
        make_plan(7, Coded(fanout=6, stragglers=2, code="random_generator")),
        make_plan(21, Coded(fanout=4, stragglers=2, code="random_generator")),
    ],
)
def test_tiny_numbers_have_few_digits(plan, dtype, tiny, small, culprits, outcome):
    """Rounding of tiny numbers is no mistake. A mistake in small numbers is found."""
    segments = ((dtype, 50 * plan.padding_multiple),)
    for seed in range(10):
        scale = small if culprits else tiny
        call = Scaled(segments, seed, culprits=culprits, scale=scale)
        world = World(plan, [call], random.Random(seed), check=DEBUG)
        world.settle()
        assert [ends[1].outcome for ends in world.ends] == [outcome] * plan.size, (
            seed,
            world.ends[0][1].error,
        )


@pytest.mark.parametrize("code", ["fractional_repetition", "cyclic_repetition"])
def test_numbers_with_infinite_squares_are_compared(code):
    plan = make_plan(5, Coded(stragglers=1, code=code))
    segments = (("float64", 12 * plan.padding_multiple),)
    for culprits in ((), (2,)):
        call = Scaled(segments, 5, culprits=culprits, scale=1e200)
        world = World(plan, [call], random.Random(1), check=DEBUG)
        world.settle()
        for ends in world.ends:
            assert ends[1].outcome == (FAILED if culprits else DONE), ends
            assert "InconsistentMessages" in ends[1].error or not culprits


@dataclasses.dataclass(frozen=True)
class Small(Call):
    """A sum of numbers much smaller than the first one, some of them wrong on some
    ranks.
    """

    size: float = 1e-6
    culprits: tuple[int, ...] = ()
    noise: float = 0.0

    def own(self, plan, rank):
        small = [np.arange(count) > 0 for _, count in self.segments]
        gradients = [
            np.where(mask, self.size * g, np.abs(g)).astype(g.dtype)
            for g, mask in zip(self.gradients, small)
        ]
        call = Call(self.segments, self.seed)
        call.__dict__["gradients"] = gradients
        vectors = call.own(plan, rank)
        rng = np.random.default_rng([self.seed, rank])
        wrong = 1.19 if rank in self.culprits else 1.0
        for i, v in enumerate(vectors):
            noise = self.noise * rng.standard_normal(len(v))
            noise[0] = 0
            scale = np.where(np.arange(len(v)) > 0, wrong, 1.0)
            vectors[i] = (scale * v + noise).astype(v.dtype)
        return vectors

    def check(self, plan, rank, vectors):
        pass


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("code", "children", "stragglers", "found"), CODES)
def test_small_numbers_are_compared(code, children, stragglers, found, kind):
    slices = 2 if code == "polynomial" else 1
    plan = make_plan(
        children + 1,
        Coded(fanout=children, stragglers=stragglers, code=code, slices=slices),
    )
    segments = (("float32", 24 * plan.padding_multiple),)
    for apart, outcome in [(((0, 0, 1, kind),), FAILED), ((), 1)]:
        wrong = Small(segments, 5, size=1e-3, culprits=(2,), apart=apart)
        world = random_world(plan, 0, random.Random(4), script=[wrong], check=DEBUG)
        run(world, 300)
        assert [ends[1].outcome for ends in world.ends] == [outcome] * plan.size


@pytest.mark.parametrize("code", ["fractional_repetition", "cyclic_repetition"])
def test_rounding_alone_is_no_mistake(code):
    """Rounding passes the check, whether the check compares it with the numbers of this
    message or of an earlier round."""
    plan = make_plan(
        6, Coded(fanout=5, stragglers=2 if "cyclic" in code else 4, code=code)
    )
    segments, apart = (("float32", 40),), ((0, 0, 1, 1),)
    script = [Small(segments, 5, size=1e-9, noise=5e-8, apart=apart)]
    world = random_world(plan, 0, random.Random(4), script=script, check=DEBUG)
    run(world, 300)
    assert [ends[1].outcome for ends in world.ends] == [1] * plan.size

    class OneCall(Call):
        words = "a loss"
        fingerprint = 77

        def own(self, plan, rank):
            rng = np.random.default_rng(rank)
            own = super().own(plan, rank)
            return [
                (v + 1e-7 * rng.standard_normal(len(v))).astype(v.dtype) for v in own
            ]

        @functools.cached_property
        def gradients(self):
            return [np.float32(10.0**-self.seed) * g for g in Call.gradients.func(self)]

        def check(self, plan, rank, vectors):
            pass

    for both, outcome in [((0, 9), 1), ((9, 9), FAILED)]:
        script = [OneCall(segments, seed) for seed in both]
        world = random_world(plan, 0, random.Random(4), script=script, check=DEBUG)
        run(world, 300)
        assert world.ends[0][2].outcome == outcome


@dataclasses.dataclass(frozen=True)
class Vanishing(Wrong):
    """Gradients that cancel over the whole batch: differences of given numbers."""

    @functools.cached_property
    def gradients(self):
        narrow, wide = Call.gradients.func(self)
        narrow[-1] = -narrow[:-1].sum(0)
        return [narrow, np.full_like(wide, 8)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("culprits, outcome", [((), 1), ((3,), FAILED)])
def test_messages_of_16_bits_that_cancel(dtype, culprits, outcome):
    """Each child of the root has the whole batch, and its children have parts of it.
    After the parts have cancelled, only their rounding is left.
    """
    plan = make_plan(5, Coded(fanout=2, stragglers=1, code="fractional_repetition"))
    for seed in range(5):
        call = Vanishing(((dtype, 40), ("float32", 1)), seed, culprits=culprits)
        world = random_world(plan, 0, random.Random(seed), script=[call], check=DEBUG)
        run(world, 300)
        assert [ends[1].outcome for ends in world.ends] == [outcome] * plan.size


@pytest.mark.slow
@many
@given(seeds)
def test_a_count_that_is_not_that_of_the_examples(seed):
    """No rank gets a result of that round, with or without the comparison."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    segments = (("float64", 4 * plan.padding_multiple), ("float32", 30))
    segments = (
        segments[: rng.choice([1, 2])] if plan.padding_multiple == 1 else segments[:1]
    )
    number = 0.0
    while number < 1:
        call = Call(segments, rng.randrange(2**32))
        number = float(call.sums[0][0][0])
    right = dataclasses.replace(call, examples=(number, 1e-3))
    wrong = dataclasses.replace(call, examples=(number + 1e3, 1e-3))
    check = DEBUG if rng.random() < 0.5 and plan.checked else None
    world = random_world(plan, 0, rng, script=[right, wrong, right], check=check)
    run(world, rng.choice([0, 500]))
    for ends in world.ends:
        assert [ends[r].outcome for r in (1, 2, 3)] == [1, FAILED, 1], ends
        assert ends[2].error == world.ends[0][2].error
    text = world.ends[0][2].error
    assert text.startswith("InconsistentMessages: round 2, allreduce ")
    assert (
        f" examples were counted, not {number + 1e3:.9g}. Some rank's parameters are"
        in text
    )


def test_the_parent_of_the_wrong_message_is_named():
    plan = make_plan(13, Coded(fanout=3, stragglers=1))
    leaf = 8
    segments = (("float32", 40),)
    for seed in range(10):
        world = random_world(
            plan,
            0,
            random.Random(seed),
            script=[Wrong(segments, 1, culprits=(leaf,))],
            check=DEBUG,
        )
        run(world, 500)
        texts = {world.ends[rank][1].error for rank in range(13)}
        assert len(texts) == 1
        assert f"sent to rank {plan.parents[leaf]} " in texts.pop()


def test_several_wrong_messages():
    plan = make_plan(8, Coded(fanout=7, stragglers=3, code="cyclic_repetition"))
    wrong = Wrong((("float64", 30),), 1, culprits=(2, 5))
    world = random_world(plan, 0, random.Random(1), script=[wrong], check=DEBUG)
    world.settle()
    text = world.ends[0][1].error
    assert "several of them are wrong" in text


def test_nan_is_named():
    @dataclasses.dataclass(frozen=True)
    class Nan(Call):
        def own(self, plan, rank):
            vectors = super().own(plan, rank)
            if rank == 3:
                vectors[0][5] = np.nan
            return vectors

        def check_message(self, plan, rank, *what):
            return rank == 3 or super().check_message(plan, rank, *what)

    plan = make_plan(5, Coded(fanout=4, stragglers=1))
    world = random_world(
        plan, 0, random.Random(2), script=[Nan((("float32", 9),), 1)], check=DEBUG
    )
    world.settle()
    assert "what rank 3 has sent to rank 0 has NaN" in world.ends[4][1].error


def test_without_comparison_a_wrong_message_is_not_detected():
    """The messages of all children are wrong, and so is the sum."""
    plan = make_plan(5, Coded(fanout=4, stragglers=1))
    children = plan.coded_children(plan.root)
    wrong = Wrong((("float32", 9),), 1, culprits=children)
    world = random_world(plan, 0, random.Random(6), script=[wrong])
    with pytest.raises(AssertionError, match=r"\(0, 1\), \('float32'"):
        world.settle()


def test_no_parent_waits_for_a_closed_child():
    """A child that has closed the group will not call again, and the other ranks get an error."""
    plan = make_plan(5, Coded(fanout=4, stragglers=1))
    segments = (("float32", 9),)
    world = random_world(
        plan,
        0,
        random.Random(3),
        script=[Call(segments, 1), Call(segments, 2)],
        check=DEBUG,
    )
    world.open = 1
    world.settle()
    world.leave(2)
    world.open = 2
    world.settle()
    for rank in (0, 1, 3, 4):
        assert "rank 2 closed the group" in world.ends[rank][2].error
    assert PENDING not in [end.outcome for ends in world.ends for end in ends.values()]
