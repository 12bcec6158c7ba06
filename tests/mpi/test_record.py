"""Record a run's ledger and replay it: the bits are the same, although other ranks are late."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from marks import SIZE, engine_only, several
from mpi4py import MPI
from together import finish, wait_for_all

import jaxcoded
from jaxcoded.errors import CodedError, GroupMismatch

pytestmark = [engine_only, pytest.mark.ranks(4)]

RANK = MPI.COMM_WORLD.rank
WORK = jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=3)
BATCH, WIDTH, STEPS = 45, 6, 4
SLEEP = 0.02  # seconds for a block

# Numbers of such different sizes that the order of summation shows.
random = np.random.default_rng(5)
EXAMPLES = np.float32(
    random.normal(size=(BATCH, WIDTH)) * 10.0 ** random.uniform(-4, 4, (BATCH, WIDTH))
)


@pytest.fixture
def file(comm, tmp_path):
    """Return a path where rank 0 may write, under the same name on all ranks."""
    return comm.bcast(tmp_path / "record")


class Sleeps:
    """The seconds that this rank sleeps in each of its blocks, different in every run."""

    def __init__(self, run):
        self.draw = np.random.default_rng([run, RANK]).choice
        self.run = run

    def __call__(self, step):
        slow = (step + self.run) % SIZE == RANK
        return SLEEP * self.draw([0.2, 1]) * (4 if slow else 1)


def steps(group, run):
    """Return the sums of some rounds in jit and on the host, as bytes."""
    sleeps, step = Sleeps(run), 0

    def nap(x):
        time.sleep(sleeps(step))
        return x

    def loss(w, x):
        x = jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x @ w

    part = group.batch(BATCH)
    compute = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=False))
    w, mine, sums = jnp.ones(WIDTH, jnp.float32), EXAMPLES[part.indices], []
    for step in range(STEPS):
        _, grad = finish(compute(w, part.of(mine)))
        sums.append(np.asarray(grad).tobytes())
        total = np.zeros(WIDTH, np.float32)
        with group.blocks(BATCH) as blocks:
            for block in blocks:
                time.sleep(sleeps(step))
                for row in EXAMPLES[block.indices]:
                    total += row
        sums.append(uncounted.allreduce(total, group).tobytes())
    return sums


def made(comm, transport, **arguments):
    return jaxcoded.CodedGroup(comm, WORK, transport=transport, **arguments)


def test_equal_bits_twice(comm, transport, file):
    with made(comm, transport, record=file) as group:
        recorded = steps(group, run=0)
    others = []
    for run in (1, 2) if SIZE > 1 else ():
        with made(comm, transport) as group:
            others.append(steps(group, run))
    if SIZE > 1:  # a test with one rank shows nothing
        assert any(sums != recorded for sums in others)
    again = file.with_name("again")
    with made(comm, transport, replay=file, record=again) as group:
        assert steps(group, run=3) == recorded
    if RANK == 0:
        assert again.read_bytes() == file.read_bytes()


@pytest.fixture
def recorded(comm, transport, file):
    """Record two rounds on the host."""
    with made(comm, transport, record=file) as group:
        added_up(group, BATCH)
    return file


def added_up(group, batch_size):
    total = np.zeros(WIDTH, np.float32)
    with group.blocks(batch_size) as blocks:
        for block in blocks:
            total += EXAMPLES[block.indices].sum(0)
    return uncounted.allreduce(total, group)


def test_rounds_that_are_not_recorded(comm, transport, recorded):
    """A round that is not recorded raises an error on all ranks, and counts as a round."""
    with made(comm, transport, replay=recorded) as group:
        with pytest.raises(
            CodedError, match="of a batch of 45; replay= needs the same"
        ):
            added_up(group, BATCH - 1)
        with pytest.raises(CodedError, match="the record ends with round 1"):
            added_up(group, BATCH)


@pytest.fixture
def of_owners(comm, recorded):
    """Record rounds without late ranks: every rank has computed its own blocks."""
    if RANK == 0:
        head, *rounds = map(json.loads, recorded.read_text().splitlines())
        plan = jaxcoded.Plan.from_json(json.dumps(head["plan"]))
        owners = [ranks[0] for ranks in plan.placement.holders]
        for of_round in rounds:
            of_round["blocks"] = [
                [block for block, owner in enumerate(owners) if owner == rank]
                for rank in range(SIZE)
            ]
        lines = map(json.dumps, [head, *rounds])
        recorded.write_text("".join(f"{line}\n" for line in lines))
    wait_for_all(comm)
    return recorded


@several
def test_a_rank_that_computed_is_missing(comm, transport, of_owners):
    """The other ranks get an error, although they hold the missing rank's data."""
    with made(comm, transport, replay=of_owners) as group:
        wait_for_all(comm)
        if RANK == SIZE - 1:
            with (
                pytest.raises(CodedError, match="left before its end"),
                group.blocks(BATCH) as blocks,
            ):
                for _ in blocks:
                    break
        else:
            with pytest.raises(CodedError, match="needs every rank that computed"):
                added_up(group, BATCH)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"strategy": jaxcoded.Uncoded(), "record": "r"},
            "record='r' needs a group that shares its work",
        ),
        ({"record": "r", "replay": "r"}, "the same file"),
        ({"record": 3}, "record must be the path of a file, got 3"),
        ({"record": "/nowhere/r"}, "rank 0: FileNotFoundError"),
        ({"replay": "/nowhere/r"}, "rank 0: FileNotFoundError"),
        ({"record": "/dev/full"}, "No space left on device"),
    ],
)
def test_invalid_arguments(comm, transport, arguments, words):
    arguments = {"strategy": WORK} | arguments
    with pytest.raises((CodedError, ValueError, TypeError), match=re.escape(words)):
        jaxcoded.CodedGroup(comm, transport=transport, **arguments)


def test_a_record_of_another_plan(comm, transport, recorded):
    with pytest.raises(CodedError, match="the record of another plan"):
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=2),
            transport=transport,
            replay=recorded,
        )


@several
def test_ranks_that_name_other_files(comm, transport, file):
    with pytest.raises(GroupMismatch, match="different arguments"):
        made(comm, transport, record=f"{file}{RANK}")
