"""The engine's ledger: whichever ranks are late, each block counts once, and a step takes
little more than the least time.
"""

import itertools
import random

import numpy as np
import pytest
from _nodes import Ledger, Order, Share
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World, spread

from jaxcoded.plan.costs import relative
from jaxcoded.plan.placement import Placement

WORKERS, BLOCKS = 12, 12
BLOCK = 0.01  # seconds


def steady():
    return 1e-4


def ideal(seconds):
    """Return the seconds of a step in which all members compute and none waits."""
    return WORKERS * BLOCKS / sum(1 / s for s in seconds)


def world(seconds, replicas=3, **options):
    return World(
        spread(WORKERS, BLOCKS, replicas), WORKERS, seconds, latency=steady, **options
    )


def test_no_rank_is_late():
    """Each member computes its own blocks, and the parent gives no orders."""
    run = world([BLOCK] * WORKERS)
    step = run.run()
    assert run.orders == dict.fromkeys(run.orders, 0)
    assert run.computed == WORKERS * BLOCKS
    # a member reports when it calls, and when 7, 3, 1 and no blocks are left
    assert run.told == WORKERS * 5
    messages = 1 + WORKERS  # the end of the round, and the fetch of each vector
    assert step == pytest.approx(BLOCK * BLOCKS + messages * steady())


@pytest.mark.parametrize("replicas", [0, 3])
@pytest.mark.parametrize("tiny", [1e-9, 1e-4])
def test_the_parent_sleeps_while_a_slow_member_computes(tiny, replicas):
    """The parent sleeps although idle members need little time for a block."""
    seconds = [tiny] * (WORKERS - 1) + [1.0]
    run = world(seconds, replicas)
    step = run.run()
    assert run.woken <= 100 * (1 + step)


SLOW = {
    "one": ([10.0] + [1.0] * 11, 1.1),
    "two": ([10.0, 10.0] + [1.0] * 10, 1.12),
    "half": ([10.0] * 6 + [1.0] * 6, 1.15),
    "unequal": ([1 + 1.5 * i / 11 for i in range(12)], 1.15),
}


@pytest.mark.parametrize("name", SLOW)
def test_near_the_least_time(name):
    """The simulated time is near total work over total speed."""
    factors, bound = SLOW[name]
    seconds = [BLOCK * f for f in factors]
    run = world(seconds, replicas=11)
    for _ in range(3):
        step = run.run()
        assert ideal(seconds) <= step <= bound * ideal(seconds)


@pytest.mark.parametrize("shape", [1.1, 1.5, 2.5])
@pytest.mark.parametrize(("slowest", "bound"), [(1.0, 1.1), (2.5, 1.25)])
def test_near_the_least_time_with_unequal_costs(slowest, bound, shape):
    """The least time is the time of the most costly block on its owner, or of all work divided among all members."""
    seconds = [BLOCK * f for f in np.linspace(1, slowest, WORKERS)]
    placement = Placement(tuple(range(WORKERS)), 3, BLOCKS)
    for seed in range(4):
        costs = np.random.default_rng(seed).pareto(shape, WORKERS * BLOCKS) + 1
        of_blocks = relative([costs[each].sum() for each in placement.divided(costs)])
        run = World(
            [list(ranks) for ranks in placement.holders],
            *(WORKERS, seconds),
            latency=steady,
            empties=False,  # as with blocks on the host, whose costs are known
            costs=of_blocks,
        )
        alone = [cost * seconds[b // BLOCKS] for b, cost in enumerate(of_blocks)]
        least = max(ideal(seconds), *alone)
        took = [run.run() for _ in range(4)][1:]  # the ledger then knows the paces
        assert sum(took) <= bound * 3 * least, (seed, took, least)


@pytest.mark.parametrize("slower", [2, 6, 40])
def test_a_member_that_stalled_once(slower):
    """A member has one block, which costs more than those of each other member together. Its process is slow in one
    round, and the next rounds take no longer for it.
    """
    seconds = [BLOCK] * 3
    costs = [25.0] + [1e-3] * 11 + [20 / 12] * 24
    run = World(
        spread(3, 12, 2), 3, seconds, latency=steady, empties=False, costs=costs
    )
    usual = run.run()
    seconds[0] *= slower
    run.run()
    seconds[0] = BLOCK
    took = [run.run() for _ in range(6)]
    assert sum(took) <= 1.5 * 6 * usual, (took, usual)
    assert took[-1] <= 1.05 * usual


def test_equal_costs_change_nothing():
    rng = random.Random(1)
    factors = [rng.uniform(1, 4) for _ in range(WORKERS)]
    found = []
    for costs in ((), [1.0] * WORKERS * BLOCKS):
        run = world([BLOCK * f for f in factors], costs=costs)
        found.append([(run.run(), dict(run.orders)) for _ in range(3)])
    assert found[0] == found[1]


def test_a_rank_that_has_not_called_must_hold():
    """Other members compute the rank's blocks. Once, the rank asks before it begins;
    later it need not ask."""
    run = world([BLOCK] * WORKERS)
    late = 2 * BLOCKS * BLOCK
    step = run.run(calls=[0.0] * (WORKERS - 1) + [late])
    assert run.orders["hold"] == 1 and run.orders["recall"] == run.orders["drop"] == 0
    assert run.computed == WORKERS * BLOCKS
    assert step < BLOCK * (BLOCKS + 5)  # the last replicas of three share 12 blocks
    assert run.asks[WORKERS - 1]
    run.run()
    assert run.orders == {"grant": 1, "recall": 0, "drop": 0, "hold": 0}
    run.run()
    assert run.orders == dict.fromkeys(run.orders, 0)


def test_a_rank_begins_before_the_order_to_hold_arrives():
    """The rank is dropped, and other members compute the blocks that it has begun."""
    ledger = Ledger([[0, 1], [1, 0], [1, 0]], 2, 0.02)
    first, second = Share(claimed=[0]), Share(claimed=[1, 2])
    ledger.begin(0.0)
    ledger.arrived(0, claims=True, now=0.0)
    assert first.take() == 0 and first.done()
    ledger.heard(0, first.progress(0.0), 0.1)
    assert [order.kind for order in ledger.orders(0.1)] == [Order.Kind.hold]
    (order,) = ledger.orders(0.2)  # no answer
    assert (order.member, order.kind, order.blocks) == (0, Order.Kind.grant, [2])
    ledger.arrived(1, claims=True, now=0.2)
    (order,) = (o for o in ledger.orders(0.2) if o.member == 1)
    assert (order.kind, order.generation) == (Order.Kind.drop, 1)
    # sent before the rank received the order
    ledger.heard(1, second.progress(0.0), 0.2)
    assert ledger.version(1) == (1, 0)


def test_the_only_holder_of_a_free_block_is_not_given_up():
    """With blocks on the host no rank could then compute the block, although no rank is dead."""
    ledger = Ledger([[0, 1], [1, 2], [1, 2], [2, 1]], 3, 0.02)
    ledger.begin(0.0)
    for member in range(3):
        ledger.arrived(member, claims=True, now=0.0)
    ledger.give_up(0, 0.0)
    waits = Share(claimed=[3])
    assert waits.take() == 3 and waits.done()
    ledger.heard(2, waits.progress(0.0), 0.01)
    orders = ledger.orders(0.01)
    assert [(o.member, o.kind) for o in orders] == [
        (0, Order.Kind.drop),
        (1, Order.Kind.recall),
    ]
    assert not ledger.orders(1.0)  # no answer
    ledger.heard(0, Share().progress(0.0), 1.0)  # sent before the drop arrived
    there = Share()
    there.drop(1)
    ledger.heard(0, there.progress(0.0), 1.0)
    assert (1, Order.Kind.drop) in [(o.member, o.kind) for o in ledger.orders(1.0)]


def test_a_block_that_cannot_be_taken_back_while_it_is_computed():
    """The block's rank is given up as soon as other members would finish the block
    earlier."""
    seconds = [BLOCK] * (WORKERS - 1) + [10 * BLOCK]
    run = world(seconds, replicas=11, empties=False)
    for _ in range(3):
        step = run.run()
        assert run.orders["drop"] == 1
        assert step <= 1.12 * ideal(seconds)


def test_others_take_over_the_blocks_of_a_stopped_rank_until_it_comes_back():
    run = world([BLOCK] * WORKERS)
    step = run.run(faults=[(0.05, "stop", 3)])
    assert run.orders["drop"] == 1
    # the other members compute its five blocks or so again, after the patience
    assert step <= BLOCK * (BLOCKS + 2) * 1.3
    run.wake(3)
    run.run()  # one member was absent at the start
    run.run()
    assert run.orders["drop"] == 0


def test_blocks_of_a_rank_that_dies_during_a_fetch_are_computed_again():
    run = world([BLOCK] * WORKERS)
    whole = BLOCK * BLOCKS + 2.5 * steady()  # if only the first member computes
    step = run.run(faults=[(whole, "die", 11)])
    assert step > BLOCK * BLOCKS + BLOCK
    assert run.computed == WORKERS * BLOCKS + BLOCKS


def test_closed_while_only_stopped_members_hold_blocks():
    run = world([BLOCK] * WORKERS)
    stopped = {2, 3, 4, 5, 6}
    closes = 0.4
    faults = [(0.05, "stop", m) for m in stopped] + [(closes, "close", None)]
    # if a part of the batch suffices, even a rank with blocks that no other rank can
    # compute is given up
    faults += [(closes / 2, "give_up", m) for m in stopped]
    step = run.run(faults=faults)
    assert run.ledger.missing == sum(set(h) <= stopped for h in run.holders) > 0
    assert closes <= step < closes + 0.03  # at most the patience longer
    # all blocks of the other members, including unused ones
    assert run.computed <= WORKERS * BLOCKS - run.ledger.missing + 5 * len(stopped)


def test_closed_while_all_compute():
    """Members finish the blocks that they have begun, and begin no further blocks."""
    run = world([BLOCK] * WORKERS)
    step = run.run(faults=[(5.5 * BLOCK, "close", None)])
    assert run.ledger.missing == WORKERS * (BLOCKS - 6)
    assert run.computed == WORKERS * 6
    assert step < 6.5 * BLOCK
    assert run.run() < BLOCK * (BLOCKS + 1) and not run.ledger.missing


def test_closed_while_one_takes_much_longer():
    """The parent waits for the slow member no longer than a usual block takes, and the member's blocks are missing."""
    run = world([BLOCK] * (WORKERS - 1) + [50 * BLOCK], replicas=0)
    step = run.run(faults=[(15 * BLOCK, "close", None)])
    assert run.ledger.missing == BLOCKS
    assert step < 17.5 * BLOCK
    assert run.orders["drop"] == 1


def test_a_block_that_no_member_holds():
    run = World([[0], [1, 0], [1]], 2, [BLOCK] * 2, latency=steady)
    with pytest.raises(AssertionError, match="nothing more can happen"):
        run.run(faults=[(0.005, "die", 1), (0.006, "found_dead", 1)])
    assert run.ledger.orphans == [2]


def test_a_block_that_takes_long_everywhere_is_done_at_last():
    """An idle member takes the block over, but not again and again."""
    run = World([[0, 1, 2]], 3, [1.0] * 3, latency=steady, patience=1e-3)
    assert run.run() < 3
    assert 1 < run.computed + run.orders["recall"] < 30


def test_a_block_does_not_go_back_and_forth_between_two_that_are_late():
    """The programs of both ranks do not call while they compute, but their engines answer."""
    ledger = Ledger([[0, 1], [0, 1], [1, 0], [1, 0], [1, 0]], 2, 0.02)
    shares = [Share(claimed=[0, 1]), Share(claimed=[2, 3, 4])]
    ledger.begin(0.0)
    for member, share in enumerate(shares):
        ledger.arrived(member, claims=True, now=0.0)
        share.take()
        share.done()
        ledger.heard(member, share.progress(0.0), BLOCK)
        share.take()
    given = 0
    for seconds in range(1, 100):
        while orders := ledger.orders(float(seconds)):
            given += len(orders)
            assert given < 10
            for order in orders:
                share = shares[order.member]
                if order.kind == Order.Kind.grant:
                    share.grant(order.blocks)
                else:
                    assert order.kind == Order.Kind.recall
                    share.recall(order.blocks)
                    progress = share.progress(0.0)
                    ledger.heard(order.member, progress, float(seconds))


def test_few_orders_where_some_blocks_take_much_longer():
    rng = random.Random(0)
    run = world(randomly_slow(rng, BLOCK))
    for _ in range(10):
        run.run()
        assert sum(run.orders.values()) < 3 * WORKERS * BLOCKS


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32), members=st.integers(2, 7), replicas=st.integers(1, 3)
)
def test_random_schedules(seed, members, replicas):
    """Members are slow, stopped, continued, dead or late; the parent never is."""
    rng = random.Random(seed)
    holders = spread(members, rng.randint(1, 6), replicas, extra=[0])
    fastest = rng.choice([1e-4, 1e-3, 1e-2])

    def takes(member, time):
        return fastest * rng.choice([1, 1, 1, 2, 10])

    run = World(
        [list(dict.fromkeys(h)) for h in holders],
        members,
        takes,
        latency=lambda: rng.expovariate(1 / rng.choice([1e-5, 1e-3])),
        patience=rng.choice([1e-3, 2e-2]),
    )
    for _ in range(4):
        faults = [
            (rng.random() * 10 * fastest, rng.choice(["stop", "wake", "die"]), m)
            for m in range(1, members)
            if rng.random() < 0.4
        ]
        if rng.random() < 0.3:
            faults.append((rng.random() * 10 * fastest, "close", None))
        calls = [
            rng.choice([0, 0, rng.random() * 20 * fastest]) for _ in range(members)
        ]
        claims = [rng.random() < 0.8 for _ in range(members)]
        run.run(calls=calls, claims=claims, faults=faults)
        for member in [*run.stopped]:
            if rng.random() < 0.5:
                run.wake(member)


def randomly_slow(rng, fastest):
    return lambda member, time: fastest * rng.choice([1, 1, 1, 2, 10])


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), members=st.integers(2, 7))
def test_a_replay_divides_the_work_as_before(seed, members):
    """A replay under a schedule with stopped members gives each vector the same blocks
    in the same order. No member computes other blocks.
    """
    rng = random.Random(seed)
    holders = [
        list(dict.fromkeys(h)) for h in spread(members, rng.randint(1, 6), 2, [0])
    ]

    def its_world():
        fastest = rng.choice([1e-4, 1e-3, 1e-2])
        return fastest, World(
            *(holders, members, randomly_slow(rng, fastest)),
            latency=lambda: rng.expovariate(1 / rng.choice([1e-5, 1e-3])),
            patience=rng.choice([1e-3, 2e-2]),
        )

    fastest, run = its_world()
    faults = [
        (rng.random() * 10 * fastest, rng.choice(["stop", "die"]), m)
        for m in range(1, members)
        if rng.random() < 0.3
    ]
    run.run(faults=faults)
    division = run.ledger.division
    assert sorted(itertools.chain(*division)) == [*range(len(holders))]
    assert division == [
        run.fetched[m][1] if blocks else [] for m, blocks in enumerate(division)
    ]

    fastest, again = its_world()
    again.ledger = Ledger(division, 1e-3)
    faults = []
    for m in range(1, members):
        if rng.random() < 0.5:
            begins = rng.random() * 10 * fastest
            wakes = begins + rng.random() * 20 * fastest
            faults += [(begins, "stop", m), (wakes, "wake", m)]
    calls = [rng.random() * 5 * fastest for _ in range(members)]
    again.run(calls=calls, claims=[False] * members, faults=faults)
    assert again.ledger.division == division
    assert division == [
        again.fetched[m][1] if blocks else [] for m, blocks in enumerate(division)
    ]


def test_blocks_that_only_a_dead_rank_may_compute():
    """Other members hold the block, but had not computed it in the recorded round."""
    ledger = Ledger([[1, 0], [2]], 0.02)
    ledger.begin(0.0)
    for member in range(2):
        ledger.arrived(member, claims=False, now=0.0)
    assert [order.blocks for order in ledger.orders(0.0)] == [[1, 0], [2]]
    ledger.lost(0)
    assert not ledger.orders(1.0)
    assert ledger.orphans == [0, 1]


@pytest.mark.parametrize("cheap", [0.5, 0.01])
def test_programs_that_are_stuck_in_cheap_blocks(cheap):
    """Closed rounds wait no longer than if all blocks cost the same, and no longer in each
    round.
    """
    members, blocks, closes = 3, 4, 0.3

    def steps(costs):
        stuck = set()
        run = World(
            spread(members, blocks, 1),
            members,
            lambda m, _: 1e8 if m in stuck else BLOCK,
            latency=lambda: 1e-4,
            empties=False,
            costs=costs,
        )
        run.run()
        stuck |= {1, 2}
        return [run.run(faults=[(closes, "close", 0)], most=1e9) for _ in range(6)]

    costs = [
        cheap if n % blocks in (0, blocks - 1) else 1.0 for n in range(members * blocks)
    ]
    equal = steps(())
    assert max(equal) < 2.5 * closes
    assert all(one < 1.1 * other for one, other in zip(steps(costs), equal))
