"""The rules of work sharing keep every sum exact and let every round end, and each rule
is needed.
"""

import random

import pytest
from cases import every, more
from explore import Wrong, after, explore, run
from hypothesis import given, settings
from hypothesis import strategies as st
from model import Model, Rules

ALL = frozenset({0, 1})
ONE, TWO = (ALL,), (ALL, ALL)  # blocks that both of two ranks hold
VECTORS = pytest.mark.parametrize("lends", [True, False], ids=["lent", "handed over"])


@pytest.mark.slow
@VECTORS
@pytest.mark.parametrize(
    "holders, faults",
    every(
        2,
        [
            (ONE, {"stops": 1}),
            (ONE, {"deaths": 1}),
            (ONE, {"suspicions": 1}),
            (TWO, {"recalls": 1}),
            (TWO, {"recalls": 0, "deaths": 1}),
            ((ALL, frozenset({0})), {"recalls": 0, "stops": 1}),
            (TWO, {"expected": (0, 1)}),
            (ONE, {"expected": (0,), "suspicions": 1}),
            (TWO, {"expected": (0, 1), "recalls": 0, "stops": 1}),
            (TWO, {"expected": (0, 1), "asks": (1,), "recalls": 0, "deaths": 1}),
            (TWO, {"expected": (0,), "asks": (1,), "recalls": 0, "suspicions": 1}),
            (TWO, {"expected": (0,), "recalls": 0, "stops": 1}),
        ],
    ),
)
def test_every_schedule(holders, faults, lends):
    states = explore(Model(holders, 2, lends=lends), **faults)
    assert states > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, holders, faults, lends",
    [
        ("refuse", TWO, {"expected": (0,), "recalls": 0}, True),
        ("refuse", TWO, {"expected": (0, 1), "recalls": 0, "suspicions": 1}, False),
        ("count_added", TWO, {}, True),
        ("generations", ONE, {"suspicions": 1}, True),
        ("versions", TWO, {"recalls": 0, "deaths": 1}, True),
        ("keep_added", TWO, {}, True),
        ("keep_running", TWO, {}, True),
        ("drop_running", TWO, {}, True),
        ("empty", ONE, {"recalls": 0, "suspicions": 1}, True),
        ("wait", TWO, {"recalls": 0, "deaths": 1}, True),
        ("stay", TWO, {"recalls": 0, "deaths": 1}, True),
        ("out", ONE, {"recalls": 0, "suspicions": 1}, False),
        ("hold", TWO, {"recalls": 0, "deaths": 1}, False),
    ],
)
def test_without_a_rule_some_schedule_is_wrong(rule, holders, faults, lends):
    rules = Rules(**{rule: False})
    with pytest.raises(Wrong):
        explore(Model(holders, 2, rules=rules, lends=lends), **faults)


@pytest.mark.slow
@VECTORS
@pytest.mark.parametrize(
    "holders, pieces, faults",
    [
        (ONE, 2, {"recalls": 0}),
        (ONE, 1, {"deaths": 1}),
        ((frozenset({1}),), 1, {"recalls": 0, "stops": 1}),
        (ONE, 1, {"expected": (0,), "recalls": 0}),
        (ONE, 1, {"expected": (0,), "asks": (1,), "deaths": 1}),
        more(TWO, 1, {"recalls": 0}),
        more(TWO, 1, {"expected": (0, 1), "recalls": 0}),
    ],
)
def test_every_schedule_with_a_deadline(holders, pieces, faults, lends):
    """The sum may lack a part of the batch, but the same part in all pieces."""
    model = Model(holders, 2, pieces, lends=lends, approximates=True)
    assert explore(model, **faults) > 100


@pytest.mark.parametrize("rule", ["grant_nothing", "restart"])
def test_with_a_deadline_and_without_a_rule_some_schedule_is_wrong(rule):
    rules = Rules(**{rule: False})
    with pytest.raises(Wrong, match="of different blocks"):
        explore(Model(ONE, 2, 2, rules, approximates=True), recalls=0)


def test_a_chosen_rank_dies_before_its_vector_is_fetched():
    """All ranks are done; the other rank computes the dead rank's blocks again."""
    model = Model(TWO, 2)
    granted = ["parent grants 0 to 0", "0 hears", "parent grants 1 to 1", "1 hears"]
    computed = ["0 computes", "0 has", "1 computes", "1 has", *["parent hears"] * 4]
    asked = ["parent asks 0", "parent asks 1", "1 dies", "parent gives up 1"]
    state = after(model, granted + computed + asked, recalls=0, deaths=1)
    assert state.free == {1}
    explore(model, state)


def test_a_silent_rank_wakes_up_and_its_old_vector_arrives():
    """The rank holds both blocks; the other rank has computed one of them again by
    then.
    """
    model = Model(TWO, 2)
    both = ["parent grants 0 to 1", "parent grants 1 to 1", "1 hears", "1 hears"]
    computed = ["1 computes", "1 has", "1 computes", "1 has", *["parent hears 1"] * 4]
    asked = ["parent asks 1", "1 is asked", "1 stops", "parent gives up 1"]
    again = ["parent grants 0 to 0", "0 hears", "0 computes", "0 has", "1 wakes up"]
    state = after(model, both + computed + asked + again, recalls=0, stops=1)
    assert any(message[0] == "piece" for message in state.up[1])
    explore(model, state)


def test_a_grant_is_on_its_way_while_its_rank_is_done():
    model = Model(TWO, 2)
    first = ["parent grants 0 to 1", "1 hears", "1 computes", "1 has"]
    state = after(model, [*first, "parent grants 1 to 1", "parent hears 1"], recalls=1)
    assert state.down[1]
    assert not model.sealed(state.accounts[1])
    explore(model, state)


@VECTORS
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 5),
    replicas=st.integers(1, 3),
    approximates=st.booleans(),
)
def test_random_schedules(lends, seed, ranks, replicas, approximates):
    blocks = ranks * 2
    holders = tuple(
        frozenset(
            {b % ranks} | {(b + 1 + i + b // ranks) % ranks for i in range(replicas)}
        )
        for b in range(blocks)
    )
    model = Model(holders, ranks, pieces=2, lends=lends, approximates=approximates)
    rng = random.Random(seed)
    expected = tuple(r for r in range(ranks) if rng.random() < 0.8)
    asks = tuple(r for r in range(ranks) if rng.random() < 0.2)
    run(
        model,
        seed,
        recalls=4 * blocks,
        stops=3,
        deaths=2,
        suspicions=3,
        expected=rng.choice([None, expected]),
        asks=asks,
    )
