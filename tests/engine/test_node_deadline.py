"""More children are missing than a sum tolerates: what happens at the deadline."""

import dataclasses
import functools
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DONE,
    FAILED,
    Call,
    World,
    Zeros,
    _engine,
    random_plan,
    random_script,
    random_world,
    tolerated,
)

from jaxcoded import DEBUG, Check, Coded, make_plan
from jaxcoded.plan import atoms

ROUNDS = 6
SECONDS = 5.0
MOST_WAYS = 4096  # most ways to form a sum that are tried


@dataclasses.dataclass(frozen=True)
class Probed(Call):
    """A sum over the atoms of a plan, whose last segment, a probe, holds its
    coefficients.
    """

    plan: object = None

    @functools.cached_property
    def gradients(self):
        rng = np.random.default_rng(self.seed)
        count = len(atoms.sizes(self.plan))
        return [
            rng.standard_normal((count, length)) for _, length in self.segments[:-1]
        ]

    def own(self, plan, rank):
        coefficients = atoms.coefficients(plan, rank)
        probe = atoms.probe(plan, rank).reshape(coefficients.shape[1], -1)
        out = []
        for part in range(coefficients.shape[1]):
            for g in self.gradients:
                pieces = g.reshape(len(g), coefficients.shape[2], -1)
                out.append(np.einsum("cu,cuq->q", coefficients[:, part], pieces))
            out.append(probe[part].copy())
        return out

    def coefficients(self, probe):
        """Return the coefficients of each atom ``(slices of the result, slices of the
        gradient, atoms)``.
        """
        fine = self.plan.padding_multiple
        return probe.reshape(fine, -1, fine).transpose(0, 2, 1)

    def check(self, plan, rank, vectors):
        found = self.coefficients(vectors[-1])
        exact = np.eye(len(found))[:, :, None] + np.zeros(found.shape)
        for vector, g in zip(vectors[:-1], self.gradients):
            pieces = g.reshape(len(g), len(found), -1)
            formed = np.einsum("uvc,cvq->uq", found, pieces).reshape(-1)
            sums = np.einsum("uvc,cvq->uq", exact, pieces).reshape(-1)
            # a sum decided before the deadline is exact
            right = np.minimum(np.abs(vector - formed), np.abs(vector - sums))
            if right.max(initial=0) >= 1e-6 * plan.amplification:
                return self.check_deep(plan, vectors)
        return None

    def check_deep(self, plan, vectors):
        """Check numbers that an inner parent announced before its deadline, also in the
        probe. The numbers may include more children than the parent had at the end. Then these children sufficed for an
        exact sum of their messages.
        """
        families = map(plan.coded_children, plan.coded_children(plan.root))
        assert any(families), "numbers match neither the probe nor the exact sum"
        if _count(plan, plan.root) > MOST_WAYS:
            return
        found, allowed = np.concatenate(vectors), 1e-6 * plan.amplification
        ways = [
            (heard, np.concatenate(sums))
            for heard, sums in _ways(self, plan, plan.root, 0)
        ]
        for in_the_end, sums in ways:
            if abs(sums[-1] - found[-1]) > allowed:
                continue
            before = [
                sums
                for heard, sums in ways
                if all(
                    messages == in_the_end.get(at, messages)
                    or plan.codings[at[0]].code.sufficient(np.array(messages))
                    for at, messages in heard.items()
                )
            ]
            if np.abs(before - found).min(axis=0).max() < allowed:
                return
        raise AssertionError("no set of messages gives these numbers")

    def check_message(self, plan, rank, segment, first, actual):
        """Check the message of a leaf. A parent's sum may hold only some children, as
        the result shows.
        """
        inner = plan.coded_children(rank)
        return inner or super().check_message(plan, rank, segment, first, actual)


def _count(plan, rank):
    """Return the number of `_ways`."""
    children = plan.coded_children(rank)
    parts = plan.codings[rank].code.parts if children else 0
    return math.prod(
        sum(_count(plan, child) ** came for came in range(parts + 1))
        for child in children
    )


@functools.lru_cache(maxsize=64)  # all ranks ask for the ways of a round
def _ways(call, plan, rank, part):
    """Return the possible values of a part of a rank's message, or of the root's sum.
    They follow from the messages used, by parent and part, and the vectors.
    """
    count = len(call.segments)
    own = call.own(plan, rank)[part * count :][:count]
    children = plan.coded_children(rank)
    if not children:
        return [({}, own)]
    code = plan.codings[rank].code
    theirs = [
        [_ways(call, plan, child, part * code.parts + i) for i in range(code.parts)]
        for child in children
    ]
    out = []
    for came in itertools.product(range(code.parts + 1), repeat=len(children)):
        heard = np.arange(code.parts) < np.array(came)[:, None]
        A = code.decode(heard).coefficients[:, heard.reshape(-1)]
        rows = [each[i] for each, n in zip(theirs, came) for i in range(n)]
        for chosen in itertools.product(*rows):
            everywhere = {(rank, part): heard.tolist()}
            for below, _ in chosen:
                everywhere |= below
            sums = [
                vector + (A @ np.array([m[s] for _, m in chosen])).reshape(-1)
                if chosen
                else vector
                for s, vector in enumerate(own)
            ]
            out.append((everywhere, sums))
    return out


def probed_script(plan, rng):
    multiple = plan.padding_multiple
    probe = ("float64", len(atoms.deviation(plan)[0]))
    return [
        Probed(
            tuple(("float64", multiple * rng.randint(0, 9)) for _ in range(2))
            + (probe,),
            rng.randrange(2**32),
            plan=plan,
        )
        for _ in range(ROUNDS)
    ]


def limits(action, **more):
    return {
        "on_deadline": getattr(_engine.OnDeadline, action),
        "deadline_seconds": SECONDS,
    } | more


def stop_and_go(world, rng, rounds=ROUNDS):
    """Freeze random ranks but the root, until the root has all rounds. Return its
    rounds that ended while only tolerated ranks were frozen.
    """
    plan = world.plan
    others = [rank for rank in range(plan.size) if rank != plan.root]
    root = world.nodes[plan.root]
    world.open = 0
    healthy = set()
    while root.next_round() <= rounds:
        fine = rng.random() < 0.4
        world.frozen.clear()
        if fine:  # no rank is still late
            world.settle()
        world.open = before = root.next_round()
        world.frozen.update(
            tolerated(plan, rng)
            if fine
            else rng.sample(others, rng.randint(0, len(others)))
        )
        for _ in range(rng.randint(0, 100)):
            world.step()
        if not fine and rng.random() < 0.5:  # other ranks stop in the middle
            world.frozen = set(rng.sample(others, rng.randint(0, len(others))))
        world.settle()
        assert root.next_round() > before, world.describe(plan.root)
        if fine:
            healthy.add(before)
    world.frozen.clear()
    world.settle()
    return healthy


@many
@given(seeds)
def test_the_sum_uses_the_arrived_messages_and_the_residual_describes_it(seed):
    what_has_come(seed, 9)


@pytest.mark.parametrize("seed", [2372552955, 3938892192])
def test_an_inner_parent_announced_more_children_than_it_has_at_the_end(seed):
    """Numbers that the parent announced earlier are nearer to the exact sum than the residual says. In one
    of the two cases the probe, which gives the residual, has such numbers.
    """
    what_has_come(seed, 9)


def test_a_section_is_not_formed_again_from_messages_within_offers():
    """Such messages have no address, but an earlier engine read an address in this
    schedule."""
    what_has_come(3880313583, 3)


def what_has_come(seed, most):
    rng = random.Random(seed)
    plan = random_plan(rng, least=2, most=most)
    world = random_world(
        plan,
        ROUNDS,
        rng,
        script=probed_script(plan, rng),
        limits=limits("approximate", piece_bytes=rng.choice([64, 256, 4096])),
    )
    healthy = stop_and_go(world, rng)
    for ends in world.ends:
        assert all(end.outcome == DONE for end in ends.values()), ends
    for number in healthy:
        exact, _ = atoms.deviation(plan)
        probe = np.frombuffer(world.results[number], np.float64)[-len(exact) :]
        np.testing.assert_allclose(probe, exact, atol=1e-6 * plan.amplification)


@many
@given(seeds)
def test_the_same_error_on_all_ranks(seed):
    what_fails(seed)


def test_a_rank_that_hears_an_answer_does_not_fail_alone():
    """The root answers this rank, which asks it again in the same turn. In an earlier
    version the rank added up the time from question to question.
    """
    what_fails(1281514287)


def what_fails(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, least=2, most=9)
    script = random_script(plan, rng, ROUNDS)
    world = random_world(plan, ROUNDS, rng, script=script, limits=limits("raise"))
    healthy = stop_and_go(world, rng)
    for number in range(1, ROUNDS + 1):
        first = world.ends[plan.root][number]
        assert all(ends[number] == first for ends in world.ends)
        assert first.outcome == DONE or number not in healthy
        if first.outcome != DONE:
            assert first.outcome == FAILED
            start = f"DeadlineExceeded: round {number} was not decided within 5 s: rank {plan.root} waits for rank"
            assert first.error.startswith(start)


def test_the_error_names_ranks_further_down():
    plan = make_plan(7, Coded(fanout=2, stragglers=0))
    rng = random.Random(0)
    script = [Call((("float32", 4),), seed) for seed in range(1)]
    world = random_world(plan, 1, rng, script=script, limits=limits("raise"))
    late = plan.tree.children[plan.tree.children[plan.root][0]][0]
    world.frozen.add(late)
    world.settle()
    error = world.ends[plan.root][1].error
    above = plan.tree.parents[late]
    assert f"rank {plan.root} waits for rank {above}; it needs 2 of its 2" in error
    assert f"; rank {above} waits for rank {late}; it needs 2 of its 2" in error


@many
@given(seeds)
def test_a_root_that_does_not_call(seed):
    """The root's engine answers, but no round can be decided. The other ranks get an error, and so does the root when
    it calls at last.
    """
    rng = random.Random(seed)
    plan = random_plan(rng, least=2, most=9)
    script = random_script(plan, rng, ROUNDS)
    world = random_world(plan, ROUNDS, rng, script=script, limits=limits("raise"))
    stuck = rng.randint(1, ROUNDS)
    world.open = stuck - 1
    world.sweep_all()  # no time passes, so no deadline expires
    world.assert_done()
    world.idle.add(plan.root)
    world.open = ROUNDS
    world.settle()
    texts = {
        number: f"DeadlineExceeded: round {number} was not decided within 5 s: "
        f"rank {plan.root}, the root, has not called it"
        for number in range(stuck, ROUNDS + 1)
    }
    for rank, ends in enumerate(world.ends):
        if rank != plan.root:
            errors = {n: end.error for n, end in ends.items() if end.outcome == FAILED}
            assert errors == texts
    assert world.nodes[plan.root].lag() == len(texts)
    world.idle.clear()
    world.settle()
    assert all(world.ends[plan.root][number].error == texts[number] for number in texts)


def test_messages_for_a_root_that_does_not_call_are_kept():
    """No other rank can send the root more rounds than the rank's history holds."""
    world = World(
        make_plan(3, Coded(stragglers=0)),
        [Call((("float64", 4),), seed) for seed in range(6)],
        random.Random(0),
        limits=limits("raise", history_bytes=0, history_rounds=1, history_most=0),
    )
    world.idle.add(0)
    world.open = 5
    world.settle()
    world.idle.clear()
    world.open = 6
    world.settle()
    for ends in world.ends:
        assert [ends[n].outcome for n in range(1, 7)] == [FAILED] * 5 + [DONE]
        assert all("has not called it" in ends[n].error for n in range(1, 6))


@pytest.mark.parametrize("failure", ["", "ValueError: mine"])
@pytest.mark.parametrize("missed", [1, 2, 3, 5])
def test_a_root_that_leaves_after_rounds_that_it_never_called(missed, failure):
    """Those rounds are decided as errors; the next one fails on all ranks at once."""
    plan = make_plan(3, Coded(stragglers=0))
    script = [Call((("float64", 4),), seed) for seed in range(missed + 2)]
    world = World(plan, script, random.Random(0), limits=limits("raise"))
    world.open = 1
    world.settle()
    world.idle.add(plan.root)
    for number in range(2, 2 + missed):
        world.open = number
        while any(number not in world.ends[rank] for rank in (1, 2)):
            world.sweep_all()
            world.clock += 0.5
    world.open = missed + 2
    world.sweep_all()
    world.leave(plan.root, failure)
    begun = world.clock
    while any(missed + 2 not in world.ends[rank] for rank in (1, 2)):
        world.sweep_all()
        world.clock += 0.05
    assert world.clock - begun < 1
    how = f" failed: {failure}" if failure else " closed the group"
    kind = "CodedError: " if failure else "GroupMismatch: "
    for rank in (1, 2):
        error = world.ends[rank][missed + 2].error
        assert error.startswith(kind) and error.endswith(f", but rank 0{how}")


@pytest.mark.parametrize("action", ["raise", "wait", "approximate"])
def test_a_root_that_does_not_call_to_the_end(action):
    """The root passes the first of its vectors, and hangs."""
    plan = make_plan(4, Coded(stragglers=1))
    segments = ("float32", 4), ("float64", 4)
    script = [Call(segments, seed) for seed in range(3)]
    world = random_world(
        plan, 3, random.Random(0), script=script, limits=limits(action)
    )
    world.begins_with[plan.root, 2] = 1
    world.open = 1
    world.settle()
    world.open = 2
    world.submit(plan.root)
    world.idle.add(plan.root)
    for _ in range(2 * int(SECONDS)):  # waiting ranks continue to ask
        world.sweep_all()
        world.clock += 1
    for ends in world.ends:
        if action == "raise":
            assert ends[2].error == (
                "DeadlineExceeded: round 2 was not decided within 5 s: "
                f"rank {plan.root}, the root, has not called it to the end"
            )
        else:
            assert 2 not in ends
    world.idle.clear()
    world.open = 3
    world.settle()
    for ends in world.ends:
        assert ends[3].outcome == DONE
        assert ends[2].outcome == (FAILED if action == "raise" else DONE)


@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, 0, 0, 1, 1, 2, 2)])
@pytest.mark.parametrize("relative", [False, True])
def test_ranks_below_children_that_do_not_call_either(parents, relative):
    """The programs of the root and of all its children are away. The root learns of the ranks
    that wait from their questions alone.
    """
    plan = make_plan(len(parents), Coded(parents=parents, stragglers=0))
    deadline = limits("raise")
    if relative:
        deadline = limits("raise", deadline_seconds=0.0, deadline_rounds=3.0)
    script = [Call((("float64", 8),), 0)] * 9
    world = World(plan, script, random.Random(0), limits=deadline)
    for world.open in range(1, 9):
        world.idle = {0}
        world.sweep_all()
        world.clock += 1.0
        world.idle = set()
        world.settle()
    world.assert_done()
    world.idle = {rank for rank, parent in enumerate(parents) if parent in (-1, 0)}
    world.open, start = 9, world.clock
    waiting = {*range(plan.size)} - world.idle
    while any(9 not in world.ends[rank] for rank in waiting):
        assert world.clock < start + 4 * SECONDS
        world.sweep_all()
        world.clock += 0.25
    ends = {world.ends[rank][9] for rank in waiting}
    assert all("rank 0, the root, has not called it" in end.error for end in ends)
    world.idle = set()
    world.settle()
    assert {rank_ends[9].outcome for rank_ends in world.ends} == {FAILED}


@pytest.mark.parametrize("action", ["wait", "approximate"])
def test_ranks_wait_for_a_root_that_does_not_call(action):
    plan = make_plan(4, Coded(stragglers=1))
    script = [Call((("float32", 4),), seed) for seed in range(2)]
    world = random_world(
        plan, 2, random.Random(0), script=script, limits=limits(action)
    )
    world.idle.add(plan.root)
    world.settle()
    assert not any(world.ends)
    world.idle.clear()
    world.settle()
    world.assert_done()


def star(script):
    """Return a root that needs two of its three children, with a deadline of 3 times the median."""
    plan = make_plan(4, Coded(stragglers=1))
    assert plan.coded_children(0) == (1, 2, 3)
    world = random_world(
        plan,
        len(script),
        random.Random(0),
        script=script,
        limits=limits("raise", deadline_seconds=0.0, deadline_rounds=3.0),
    )
    world.open = 0
    return world


def one_round(world, late, seconds):
    """Play one more round. These ranks call it ``seconds`` later than the other ranks."""
    world.open += 1
    world.idle.update(late)
    world.sweep_all()
    world.clock += seconds
    world.sweep_all()
    world.idle.clear()
    world.sweep_all()
    return world.ends[world.plan.root][world.open]


@pytest.mark.parametrize(
    "deadline", [{"deadline_rounds": 3.0}, {"deadline_seconds": 5.0}]
)
def test_a_rank_that_skips_beside_an_approximation(deadline):
    """Two dead ranks leave their parent with an approximation, and the root's code does
    not tolerate the skipped message, too. No better message can come, so the root
    approximates even if there is no deadline yet.
    """
    plan = make_plan(7, Coded(parents=(-1, 0, 0, 0, 1, 1, 1), stragglers=1))
    world = World(
        plan,
        [Zeros((("float32", 48),), seed) for seed in range(3)],
        random.Random(0),
        limits={"on_deadline": _engine.OnDeadline.approximate} | deadline,
    )
    world.open = 1
    world.settle()
    for rank in (4, 5):
        world.kill(rank, known=True)
    world.skips.add((2, 2))
    for world.open in (2, 3):
        for _ in range(4):
            world.settle()
            world.clock += SECONDS
    for rank in (0, 1, 2, 3, 6):
        assert [world.ends[rank][n].outcome for n in (2, 3)] == [DONE] * 2


def test_a_multiple_is_of_the_same_call():
    """Short rounds between long rounds do not shorten the deadline of the long
    rounds."""
    gradient, scalar = Call((("float32", 8),), 1), Call((("float32", 1),), 2)
    told = Call((("float32", 1),), 3, kind="broadcast")
    step = [(gradient, 1.0), (scalar, 0.01), (scalar, 0.01), (told, 0.0), (told, 0.0)]
    script = [call for call, _ in step] * 8 + [gradient, scalar, gradient]
    world = star(script)
    for _, seconds in step * 8:
        assert one_round(world, [1, 2], seconds).outcome == DONE
    assert one_round(world, [1, 2], 2.9).outcome == DONE
    assert one_round(world, [1, 2], 0.04).outcome == FAILED
    assert "was not decided within 3 s" in one_round(world, [1, 2], 3.1).error


def test_the_first_rounds_of_a_call_have_no_multiple():
    quick, slow = Call((("float32", 8),), 1), Call((("float32", 9),), 2)
    world = star([quick] * 10 + [slow] * 6)
    for seconds in [0.01] * 10 + [100.0] + [1.0] * 5:
        assert one_round(world, [1, 2], seconds).outcome == DONE


def test_a_multiple_is_of_rounds_from_their_beginning():
    """The deadline counts from the beginning of a round, even if the parent usually
    comes last, after all messages.
    """
    world = star([Call((("float32", 8),), 1)] * 9)
    for _ in range(8):
        assert one_round(world, [0], 1.0).outcome == DONE
    assert one_round(world, [1, 2], 2.0).outcome == DONE


COMPARING = {
    "nothing": None,
    "what has come": Check("raise"),
    "until the deadline": Check("raise", wait=True),
    "all": DEBUG,
}


def stopped_before_they_are_fetched(code, action, check=None):
    """Return a world of four ranks, whose root has chosen the messages of ranks 1 and 2. Both stopped after their
    offers, before the root fetched anything."""
    plan = make_plan(4, Coded(stragglers=1, code=code))
    script = probed_script(plan, random.Random(0))[:1]
    world = World(
        plan,
        script,
        random.Random(0),
        hosts=[0, 1, 2, 3],
        limits=limits(action),
        check=check,
    )
    for rank in (1, 2):
        world.submit(rank)
        world.advance(rank)
    world.frozen = {1, 2}
    world.sweep_all()  # no time passes
    assert {source for _, source, *_ in world.requests} == {1, 2}
    return world


@pytest.mark.parametrize("compares", COMPARING)
@pytest.mark.parametrize("code", ["cyclic_repetition", "ignore_stragglers"])
def test_a_deadline_while_messages_are_fetched(code, compares):
    """Children that have stopped, and whose messages the root has chosen, do not keep it from failing
    the round."""
    if code == "ignore_stragglers" and compares != "nothing":
        pytest.skip("an approximate code compares nothing")
    world = stopped_before_they_are_fetched(code, "raise", COMPARING[compares])
    world.settle()
    text = "DeadlineExceeded: round 1 was not decided within 5 s: rank 0 waits for ranks 1, 2"
    assert world.ends[0][1].error.startswith(text)
    world.frozen = set()
    world.settle()
    assert all(ends[1] == world.ends[0][1] for ends in world.ends)


@pytest.mark.parametrize("compares", COMPARING)
def test_who_is_waited_for_while_messages_are_fetched(compares):
    """Without a deadline that ends the round, the log names the stopped children. The
    round ends once they continue.
    """
    world = stopped_before_they_are_fetched(
        "cyclic_repetition", "wait", COMPARING[compares]
    )
    world.settle()
    assert "rank 0 waits for ranks 1, 2" in world.nodes[0].waiting_for()
    world.frozen = set()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("dies", [False, True])
def test_an_approximation_while_messages_are_fetched(dies):
    """The approximate sum consists of the messages that have come, even if MPI reports that a chosen message will not
    come.
    """
    world = stopped_before_they_are_fetched("ignore_stragglers", "approximate")
    if dies:
        world.kill(1, known=True)
    world.settle()
    world.assert_done({0, 3})


@pytest.mark.parametrize("parents", [(-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 2)])
@pytest.mark.parametrize("relative", [False, True])
def test_a_dead_rank_is_not_waited_for_at_any_depth(parents, relative):
    """The parent of the dead rank has offered the best sum that it can have, so the
    round needs no deadline. A deadline relative to earlier rounds does not exist yet.
    """
    plan = make_plan(len(parents), Coded(parents=parents, stragglers=0))
    script = probed_script(plan, random.Random(0))
    more = {"deadline_seconds": 0.0, "deadline_rounds": 3.0} if relative else {}
    world = World(plan, script, random.Random(0), limits=limits("approximate", **more))
    world.open = 1
    world.settle()
    world.kill(plan.size - 1, known=True)
    before = world.clock
    world.open = ROUNDS
    for _ in range(20):
        world.sweep_all()
        world.clock += 0.01
    assert world.clock - before < SECONDS / 10
    for ends in world.ends[:-1]:
        assert [ends[n].outcome for n in range(2, ROUNDS + 1)] == [DONE] * (ROUNDS - 1)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_an_inner_rank_does_not_wait_for_a_rank_that_is_gone(dies, called):
    """A rank asks its parent for a result, and is gone. The root is stopped for longer than the deadline while no
    other rank has called: no rank fails the round.
    """
    plan = make_plan(4, Coded(parents=(-1, 0, 1, 1), stragglers=1))
    script = [Call((("float64", 8),), seed) for seed in range(ROUNDS)]
    world = World(plan, script, random.Random(0), limits=limits("raise"))
    world.open = 1
    world.settle()
    world.open = 2
    world.idle |= {0, 1, 3} if called else {0, 1, 2, 3}
    for _ in range(20):
        world.clock += 0.1
        world.sweep_all()
    assert world.nodes[1].awaited_below() == called
    if dies:
        world.kill(2, known=True)
    else:
        world.leave(2)
        world.nodes[2].end()
    world.sweep_all()
    assert not world.nodes[1].awaited_below()
    world.frozen.add(0)
    end = world.clock + 2.5 * SECONDS
    while world.clock < end:
        world.clock += 0.1
        world.sweep_all()
    world.frozen.clear()
    world.idle.clear()
    world.open = ROUNDS
    world.settle()
    for rank in (0, 1, 3):
        assert {e.outcome for e in world.ends[rank].values()} == {DONE}, world.ends
