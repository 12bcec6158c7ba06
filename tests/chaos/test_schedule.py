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
        fault.kind for it in schedules for phase in it.phases for fault in phase.faults
    )
    assert set(kinds) == {*FATAL, "sleep", "stop", "skip", "error", "flip"}
    cut = [schedule(seed, 9, hosts=True) for seed in SEEDS]
    assert any(f.kind == "cut" for it in cut for p in it.phases for f in p.faults)
    assert {it.way for it in schedules} == {*CODED, *SHARED}
    assert any(it.way == "ahead" and "check" in it.options for it in schedules)
    assert {it.options.get("on_deadline", "wait") for it in schedules} == {
        *("wait", "raise", "approximate")
    }
    phases = [phase for it in schedules for phase in it.phases]
    assert {phase.fails for phase in phases if phase.dead} == {True, False}
    assert any(len(phase.dead) > 1 and not phase.fails for phase in phases)
    assert {phase.fails for phase in phases if phase.root_dies} == {True, False}
    assert any(phase.puts_out for phase in phases)
    assert not any(phase.puts_out and phase.fails for phase in phases)
    assert any(it.step > phase.steps for phase in phases for it in phase.faults)


def test_which_ranks_live_and_die(schedules):
    for it in schedules:
        living = set(range(it.ranks))
        for i, phase in enumerate(it.phases):
            assert phase.living == tuple(sorted(living))
            assert it.plan(len(living)).size == len(living)
            assert {
                fault.rank for fault in phase.faults if fault.step <= phase.steps + 1
            } <= living
            assert len(set(phase.dead)) == len(phase.dead)
            if phase.root_dies:  # then ranks are renumbered
                for later in it.phases[i + 1 :]:
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
        assert it.survivors == len(living) >= LEFT


def test_parents_are_late_for_messages_of_the_dead(schedules):
    widths = set()
    for it in schedules:
        for phase in it.phases:
            plan = it.plan(len(phase.living))
            for fault in (f for f in phase.faults if f.kind == "offer"):
                parent = plan.parents[phase.living.index(fault.rank)]
                kinds = [f.kind for f in phase.of(phase.living[parent], fault.step)]
                assert "sleep" in kinds
                widths.add(it.width)
    assert widths <= set(NEAR) and len(widths) > len(NEAR) / 2


def test_which_ranks_join(schedules):
    joining = [phase for it in schedules for phase in it.phases if phase.joining]
    assert {bool(phase.lost) for phase in joining} == {True, False}
    assert {phase.lost[0] in phase.joining for phase in joining if phase.lost} == {
        *(True, False)
    }
    assert any(it.phases[-1].joining for it in schedules)
    for it in filter(lambda it: it.joining, schedules):
        new = {rank for phase in it.phases for rank in phase.joining}
        assert new == set(range(it.ranks, it.ranks + len(new)))
        assert it.survivors <= MOST
        for i, phase in enumerate(it.phases):
            meanwhile = [f for f in phase.faults if f.step == phase.steps + 2]
            if not phase.joining:
                assert not meanwhile
                continue
            there = {*phase.living, *phase.joining} - set(phase.dead)
            assert {fault.rank for fault in meanwhile} <= there
            assert len(phase.lost) <= 1 and phase.living[0] not in phase.lost
            if phase.lost:  # they join after more steps
                assert it.phases[i + 1].joining == phase.joining
                assert not it.phases[i + 1].lost
    after = [
        (phase, set(it.phases[i].joining))
        for it in schedules
        for i, phase in enumerate(it.phases[1:])
        if it.phases[i].joining and not it.phases[i].lost
    ]
    assert any(set(phase.dead) & new for phase, new in after)
    assert any(phase.root_dies for phase, _ in after)


def test_no_rank_joins_on_several_hosts():
    assert not any(schedule(seed, 9, hosts=True).joining for seed in SEEDS)


def test_flipped_bits_are_such_as_can_be_found(schedules):
    for it in schedules:
        flips = [f for phase in it.phases for f in phase.faults if f.kind == "flip"]
        assert not flips or ("check" in it.options and it.way != "ahead")
        for phase in it.phases:
            plan = it.plan(len(phase.living))
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
    it = schedule(1958238, 8)
    phase = next(p for p in it.phases if p.faults[0].step == 2)
    of_step_3 = [(f.rank, f.kind) for f in phase.faults if f.step == 3]
    assert of_step_3 == [(6, "skip"), (7, "skip")]


def test_what_a_schedule_demands(schedules):
    for it in filter(lambda it: it.exact, schedules):
        for phase in it.phases:
            plan = it.plan(len(phase.living))
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
