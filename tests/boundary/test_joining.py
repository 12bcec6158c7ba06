"""What ranks say to each other where processes join a group, in JSON, and a variable of their environment."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from documents import changed, damaged, fuzzed, letters, numbers, outcome, values
from hypothesis import example, given
from hypothesis import strategies as st
from mpi4py import MPI

from jaxcoded import CodedError, Options
from jaxcoded.group.membership import joining, new_rank, old_ranks, started
from jaxcoded.group.membership.channel import Line
from jaxcoded.group.membership.joining import Invitation
from jaxcoded.group.membership.old_ranks import OldRanks, Verdict
from jaxcoded.transport.agreement import LONGEST, plain

TAG = 7
INVITATION = plain(Invitation(3, 2, 4, Options()).to_json())
VERDICT = dataclasses.asdict(Verdict("they have not", True, "0123456789abcdef"))
# what is said, by which reader
SAID = {
    old_ranks._told: ["a visit", VERDICT],
    old_ranks._wanted: ["a visit", "another", "ranks=2"],
    old_ranks._word: "its MPI is not fault-tolerant",
    new_rank._invited: [2, INVITATION, ["python", "train.py", ""]],
    new_rank._taken_in: True,
}
ODD = [b"[" * 100_000, b"NaN", b"9" * 5000, b"\x80\x04\x95", b"", b"null"]
readers = pytest.mark.parametrize("read", SAID, ids=lambda it: it.__name__)


@contextlib.contextmanager
def a_line(data):
    """A line on which these bytes come from this rank itself."""
    comm = MPI.COMM_SELF.Dup()
    sent = np.frombuffer(bytearray(data), np.uint8)
    request = comm.Isend(sent, 0, TAG)
    try:
        yield Line(comm, TAG, lambda rank: f"number {rank}")
    finally:
        status = MPI.Status()
        if comm.Iprobe(0, TAG, status):  # nobody has read it
            comm.Recv(np.zeros(status.Get_count(), np.uint8), 0, TAG)
        request.Wait()
        comm.Free()


def heard(line, read):
    while (what := line.heard(0, read)) is None:
        pass
    return what


@readers
def test_what_is_said_is_read(read):
    with a_line(json.dumps(SAID[read]).encode()) as line:
        found = heard(line, read)
    if read is old_ranks._told:
        assert found == ("a visit", Verdict(**VERDICT))
    elif read is new_rank._invited:
        invitation = Invitation(3, 2, 4, Options())
        assert found == (2, invitation, ["python", "train.py", ""])
    else:
        said = SAID[read]
        assert found == (tuple(said) if isinstance(said, list) else said)


def sound(read, found):
    """Whether it is what the others may say."""
    if read is old_ranks._told:
        visit, verdict = found
        assert type(visit) is str
        if verdict is not None:
            assert type(verdict.same) is bool
            assert type(verdict.why_not) is type(verdict.token) is str
            assert not list(started._marked(verdict.token))
    elif read is old_ranks._wanted:
        assert list(map(type, found)) == [str] * 3
    elif read is new_rank._invited:
        root, invitation, command = found
        assert 0 <= root < invitation.size and 1 <= invitation.ranks <= joining.MOST
        assert 0 <= invitation.place < invitation.size + invitation.ranks
        assert command and all(type(word) is str for word in command)
        invitation.options.complete().check()
    else:
        assert type(found) is (str if read is old_ranks._word else bool)
    return True


@readers
def test_what_may_be_said(read):
    """A valid object, or an error that says whose words these are."""

    @fuzzed
    @given(
        changed(SAID[read]).map(lambda it: json.dumps(it).encode())
        | damaged(json.dumps(SAID[read]).encode())
        | st.sampled_from(ODD)
    )
    @example(b'["\\ud800", {"why_not": "", "same": true, "token": "\\ud800"}]')
    def check(data):
        with a_line(data) as line:
            found = outcome(heard, line, read, errors=(CodedError,))
        assert found is None or sound(read, found)

    check()


@readers
@pytest.mark.parametrize("data", [*ODD, b"{}", b"3"])
def test_whose_words_cannot_be_read(read, data):
    words = (
        "what number 0 says of ranks that join cannot be read: .*do all run the same"
    )
    with a_line(data) as line, pytest.raises(CodedError, match=words):
        heard(line, read)


def test_what_is_too_long_is_not_received():
    words = f"number 0 says .* cannot be read: {LONGEST + 1} bytes, not 0 to {LONGEST}"
    with a_line(b"0" * (LONGEST + 1)) as line:
        for _ in range(2):
            with pytest.raises(CodedError, match=words):
                heard(line, old_ranks._word)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 0}, "ranks must be an integer from 1 to 32768, got 0"),
        ({"size": True}, "size must be an integer >= 1, got True"),
        ({"place": 5}, "place must be an integer from 0 to 4, got 5"),
        ({"options": {}}, r"options has the fields .*, got \[\]"),
        ({"more": 1}, "an invitation has the fields"),
    ],
)
def test_what_is_no_invitation(changes, words):
    with pytest.raises(ValueError, match=words):
        Invitation.from_json(INVITATION | changes)


def test_others_than_were_invited():
    with pytest.raises(CodedError, match="2 ranks were to join 3, but there are 1"):
        Invitation.from_json(INVITATION).own(MPI.COMM_SELF, 0)


# The starter


class Starting:
    """A group of this rank and others, each of which says something once it is asked."""

    rank = 0

    def __init__(self, answers):
        self.size, self._answers = 1 + len(answers), answers
        self._coming, self.said = {}, {rank: [] for rank in range(1, self.size)}

    def Isend(self, data, to, _):
        self.said[to].append(json.loads(data.tobytes()))
        visit, verdict = self.said[to][-1]
        if verdict is None:
            self._coming[to] = self._answers[to - 1].replace(b"VISIT", visit.encode())
        return MPI.REQUEST_NULL

    def Iprobe(self, rank, _, status):
        status.Set_elements(MPI.BYTE, len(self._coming.get(rank, b"")))
        return rank in self._coming

    def Irecv(self, data, rank, _):
        data[:] = np.frombuffer(self._coming.pop(rank), np.uint8)
        return MPI.REQUEST_NULL


def asked(answers):
    """What the starter says to them, and finds itself."""
    comm = Starting(answers)
    ranks = OldRanks(comm, ["a"] * comm.size, 0, agreed=lambda mine: mine)
    ranks.ask("ranks=2", 0, [], seconds=0.0)
    told = {rank: said[1:] for rank, said in comm.said.items()}
    return ranks.verdict, told


RIGHT = ["VISIT", "its", "ranks=2"]
answers = (
    st.just(RIGHT).map(lambda it: json.dumps(it).encode())
    | changed(RIGHT).map(lambda it: json.dumps(it).encode())
    | damaged(json.dumps(RIGHT).encode())
    | st.sampled_from(ODD)
)


@fuzzed
@given(st.lists(answers, min_size=1, max_size=3))
def test_what_the_starter_is_answered(answers):
    """Nobody starts anything unless all want the same, and who has been heard is told why."""
    verdict, told = asked(answers)
    if not verdict.why_not:
        assert [json.loads(it)[2] for it in answers] == ["ranks=2"] * len(answers)
    for said in told.values():
        assert [it for _, it in said] in ([], [dataclasses.asdict(verdict)])


def test_a_rank_whose_answer_cannot_be_read():
    right = json.dumps(RIGHT).encode()
    verdict, told = asked([right, b'["VISIT", 3, ""]'])
    assert "what rank 2 says of ranks that join cannot be read" in verdict.why_not
    assert "visit of what a rank wants must be of type str, got 3" in verdict.why_not
    assert told == {1: [["its", dataclasses.asdict(verdict)]], 2: []}
    verdict, _ = asked([right, right])
    assert verdict == Verdict()


# A process that was started


@fuzzed
@given(
    st.none()
    | st.builds("{}{}{}".format, letters, st.sampled_from([":", "", "::"]), numbers)
    | st.sampled_from(["a:1e400", "a:nan", "a:٣", "a:1_0", "a:-1", "a:9e99", ":" * 9])
)
def test_how_long_others_wait(said):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(started.MARK, raising=False)
        if said is not None:
            patch.setenv(started.MARK, said.replace("\0", ""))
        seconds = outcome(started.awaited, errors=(CodedError,))
    assert seconds is None or 0 < seconds <= joining.LONGEST


@pytest.mark.parametrize("seconds", [0.0, 0.4, 60, 1234.5, joining.LONGEST])
def test_the_variable_is_read_as_it_is_written(monkeypatch, seconds):
    monkeypatch.setenv(started.MARK, started.mark("abc", seconds))
    assert started.awaited() == max(round(seconds), 1)
    monkeypatch.setenv(started.MARK, "abc:soon")
    with pytest.raises(CodedError, match="JAXCODED_JOINS says behind its colon must"):
        started.awaited()


@fuzzed
@given(values)
def test_nothing_else_is_a_verdict(said):
    assert outcome(Verdict.from_json, said) is None
