"""`CodedGroup.auto`: all ranks agree on a plan that fits the measurements, or on the
same error.
"""

import re
import time

import jax.numpy as jnp
import numpy as np
import pytest
from marks import SIZE, engine_only, once, several
from mpi4py import MPI
from reference import assert_sum, contribution, per_example
from together import SLOWNESS
from uncounted import coded_allreduce

import jaxcoded
from jaxcoded import GroupMismatch, _parse
from jaxcoded.tools.planner import automatic, measuring, search
from jaxcoded.transport.options import PIECE

pytestmark = pytest.mark.above_the_transport

RANK = MPI.COMM_WORLD.rank


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "_SECONDS", 0.2)


def asleep(seconds):
    return lambda part: time.sleep(seconds)


def agreed(comm, group):
    outcomes = comm.allgather(
        (group.plan.to_json(), group.planned, group.options.piece_bytes)
    )
    assert len(set(outcomes)) == 1


def test_sums_are_exact(comm, transport):
    with jaxcoded.CodedGroup.auto(
        comm, payload=4e6, work=asleep(0.01), transport=transport
    ) as group:
        agreed(comm, group)
        vector = per_example(5)
        total = coded_allreduce(contribution(group, vector), group)
        assert_sum(group, total, vector)


@once
def test_no_rank_straggles(comm, transport):
    """All ranks sleep equally long, much longer than the machine's own delays."""
    with jaxcoded.CodedGroup.auto(
        comm, payload=1e4, work=asleep(0.2), transport=transport
    ) as group:
        assert group.plan.strategy.stragglers == 0
        assert SIZE == 1 or "do not code" in group.planned
        if SIZE > 1:  # seconds for 1/(N−1) of the batch
            (whole,) = re.findall(r"work (\S+ m?s) for the whole batch", group.planned)
            seconds = _parse.number_of_seconds("work", whole)
            assert (
                0.999 <= seconds / (0.2 * (SIZE - 1)) < 1.5 * SLOWNESS
            )  # three digits


@once
@pytest.mark.skipif(SIZE < 4, reason="no redundancy")
def test_one_rank_is_slow(comm, transport):
    work = asleep(2.0 if RANK == SIZE - 1 else 0.05)
    with jaxcoded.CodedGroup.auto(
        comm, payload=1e4, work=work, replicas=0, transport=transport
    ) as group:
        agreed(comm, group)
        assert group.plan.strategy.stragglers >= 1
        assert "code: " in group.planned
        why = "left out by replicas=0" if transport == "engine" else "needs the engine"
        assert (
            f"Not shared: shared work {'is ' * (transport == 'engine')}{why}"
            in group.planned
        )


@once
@pytest.mark.skipif(SIZE < 4, reason="no redundancy")
def test_one_rank_is_slow_and_shares_its_work(comm, transport):
    """The plan shares work on CPUs with the engine; otherwise it has a code."""
    work = asleep(2.0 if RANK == SIZE - 1 else 0.05)
    with jaxcoded.CodedGroup.auto(
        comm, payload=1e4, work=work, transport=transport
    ) as group:
        agreed(comm, group)
        shares = transport == "engine"
        assert group.plan.strategy.by_blocks == shares
        assert group.plan.strategy.stragglers >= 1
        assert ("share the work: " if shares else "code: ") in group.planned
        assert ("group.blocks" in group.planned) == shares


@once
@several
def test_parts_of_the_batch(comm, transport):
    parts = []
    with jaxcoded.CodedGroup.auto(
        comm, payload=1e4, work=parts.append, transport=transport
    ):
        assert set(parts) == {1 / (SIZE - 1)}


@once
def test_seconds_of_work(comm, transport, monkeypatch):
    """The seconds are the planner's, for the whole batch."""

    def best_plans(ranks, payload, work, *more, **options):
        assert (ranks, work) == (SIZE, pytest.approx(1))
        return search.best_plans(ranks, payload, work, *more, **options)

    monkeypatch.setattr(automatic, "best_plans", best_plans)
    with jaxcoded.CodedGroup.auto(
        comm, payload=1000, work=1, transport=transport
    ) as group:
        agreed(comm, group)
        assert SIZE == 1 or "work 1 s for the whole batch" in group.planned


@once
@several
def test_work_that_is_jax_and_fails_on_one_rank(comm, transport):
    def work(part):
        if RANK == SIZE - 1:
            raise OSError("no such batch")
        return jnp.ones(3) * 2

    with pytest.raises(
        RuntimeError, match=f"work failed on rank {SIZE - 1}: OSError: no such batch"
    ) as error:
        jaxcoded.CodedGroup.auto(comm, payload=1e3, work=work, transport=transport)
    assert isinstance(error.value.__cause__, OSError) == (RANK == SIZE - 1)


WRONG = [
    ({"payload": None, "work": 1}, "needs payload.*payload=None"),
    ({"payload": -4.0, "work": 1}, "payload=-4.0"),
    ({"payload": "4MB", "work": 1}, "payload='4MB'"),
    ({"payload": 1, "work": None}, "needs work.*work=None"),
    ({"payload": 1, "work": np.inf}, "work=inf"),
    ({"payload": 1, "work": 1, "replicas": -1}, "replicas must be .*, got -1"),
    (
        {"payload": 1, "work": 1, "options": jaxcoded.Options(piece_bytes=9)},
        "piece_bytes=9",
    ),
]


@once
@pytest.mark.parametrize(("wrong", "text"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(comm, transport, wrong, text):
    with pytest.raises(ValueError, match=text) as error:
        jaxcoded.CodedGroup.auto(comm, transport=transport, **wrong)
    assert len(set(comm.allgather(str(error.value)))) == 1


@once
@several
def test_more_replicas_than_other_ranks(comm, transport):
    text = (
        f"replicas=99 does not fit {SIZE} ranks: only {SIZE - 1} other ranks can hold"
    )
    with pytest.raises(ValueError, match=text):
        jaxcoded.CodedGroup.auto(
            comm, payload=1, work=1, replicas=99, transport=transport
        )


@once
@several
@pytest.mark.parametrize(
    "odd",
    [{"payload": 2}, {"work": asleep(0)}, {"replicas": 1}, {"reading": 1.0}, None],
)
def test_different_arguments(comm, transport, odd):
    mine = {"payload": 1, "work": 1}
    last = RANK == SIZE - 1
    with pytest.raises(GroupMismatch):
        if last and odd is None:
            jaxcoded.CodedGroup(comm, jaxcoded.Coded(), transport=transport)
        else:
            jaxcoded.CodedGroup.auto(
                comm, transport=transport, **(mine | odd if last else mine)
            )


@engine_only
@pytest.mark.parametrize("piece", [1, 24, 1000, PIECE])
def test_pieces_of_any_size(comm, transport, piece):
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(stragglers=0),
        transport=transport,
        options=jaxcoded.Options(piece_bytes=piece),
    ) as group:
        vector = per_example(37)
        assert_sum(group, coded_allreduce(contribution(group, vector), group), vector)


@once
@pytest.mark.parametrize("piece", [0, 2**30 + 1])
def test_pieces_of_no_size(comm, transport, piece):
    with pytest.raises(ValueError, match=f"piece_bytes must be .*, got {piece}"):
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0),
            transport=transport,
            options=jaxcoded.Options(piece_bytes=piece),
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"sections_from": 1000}, 1000),
        ({"sections_from": 0}, 0),
        ({"sections_from": 1000, "check": jaxcoded.Check("warn")}, 0),
    ],
)
# the plan may have no surplus messages to compare
@pytest.mark.filterwarnings("ignore:check=.* cannot detect every error:RuntimeWarning")
def test_the_planner_counts_on_sections_if_the_group_has_them(
    comm, transport, monkeypatch, options, expected
):
    """The hosts decide (``None``), but never with compared messages or without the
    engine.
    """
    measured, seen = automatic.Automatic.measured, []

    def recording(*arguments):
        seen.append(arguments[-1])
        return measured(*arguments)

    monkeypatch.setattr(automatic.Automatic, "measured", recording)
    if transport == "mpi4jax":
        options, expected = {**options, "check": None}, 0
    try:
        jaxcoded.CodedGroup.auto(
            comm,
            payload=1e4,
            work=1e-3,
            replicas=0,
            transport=transport,
            options=jaxcoded.Options(**options),
        ).close()
    except ValueError as error:  # for a plan without redundancy
        assert "has nothing to compare" in str(error)
    assert seen == [expected]
