"""Ranks that run other versions, and data that ranks exchange in addition to messages."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from marks import SIZE, several
from mpi4py import MPI

from jaxcoded import Coded, CodedGroup, GroupMismatch
from jaxcoded.errors import CodedError
from jaxcoded.transport import agreement, build, engine

pytestmark = pytest.mark.above_the_transport

RANK = MPI.COMM_WORLD.rank
LAST = SIZE - 1


def arguments(transport):
    return {"strategy": Coded(stragglers=0), "transport": transport}


def faked(monkeypatch, name, words):
    """Make the last rank report these words instead."""
    if RANK == LAST:
        monkeypatch.setattr(build, name, lambda: words)


def works(comm, transport):
    """Check that the next group works."""
    with CodedGroup(comm, **arguments(transport)) as group:
        weights = group.batch(4).weights
        mine = jnp.full(3, weights.sum())
        total = uncounted.coded_allreduce(mine, group)
        np.testing.assert_allclose(total, 4.0)


@several
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("jaxcoded ", "jaxcoded 9."), "jaxcoded 9."),
        (("little", "big"), "big-endian numbers"),
        (("draws ", "draws x"), "random draws x"),
    ],
)
def test_another_version(comm, transport, monkeypatch, change, difference):
    required = build.required()
    others = required.replace(*change)
    assert others != required
    faked(monkeypatch, "required", others)
    with pytest.raises(GroupMismatch) as raised:
        CodedGroup(comm, **arguments(transport))
    text = str(raised.value)
    assert f"{difference}" in text.split(": ranks run different builds")[0]
    assert "install the same jaxcoded" in text
    same = ", ".join(map(str, range(LAST)))
    assert f"rank {LAST}: {others}" in text and f"{same}: {required}" in text
    monkeypatch.undo()
    works(comm, transport)


@several
def test_another_engine(comm, transport, monkeypatch):
    """Another engine matters only to groups that use the engine."""
    if RANK == LAST:
        monkeypatch.setattr(engine, "sources", lambda: "0123456789ab")
    if transport == "mpi4jax":
        works(comm, transport)
        return
    with pytest.raises(GroupMismatch, match="0123456789ab .* from different sources"):
        CodedGroup(comm, **arguments(transport))
    with pytest.raises(GroupMismatch, match="from different sources"):
        CodedGroup(comm, Coded(stragglers=0))  # the group does not fall back to mpi4jax
    monkeypatch.undo()
    works(comm, transport)


@several
def test_another_jax(comm, transport, monkeypatch):
    """Another JAX raises no error; rank 0 warns about possible consequences."""
    faked(monkeypatch, "wanted", build.wanted().replace("jax ", "jax 9.", 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works(comm, transport)
    words = [str(each.message) for each in caught if "tree_bcast" in str(each.message)]
    assert len(words) == (RANK == 0)
    if RANK == 0:
        assert "jax 9." in words[0] and "install the same JAX" in words[0]


def test_answers_of_ranks(comm):
    """Each rank sends a different text, of any kind and length."""
    mine = {"rank": RANK, "text": "ä\ud800" * 1000 * RANK, "numbers": [2**64 - 1, 0.1]}
    texts = agreement.gathered(comm, mine)
    assert [each["rank"] for each in texts] == list(range(SIZE))
    assert texts[RANK] == mine
    assert agreement.broadcast(comm, mine, root=LAST) == texts[LAST]
    assert agreement.gathered(comm, None) == [None] * SIZE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x04\x95", "cannot be read"),  # the beginning of a pickle
        (b"[" * 100_000, "cannot be read"),
        (b"0" * (agreement.LONGEST + 1), "more than 16777216"),
    ],
)
def test_unreadable_texts(comm, monkeypatch, data, words):
    """Every rank names the sender, and nothing is unpickled."""
    if RANK == LAST:
        wrong = np.frombuffer(bytearray(data), np.uint8)
        monkeypatch.setattr(agreement, "_bytes", lambda value: wrong)
    with pytest.raises(CodedError, match=f"the answer of rank {LAST} .*{words}"):
        agreement.gathered(comm, 5)
    with pytest.raises(CodedError, match=f"the answer of rank {LAST} .*{words}"):
        agreement.broadcast(comm, 5, root=LAST)
    monkeypatch.undo()
    assert agreement.broadcast(comm, RANK) == 0


def test_missing_data_is_not_read():
    """After the death of a rank Open MPI 5.0 may return from a collective without an
    error and without data.
    """

    class Alone:
        rank, size = 0, 3

        def Allgather(self, mine, lengths):
            lengths[: self.heard] = mine

        def Allgatherv(self, mine, everything):
            pass

    for heard in (0, 1, 3):
        comm = Alone()
        comm.heard = heard
        with pytest.raises(agreement.Unreadable, match="has a rank died"):
            agreement.gathered(comm, "text")


def test_nothing_is_pickled(comm, transport, monkeypatch):
    """Nothing is pickled while groups are made and used."""

    def fail(*_):
        raise AssertionError("something was pickled")

    MPI.pickle.__init__(fail, fail)
    try:
        works(comm, transport)
        with CodedGroup.auto(
            comm, payload=1e4, work=1e-3, transport=transport
        ) as group:
            assert group.planned
    finally:
        MPI.pickle.__init__()
