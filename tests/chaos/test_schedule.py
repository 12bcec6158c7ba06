"""Schedules of faults have the properties that they state."""

import collections
import itertools

import pytest
from schedule import CODED, FATAL, FEWEST, LEFT, MOST, NEAR, SHARED, schedule, tolerates

import jaxcoded

SEEDS, SIZES = range(40), (FEWEST, 9, 13)


@pytest.fixture(scope="module")
def schedules():
    return [schedule(seed, ranks) for seed in SEEDS for ranks in SIZES]


@pytest.mark.slow
def test_equal_seeds_give_equal_schedules(schedules):
    again = [schedule(seed, ranks) for seed in SEEDS for ranks in SIZES]
    assert again == schedules
    assert len(set(map(str, schedules))) == len(schedules)


def test_everything_happens(schedules):
    kinds = collections.Counter(
        fault.kind
        for drawn in schedules
        for phase in drawn.phases
        for fault in phase.faults
    )
    assert set(kinds) == {*FATAL, "sleep", "stop", "skip", "error", "flip"}
    cut = [schedule(seed, 9, hosts=True) for seed in SEEDS]
    assert any(f.kind == "cut" for drawn in cut for p in drawn.phases for f in p.faults)
    assert {drawn.way for drawn in schedules} == {*CODED, *SHARED}
    assert any(drawn.way == "ahead" and "check" in drawn.options for drawn in schedules)
    assert {drawn.options.get("on_deadline", "wait") for drawn in schedules} == {
        *("wait", "raise", "approximate")
    }
    phases = [phase for drawn in schedules for phase in drawn.phases]
    assert {phase.fails for phase in phases if phase.dead} == {True, False}
    assert any(len(phase.dead) > 1 and not phase.fails for phase in phases)
    assert {phase.fails for phase in phases if phase.root_dies} == {True, False}
    assert any(phase.puts_out for phase in phases)
    assert not any(phase.puts_out and phase.fails for phase in phases)
    assert any(each.step > phase.steps for phase in phases for each in phase.faults)


def test_which_ranks_live_and_die(schedules):
    for drawn in schedules:
        living = set(range(drawn.ranks))
        for i, phase in enumerate(drawn.phases):
            assert phase.living == tuple(sorted(living))
            assert drawn.plan(len(living)).size == len(living)
            assert {
                fault.rank for fault in phase.faults if fault.step <= phase.steps + 1
            } <= living
            assert len(set(phase.dead)) == len(phase.dead)
            if phase.root_dies:  # then ranks are renumbered
                for later in drawn.phases[i + 1 :]:
                    assert {f.step for f in later.faults} <= {later.steps + 2}
            for fault in phase.faults:
                ends = [
                    f.step
                    for f in phase.faults
                    if f.kind in FATAL and f.rank == fault.rank
                ]
                assert fault.kind in FATAL or not ends or fault.step < ends[0]
            living -= set(phase.dead) | set(phase.lost)
            if not phase.lost:
                living |= set(phase.joining)
        assert drawn.survivors == len(living) >= LEFT


def test_parents_are_late_for_messages_of_the_dead(schedules):
    widths = set()
    for drawn in schedules:
        for phase in drawn.phases:
            plan = drawn.plan(len(phase.living))
            for fault in (f for f in phase.faults if f.kind == "offer"):
                parent = plan.parents[phase.living.index(fault.rank)]
                kinds = [f.kind for f in phase.of(phase.living[parent], fault.step)]
                assert "sleep" in kinds
                widths.add(drawn.width)
    assert widths <= set(NEAR) and len(widths) > len(NEAR) / 2


def test_which_ranks_join(schedules):
    joining = [phase for each in schedules for phase in each.phases if phase.joining]
    assert {bool(phase.lost) for phase in joining} == {True, False}
    assert {phase.lost[0] in phase.joining for phase in joining if phase.lost} == {
        *(True, False)
    }
    assert any(each.phases[-1].joining for each in schedules)
    for drawn in filter(lambda value: value.joining, schedules):
        new = {rank for phase in drawn.phases for rank in phase.joining}
        assert new == set(range(drawn.ranks, drawn.ranks + len(new)))
        assert drawn.survivors <= MOST
        for i, phase in enumerate(drawn.phases):
            meanwhile = [f for f in phase.faults if f.step == phase.steps + 2]
            if not phase.joining:
                assert not meanwhile
                continue
            there = {*phase.living, *phase.joining} - set(phase.dead)
            assert {fault.rank for fault in meanwhile} <= there
            assert len(phase.lost) <= 1 and phase.living[0] not in phase.lost
            if phase.lost:  # these ranks join after more steps
                assert drawn.phases[i + 1].joining == phase.joining
                assert not drawn.phases[i + 1].lost
    after = [
        (phase, set(each.phases[i].joining))
        for each in schedules
        for i, phase in enumerate(each.phases[1:])
        if each.phases[i].joining and not each.phases[i].lost
    ]
    assert any(set(phase.dead) & new for phase, new in after)
    assert any(phase.root_dies for phase, _ in after)


def test_a_rank_is_put_out_by_one_of_its_host():
    """All other ranks live, so a rank of the same host lives."""
    seen = 0
    for seed in SEEDS:
        drawn = schedule(seed, 9, hosts=True)
        for phase in drawn.phases:
            if phase.puts_out:
                assert len(phase.living) == 9 and len(phase.dead) == 1
                seen += 1
    assert seen


def test_no_rank_joins_on_several_hosts():
    assert not any(schedule(seed, 9, hosts=True).joining for seed in SEEDS)


def test_flipped_bits_are_such_as_can_be_found(schedules):
    for drawn in schedules:
        flips = [f for phase in drawn.phases for f in phase.faults if f.kind == "flip"]
        assert not flips or ("check" in drawn.options and drawn.way != "ahead")
        for phase in drawn.phases:
            plan = drawn.plan(len(phase.living))
            for fault in phase.faults:
                if fault.kind == "flip":
                    dead = [
                        f.rank
                        for f in phase.faults
                        if f.kind in FATAL and f.step <= fault.step
                    ]
                    gone = [phase.living.index(rank) for rank in {*dead, fault.rank}]
                    assert tolerates(plan, gone)


def test_flipped_bits_go_into_a_sum():
    """With seed 1958238 rank 2 has no sum if both its children skip the step."""
    drawn = schedule(1958238, 8)
    phase = next(p for p in drawn.phases if p.faults[0].step == 2)
    of_step_3 = [(f.rank, f.kind) for f in phase.faults if f.step == 3]
    assert of_step_3 == [(6, "skip"), (7, "skip")]


def test_what_a_schedule_demands(schedules):
    for drawn in filter(lambda value: value.exact, schedules):
        for phase in drawn.phases:
            plan = drawn.plan(len(phase.living))
            for step in range(1, phase.steps + 1):
                missing = [
                    phase.living.index(fault.rank)
                    for fault in phase.faults
                    if (fault.kind in FATAL and fault.step <= step)
                    or (fault.kind == "skip" and fault.step == step)
                ]
                assert phase.fails or tolerates(plan, missing)
            dead = [
                phase.living.index(fault.rank)
                for fault in phase.faults
                if fault.kind in FATAL and fault.step <= phase.steps
            ]
            assert tolerates(plan, dead) != phase.fails


def counted(plan, rank, missing):
    """Return whether a rank has its sum if each parent tolerates that any of its
    children are missing.
    """
    lacks = [
        c
        for c in plan.tree.children[rank]
        if c in missing or not counted(plan, c, missing)
    ]
    return len(lacks) <= plan.tolerance(rank)


@pytest.mark.parametrize(
    "arguments", [{"fanout": 2}, {"fanout": 3, "stragglers": 2}, {"fanout": 6}]
)
def test_what_is_tolerated(arguments):
    plan = jaxcoded.make_plan(7, jaxcoded.Coded(**arguments))
    for missing in itertools.chain(
        *(itertools.combinations(range(1, 7), n) for n in range(4))
    ):
        if counted(plan, 0, missing):
            assert tolerates(plan, list(missing))
    assert not tolerates(plan, list(range(1, 7)))


def test_what_shared_work_tolerates():
    plan = jaxcoded.make_plan(6, jaxcoded.Shared(replicas=2, blocks=4))
    for missing in itertools.combinations(range(1, 6), 2):
        assert tolerates(plan, list(missing))
    assert not tolerates(plan, [1, 2, 3, 4, 5])
