"""Groups of ranks that `_nodes` simulates. Everything is drawn from one seed."""

import dataclasses
import random
from fractions import Fraction

import _nodes
import numpy as np
from simulation import EXAMPLES, erasable, random_plan

from jaxcoded import Shared, make_plan
from jaxcoded.plan import dealing
from jaxcoded.transport import engine, pieces

SCHEDULES = 100  # on each group
WAYS = 3  # sets of ranks to leave out


def shares(plan):
    """Return each rank's examples, their coefficients, and the parts and slices of its message."""
    if plan.placement is not None and plan.placement.holders:
        held = [plan.strategy.shares(plan, rank, EXAMPLES) for rank in range(plan.size)]
        return [(of.tolist(), table.ravel().tolist(), 1, 1) for of, table in held]
    out = []
    whole = dealing.dealt(plan, Fraction(EXAMPLES), range(plan.size), whole=True)
    for rank in range(plan.size):
        indices, table = [], []
        for run in whole[rank]:
            examples = range(int(run.start), int(run.end))
            indices += examples
            table += np.ravel(run.coefficients).tolist() * len(examples)
        grid = plan.parts_above[rank], plan.slices_above[rank]
        out.append((indices, table, *grid))
    return out


def watched(plan, rank):
    """Return whether a parent with all messages finds a large mistake in each part of a rank's message."""
    parent = plan.tree.parents[rank]
    if parent not in plan.checked:
        return False
    code = plan.codings[parent].code
    place = plan.coded_children(parent).index(rank) * code.parts
    return bool(
        abs(code.parity_checks[:, place : place + code.parts]).max(0).min() > 0.01
    )


def group(plan, hosts, rng=None, replanned=()):
    """Return a `_nodes.Group` of a plan's ranks on these hosts. ``rng`` draws ranks that some sums leave out; without
    it, sums leave out no rank. ``replanned`` has the group's other plan, if a call replans.
    """
    cut = pieces.delegating(plan, hosts)
    ranks = range(plan.size)
    combinations = []
    for coding in plan.codings:
        if coding is None:
            combinations.append((0, 1, []))
        else:
            code = coding.code
            table = code.decode(np.ones(code.n, bool)).coefficients
            combinations.append((code.m, code.parts, table.ravel().tolist()))
    erasures = []
    for _ in range(WAYS if rng else 0):
        left_out = erasable(plan, rng)
        if left_out:
            missing = plan.missing([rank in left_out for rank in ranks])
            rows = [missing[list(plan.coded_children(r))].tolist() for r in ranks]
            erasures.append(rows)
    placement = plan.placement
    if placement is not None and not placement.holders:
        placement = None
    return _nodes.Group(
        parents=plan.tree.parents,
        hosts=hosts,
        families=[engine._family(plan, rank, ()) for rank in ranks],
        delegating=[engine._family(plan, rank, cut) for rank in ranks],
        decoders=[engine._decoder(plan, rank) for rank in ranks],
        comparing=[engine._decoder(plan, rank, True) for rank in ranks]
        if plan.checked and placement is None
        else [],
        deadline_shares=[engine._deadline_share(plan, rank) for rank in ranks],
        shares=shares(plan),
        combinations=combinations,
        tolerances=[plan.tolerance(rank) for rank in ranks],
        erasures=erasures,
        amplification=plan.amplification,
        multiple=plan.padding_multiple,
        holders=placement.holders if placement else [],
        starts=placement.examples(EXAMPLES).tolist() if placement else [],
        watched=[watched(plan, rank) for rank in ranks],
        replanned=[group(other, hosts, rng) for other in replanned],
    )


def replanned(plan, rng):
    """Draw the plan after a `replan`, if there is one."""
    try:
        speeds = [rng.choice([1, 1, 2, 5]) for _ in range(plan.size)]
        other = dataclasses.replace(plan, strategy=plan.strategy.with_speeds(speeds))
    except ValueError:  # the strategy takes no speeds
        return []
    return [other] if other.amplification < 1e4 else []


def drawn(number, most=14, **faults):
    """Draw a group of at most ``most`` ranks, and the first of its schedules.

    Args:
        number: the seed.
        most: the most ranks.
        faults: what MPI does wrong, see ``Settings`` in world.h. Then the schedule is calm
            (``Theme`` in schedule.h).
    """
    rng = random.Random(number)
    if rng.random() < 0.4:
        size = rng.randint(2, min(6, most))
        replicas, blocks = rng.randint(1, size - 1), rng.randint(1, 3)
        plan = make_plan(size, Shared(replicas=replicas, blocks=blocks))
    else:
        plan = random_plan(rng, 2, min(rng.choice([3, 5, 14]), most))
    hosts = rng.choice(
        [
            [0] * plan.size,
            list(range(plan.size)),
            [rng.randrange(3) for _ in range(plan.size)],
        ]
    )
    calm = rng.random() < 0.3 or bool(faults)
    first = _nodes.Schedule(number * SCHEDULES, calm=calm, **faults)
    return group(plan, hosts, rng, replanned(plan, rng)), first


def play(number, most=14, seen=None):
    """Play many schedules on a group drawn from a seed. ``_nodes.play(ranks, schedule,
    traced=True)`` prints each message of one of them.

    Raises:
        AssertionError: a schedule shows a fault. The text tells which schedule, and what happened.
    """
    ranks, schedule = drawn(number, most)
    seed, events = _nodes.play_many(ranks, schedule, SCHEDULES)
    if seen is not None:
        seen.update(events)
    if seed is not None:
        schedule.seed = seed
        report = _nodes.shortest(ranks, schedule)
        raise AssertionError(f"{report.finding}\nWhat happened: {report.happened}")
