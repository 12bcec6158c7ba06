"""Children, the root or ranks in between are frozen or dead: no rank waits for them twice, or for ever without a
report.
"""

import random

import numpy as np
import pytest
from hypothesis import given
from independent import random_missing
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    DESYNCHRONIZED,
    DONE,
    FAILED,
    GONE,
    HEADER,
    RESULTS,
    Call,
    World,
    random_plan,
    random_world,
)
from test_node_deadline import SECONDS, limits, probed_script

from jaxcoded import Coded, make_plan
from jaxcoded.plan import atoms

TICK = 0.1


def world_of(plan, action, script=None, **more):
    script = script or [Call((("float64", 8),), seed) for seed in range(6)]
    world = World(plan, script, random.Random(0), limits=limits(action), **more)
    world.open = 1
    world.settle()
    world.assert_done()
    return world


def pass_time(world, until):
    """Let time pass until a condition holds; return the seconds."""
    start = world.clock
    world.sweep_all()
    while not until():
        assert world.clock < start + 3 * SECONDS, [n.status() for n in world.nodes]
        world.clock += TICK
        world.sweep_all()
    return world.clock - start


# Children.


@pytest.mark.parametrize("sections_from", [0, 1])
def test_a_rank_stopped_after_its_offer_is_named(sections_from):
    """The sum needs the message of this rank, which cannot be fetched."""
    plan = make_plan(4, Coded(stragglers=0))
    world = World(
        plan,
        [Call((("float64", 100),), 0)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits=limits("wait") | {"piece_bytes": 64, "sections_from": sections_from},
    )
    while not any(source == 2 for _, source, *_ in world.requests):
        world.step()
    world.frozen.add(2)
    for _ in range(600):
        world.sweep_all()
        world.clock += TICK
    root = world.nodes[0]
    assert root.overdue()
    assert "rank 0 waits for rank 2; it needs 3 of its 3 children" in root.waiting_for()
    world.frozen.clear()
    world.settle()
    world.assert_done()


def residual(world, number):
    exact, weights = atoms.deviation(world.plan)
    probe = np.frombuffer(world.results[number], np.float64)[-len(exact) :]
    return np.sqrt(np.sum(weights * (probe - exact) ** 2))


@pytest.fixture
def approximate():
    """Return a root with four children that have a child each; the first two hold the
    same data.
    """
    plan = make_plan(
        9,
        Coded(parents=[-1, 0, 0, 0, 0, 1, 2, 3, 4], code={0: "fractional_repetition"}),
    )
    script = probed_script(plan, random.Random(0))
    return world_of(plan, "approximate", script)


def decided(world, number):
    return lambda: world.nodes[0].next_round() > number


def test_no_rank_waits_again_for_silent_children(approximate):
    world = approximate
    code = world.plan.codings[0].code
    assert code.classes[0] == code.classes[1] != code.classes[2]
    world.frozen.update({1, 2})
    for number in (2, 3, 4):
        world.open = number
        took = pass_time(world, decided(world, number))
        assert took == 0 if number > 2 else SECONDS <= took <= SECONDS + 2 * TICK, took
        # half of the batch has come, and all of it was used
        assert abs(residual(world, number) - np.sqrt(0.5)) < 1e-6
    # until they send messages again
    world.frozen.clear()
    world.settle()
    world.open = 5
    assert pass_time(world, decided(world, 5)) == 0
    assert residual(world, 5) < 1e-9


def test_every_round_waits_for_children_that_compute(approximate):
    """The group waits for children that compute, whose engines answer."""
    world = approximate
    for number in (2, 3):
        world.open = number
        world.idle.update({1, 2})
        assert pass_time(world, decided(world, number)) >= SECONDS
        world.idle.clear()
        world.settle()


def test_no_rank_waits_for_children_reported_dead(approximate):
    world = approximate
    world.frozen.update({1, 2})
    for rank in (1, 2):
        world.nodes[0].lost(rank)
    world.open = 2
    assert pass_time(world, decided(world, 2)) == 0
    assert abs(residual(world, 2) - np.sqrt(0.5)) < 1e-6


# The root.

SEVEN = make_plan(7, Coded(fanout=2))


def ended(world, ranks, number):
    return lambda: all(number in world.ends[rank] for rank in ranks)


@pytest.mark.parametrize("action", ["raise", "approximate"])
@pytest.mark.parametrize("frozen", [{0}, {0, 1}])
def test_without_a_root_rounds_fail_at_the_deadline(action, frozen):
    world = world_of(SEVEN, action)
    world.frozen.update(frozen)
    rest = set(range(7)) - frozen
    for number in (2, 3):
        world.open = number
        took = pass_time(world, ended(world, rest, number))
        assert SECONDS <= took <= SECONDS + 1
        for rank in rest:
            end = world.ends[rank][number]
            assert end.outcome == FAILED
            start = f"DeadlineExceeded: round {number} was not decided within 5 s: rank"
            assert end.error.startswith(start)
            assert "0, which do" in end.error
            assert end.error.endswith("not answer")


def test_ranks_that_wait_for_the_root_get_a_report():
    world = world_of(SEVEN, "wait")
    world.frozen.add(0)
    world.open = 2
    took = pass_time(world, lambda: world.nodes[1].waiting_for())
    assert world.nodes[1].overdue()
    assert SECONDS <= took <= SECONDS + 2 * TICK
    words = "round 2: rank 1 waits for rank 0, which does not answer"
    assert world.nodes[1].waiting_for() == words
    world.settle()
    assert not any(2 in ends for ends in world.ends)
    world.frozen.clear()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("action", ["wait", "raise", "approximate"])
def test_a_root_that_is_known_to_be_dead(action):
    world = world_of(SEVEN, action)
    world.frozen.add(0)
    for node in world.nodes[1:]:
        node.lost(0)
    world.open = 3
    pass_time(world, ended(world, range(1, 7), 3))
    for ends in world.ends[1:]:
        assert ends[3].outcome == FAILED
        text = "round 3 cannot be decided: the root, rank 0, is dead: go on with group.recovered()"
        assert ends[3].error == f"CodedError: {text}"


@pytest.mark.parametrize("action", ["wait", "raise", "approximate"])
def test_a_root_that_has_left_without_a_rank(action):
    """The root's process lives, but answers no questions any more."""
    world = world_of(make_plan(3, Coded(stragglers=1)), action)
    late = world.plan.tree.children[0][-1]
    world.idle.add(late)
    world.open = 2
    world.settle()
    world.frozen.add(0)
    world.idle.clear()
    world.open = 4
    world.nodes[late].root_has_ended()
    pass_time(world, ended(world, [late], 4))
    error = world.ends[late][4].error
    assert error.startswith("CodedError: round 4 cannot be decided: the root, rank 0,")
    assert "has left the group, and its program is at its end" in error


@many
@given(seeds)
def test_a_living_rank_above_has_what_a_late_rank_lacks(seed):
    """Without the root, the late rank gets all results that a living rank above it has,
    however soon it calls.
    """
    rng = random.Random(seed)
    plan = random_plan(rng, 3, stragglers=(1, 2))
    late = random_missing(plan, np.random.default_rng(seed)) - {plan.root}
    world = random_world(plan, 12, rng, limits=limits("wait"))
    world.frozen |= late
    world.started = set(rng.sample(range(plan.size), rng.randint(0, plan.size)))
    world.settle()
    on_time = set(range(plan.size)) - late
    world.assert_done(on_time)
    if rng.random() < 0.5:
        world.kill(plan.root, known=True)
    else:
        world.frozen.add(plan.root)
        for rank in set(range(plan.size)) - {plan.root}:
            world.nodes[rank].root_has_ended()
    world.frozen -= late
    world.settle()
    above = [
        set(world.ancestors[rank]) - late - {plan.root} for rank in range(plan.size)
    ]
    world.assert_done({rank for rank in late if above[rank]})
    for rank in late:
        assert world.nodes[rank].next_round() > 12 or world.nodes[rank].desynchronized()


CHAIN = make_plan(4, Coded(parents=[-1, 0, 1, 2], stragglers=0))


def test_an_announcement_from_before_its_rank_lost_the_result():
    """A rank further away has the result, and the late announcement does not hide this."""
    plan = make_plan(3, Coded(parents=[-1, 0, 1], stragglers=0))
    script = [Call((("float64", 64),), 0)]
    world = World(plan, script, random.Random(0), limits={"piece_bytes": 64})
    world.open = 1
    near, far, node = world.queues[1, 2], world.queues[0, 2], world.nodes[2]
    while not near or near[-1][0] != RESULTS:
        world.step()
    world.frozen.add(2)
    world.settle()
    head = list(HEADER.unpack_from(near[-1]))
    assert head[0] == RESULTS and head[3] == 8
    head[3] = 1
    first_piece = HEADER.pack(*head) + near[-1][HEADER.size :]
    near.clear()
    node.deliver(1, first_piece)
    world.advance(2)
    world.frozen = {1}
    gone = HEADER.pack(GONE, 0, 0, 0, 1, 2, 1, 0, head[-1])
    node.deliver(1, gone)
    world.deliver((2, 0))
    world.advance(0)
    while far:
        node.deliver(0, far.popleft())
    node.deliver(1, first_piece)
    for _ in range(50):
        world.sweep_all()
        node.deliver(1, gone)
        world.clock += TICK
    world.assert_done({2})


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("left", [set(), {1}, {2}, {1, 2}])
def test_a_rank_below_ranks_that_make_no_call(left, dead):
    """Without the root, the call of this rank fails, whether the ranks above have left
    or compute.
    """
    world = world_of(CHAIN, "raise")
    for rank in left:
        world.leave(rank)
    world.settle()
    world.idle.update({1, 2} - left)
    world.frozen.add(0)
    if dead:
        for node in world.nodes[1:]:
            node.lost(0)
    world.open = 2
    took = pass_time(world, ended(world, {3}, 2))
    assert world.ends[3][2].outcome == FAILED
    if dead:
        assert (
            "round 2 cannot be decided: the root, rank 0, is dead"
            in world.ends[3][2].error
        )
    else:
        assert SECONDS <= took
        assert world.ends[3][2].error.endswith(
            "rank 1 waits for rank 0, which does not answer"
        )


@pytest.mark.parametrize("open_call", [False, True])
@pytest.mark.parametrize("death", ["dead", "frozen"])
def test_a_rank_below_a_program_between_two_parts_of_its_call(open_call, death):
    """Round 2 is decided without rank 1, whose program has given only a part of its message.
    Then the root is gone, and rank 5 calls round 3 below rank 1.
    """
    tree = Coded(parents=(-1, 0, 0, 0, 0, 1), stragglers=1, code={0: "progressive"})
    plan = make_plan(6, tree)
    assert plan.parts_above[1] > 1
    script = [Call((("float64", 8 * plan.padding_multiple),), s) for s in range(3)]
    world = world_of(plan, "raise", script)
    world.open = 2
    if open_call:
        world.begins_with[1, 2] = 1
        world.submit(1)
    world.idle = {1}
    pass_time(world, ended(world, {0, 5}, 2))
    if death == "dead":
        world.kill(0, known=True)
    else:
        world.frozen = {0}
    world.open = 3
    pass_time(world, ended(world, {2, 3, 4, 5}, 3))
    assert {world.ends[rank][3].outcome for rank in (2, 3, 4, 5)} == {FAILED}


def test_nobody_is_patient_with_a_parent_reported_dead():
    """Ranks ask another rank for the result at once, even after long rounds."""
    world = world_of(SEVEN, "wait", inline=(1 << 20,))
    world.idle.update({0, 3})
    for number in (2, 3, 4):  # each takes a second
        world.open = number
        world.sweep_all()
        world.clock += 1
        world.idle.clear()
        world.settle()
        world.idle.update({0, 3})
    world.idle.clear()
    world.frozen.add(1)
    for node in world.nodes:
        node.lost(1)
    world.open = 5
    assert pass_time(world, ended(world, {3, 4}, 5)) == 0
    world.frozen.clear()


def stopped_after(first):
    """Return a world of 13 ranks, and the children of a rank that is stopped in the second
    round. The first round took ``first`` seconds, because the root came late.
    """
    plan = make_plan(13, Coded(fanout=3))
    script = [Call((("float64", 12),), seed) for seed in range(2)]
    world = World(plan, script, random.Random(0), limits=limits("wait"))
    world.open = 1
    world.idle = {0}
    world.sweep_all()
    world.clock += first
    world.idle = set()
    world.sweep_all()
    world.assert_done()
    stopped = plan.coded_children(0)[0]
    world.frozen, world.open = {stopped}, 2
    return world, plan.coded_children(stopped)


@pytest.mark.parametrize("first", [0, 300])
def test_a_stopped_rank_is_found_out_after_a_long_round(first):
    """The first round takes long, because programs compile."""
    world, below = stopped_after(first)
    until = world.clock + 30
    while world.clock < until and not all(map(world.done, below)):
        world.sweep_all()
        world.clock += TICK
    world.assert_done(below)


def test_a_snapshot_from_further_up_after_a_long_round():
    """The parent is stopped, and the root has a snapshot."""
    world, (asks, *_) = stopped_after(300)
    world.nodes[0].keep_state(2, world.state(2))
    world.nodes[asks].ask_state()
    until = world.clock + 60  # as long as `resync` waits
    while world.clock < until and not world.nodes[asks].state_round():
        world.sweep_all()
        world.clock += TICK
    world.check_state(asks, 2)


@pytest.mark.parametrize("knows", [False, True])
def test_a_root_that_comes_back(knows):
    """If the root has decided a round that failed elsewhere, the ranks that continue
    get an error.
    """
    inline = (1 << 20,) if knows else (0,)  # whether its mailbox holds messages
    world = world_of(SEVEN, "raise", inline=inline)
    world.recovers = False
    world.open = 2
    world.idle.update({1, 2})
    world.sweep_all()  # the root has called
    world.idle.clear()
    world.frozen.add(0)
    pass_time(world, ended(world, range(1, 7), 2))
    world.frozen.clear()
    world.open = 4
    world.settle()
    assert world.ends[0][2].outcome == (DONE if knows else FAILED)
    for ends in world.ends[1:]:
        assert ends[2].outcome == FAILED
        after = [ends[number].outcome for number in sorted(ends) if number > 2]
        assert after == ([DESYNCHRONIZED] if knows else [DONE, DONE])


# Ends.


def test_the_offer_of_an_ended_process_is_lost():
    """If the message was requested and is needed, the round fails."""
    far = {"hosts": list(range(4))}
    world = world_of(make_plan(4, Coded(stragglers=0)), "wait", **far)
    world.open = 2
    world.idle.add(0)
    world.sweep_all()
    world.frozen.add(1)  # rank 1 has made its offer
    world.idle.clear()
    world.sweep_all()
    assert any(request[1] == 1 for request in world.requests)
    world.nodes[1].end()
    world.settle()
    for rank in (0, 2, 3):
        assert world.ends[rank][2].outcome == FAILED
        assert world.ends[rank][2].error.endswith("but rank 1 closed the group")


def test_a_failed_root_reports_why():
    world = world_of(SEVEN, "wait")
    world.leaving.add(0)
    world.nodes[0].leave("ValueError: no such file")
    world.open = 2
    world.settle()
    for ends in world.ends[1:]:
        assert ends[2].outcome == FAILED
        assert ends[2].error.endswith("but rank 0 failed: ValueError: no such file")


def test_a_root_that_failed_with_a_call_in_flight_reports_why():
    """The root reports the reason even if the departure of another rank ends the call."""
    world = world_of(make_plan(4, Coded(stragglers=0)), "wait")
    world.idle |= {1, 2, 3}
    world.open = 2
    world.settle()
    world.nodes[0].leave("ValueError: no such file")
    world.settle()
    assert 2 not in world.ends[0]  # the other ranks may still call
    world.leave(1)
    world.idle.clear()
    world.settle()
    for rank in (0, 2, 3):
        assert world.ends[rank][2].outcome == FAILED
        assert world.ends[rank][2].error.endswith(
            "but rank 1 closed the group, and rank 0 failed: ValueError: no such file"
        )


# Ranks that call nothing.


@pytest.mark.parametrize("watches", [False, True])
def test_a_watching_idle_rank_learns_of_rounds_past_a_frozen_parent(watches):
    world = world_of(SEVEN, "raise")
    world.frozen.add(1)
    world.idle.add(3)
    node = world.nodes[3]
    node.watch(watches)
    world.open = 3
    heard = lambda: node.decided() == 3
    others = ended(world, {0, 2, 4, 5, 6}, 3)
    where = "is in recovered or extended, before" if watches else "has not called"
    assert node.standing().startswith(f"rank 3 {where} round 2")
    if watches:
        pass_time(world, lambda: others() and heard())
    else:
        pass_time(world, others)
        start = world.clock
        pass_time(world, lambda: world.clock > start + 2 * SECONDS)
        assert node.decided() == 1
