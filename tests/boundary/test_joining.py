"""Fuzz the JSON that ranks exchange when processes join a group, and the joining processes' variable."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from documents import changed, damaged, fuzzed, letters, numbers, outcome, values
from hypothesis import example, given
from hypothesis import strategies as st
from mpi4py import MPI

from jaxcoded import Check, CodedError, Options
from jaxcoded.group.membership import joining, started
from jaxcoded.group.membership.channel import Channel, read
from jaxcoded.group.membership.joining import Invitation
from jaxcoded.group.membership.messages import (
    Asks,
    Invites,
    Ready,
    TakenIn,
    Tells,
    Verdict,
    Wants,
)
from jaxcoded.group.membership.old_ranks import OldRanks
from jaxcoded.transport.agreement import LONGEST, plain

TAG = 7
INVITATION = Invitation(3, 2, 2, 4, Options(check=Check("warn")))
VERDICT = Verdict("they have not", True, "0123456789abcdef")
# the contents of a message
MESSAGES = [
    Asks("a visit"),
    Wants("a visit", "another", "ranks=2"),
    Tells("a visit", VERDICT),
    Ready("its MPI is not fault-tolerant"),
    Invites(INVITATION, ["python", "train.py", ""]),
    TakenIn(),
]
ODD = [b"[" * 100_000, b"NaN", b"9" * 5000, b"\x80\x04\x95", b"", b"null"]
messages = pytest.mark.parametrize(
    "message", MESSAGES, ids=lambda value: type(value).__name__
)


def said(message):
    """Return a message as JSON."""
    fields = plain(dataclasses.asdict(message))
    return {"kind": type(message).__name__, "fields": fields}


@contextlib.contextmanager
def a_channel(data, kind):
    """Return a channel on which this rank has sent itself these bytes."""
    comm = MPI.COMM_SELF.Dup()
    sent = np.frombuffer(bytearray(data), np.uint8)
    request = comm.Isend(sent, 0, TAG)
    try:
        yield Channel(comm, TAG, (kind,), who=lambda rank: f"number {rank}")
    finally:
        status = MPI.Status()
        if comm.Iprobe(0, TAG, status):  # no rank has read the message
            comm.Recv(np.zeros(status.Get_count(), np.uint8), 0, TAG)
        request.Wait()
        comm.Free()


def heard(channel):
    while (message := channel.heard(0)) is None:
        pass
    return message


@messages
def test_sent_messages_arrive(message):
    comm = MPI.COMM_SELF.Dup()
    channel = Channel(comm, TAG, (type(message),))
    channel.say(0, message)
    assert heard(channel) == message
    comm.Free()


def sound(message):
    """Return whether another rank may send this message."""
    if isinstance(message, Tells):
        verdict = message.verdict
        assert type(message.visit) is str and type(verdict.same) is bool
        assert type(verdict.why_not) is type(verdict.token) is str
        assert not list(started._marked(verdict.token))
    elif isinstance(message, Invites):
        invitation, command = message.invitation, message.command
        assert 0 <= invitation.root < invitation.size
        assert 1 <= invitation.ranks <= joining.MOST
        assert 0 <= invitation.place < invitation.size + invitation.ranks
        assert command and all(type(word) is str for word in command)
        invitation.options.complete().validate()
    else:
        assert {type(value) for value in vars(message).values()} <= {str}
    return True


@messages
def test_messages_are_valid_or_an_error(message):
    """Reading gives a valid object, or an error that names the sender."""

    @fuzzed
    @given(
        changed(said(message)).map(lambda value: json.dumps(value).encode())
        | damaged(json.dumps(said(message)).encode())
        | st.sampled_from(ODD)
    )
    @example(
        b'{"kind": "Tells", "fields": {"visit": "\\ud800", "verdict": {"why_not": "", "same": true, "token": "\\ud800"}}}'
    )
    def check(data):
        with a_channel(data, type(message)) as channel:
            found = outcome(heard, channel, errors=(CodedError,))
        assert found is None or sound(found)

    check()


@messages
@pytest.mark.parametrize("data", [*ODD, b"{}", b"3", b'{"kind": "Call", "fields": {}}'])
def test_errors_name_the_sender_of_unreadable_messages(message, data):
    words = "a message of number 0 about ranks that join cannot be read: .*do all ranks run the same"
    with (
        a_channel(data, type(message)) as channel,
        pytest.raises(CodedError, match=words),
    ):
        heard(channel)


def test_a_message_that_is_too_long_is_not_received():
    words = f"a message of number 0 .* cannot be read: {LONGEST + 1} bytes, not 0 to {LONGEST}"
    with a_channel(b"0" * (LONGEST + 1), Ready) as channel:
        for _ in range(2):
            with pytest.raises(CodedError, match=words):
                heard(channel)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 0}, "ranks must be an integer from 1 to 32768, got 0"),
        ({"size": True}, "size must be an integer >= 1, got True"),
        ({"place": 5}, "place must be an integer from 0 to 4, got 5"),
        ({"options": {}}, r"Options must have the fields .*, got \[\]"),
        ({"more": 1}, "Invitation must have the fields"),
    ],
)
def test_invalid_invitations(changes, words):
    with pytest.raises(ValueError, match=words):
        read(Invitation, plain(dataclasses.asdict(INVITATION)) | changes).check()


def test_other_ranks_than_invited():
    with pytest.raises(
        CodedError, match="2 ranks should join 3 ranks, but together there are 1 ranks"
    ):
        INVITATION.own(MPI.COMM_SELF)


# The starter


class Starting:
    """A group of this rank and other ranks, each of which answers a question once."""

    rank = 0

    def __init__(self, answers):
        self.size, self._answers = 1 + len(answers), answers
        self._coming, self.said = {}, {rank: [] for rank in range(1, self.size)}

    def Isend(self, data, to, _):
        kind, fields = json.loads(data.tobytes()).values()
        if kind == "Asks":
            visit = fields["visit"].encode()
            self._coming[to] = self._answers[to - 1].replace(b"VISIT", visit)
        else:
            self.said[to].append((kind, fields))
        return MPI.REQUEST_NULL

    def Iprobe(self, rank, _, status):
        status.Set_elements(MPI.BYTE, len(self._coming.get(rank, b"")))
        return rank in self._coming

    def Irecv(self, data, rank, _):
        data[:] = np.frombuffer(self._coming.pop(rank), np.uint8)
        return MPI.REQUEST_NULL


def asked(answers):
    """Return what the starter tells the other ranks, and what it concludes itself."""
    comm = Starting(answers)
    ranks = OldRanks(comm, ["a"] * comm.size, 0)
    ranks.ask("ranks=2", 0, [], seconds=0.0)
    return ranks.verdict, comm.said


RIGHT = said(Wants("VISIT", "its", "ranks=2"))
answers = (
    st.just(RIGHT).map(lambda value: json.dumps(value).encode())
    | changed(RIGHT).map(lambda value: json.dumps(value).encode())
    | damaged(json.dumps(RIGHT).encode())
    | st.sampled_from(ODD)
)


@fuzzed
@given(st.lists(answers, min_size=1, max_size=3))
def test_answers_to_the_starter(answers):
    """Processes start only if all ranks make equal requests. Otherwise each rank that answered gets the reason."""
    verdict, sent = asked(answers)
    if not verdict.why_not:
        words = {json.loads(answer)["fields"]["words"] for answer in answers}
        assert words == {"ranks=2"}
    for messages in sent.values():
        assert [fields["verdict"] for _, fields in messages] in (
            [],
            [dataclasses.asdict(verdict)],
        )


def test_a_rank_whose_answer_cannot_be_read():
    right = json.dumps(RIGHT).encode()
    wrong = right.replace(b'"its"', b"3")
    verdict, sent = asked([right, wrong])
    assert "a message of rank 2 about ranks that join cannot be read" in verdict.why_not
    assert "visit of Wants must be of type str, got 3" in verdict.why_not
    (first,), second = sent[1], sent[2]
    assert first == ("Tells", dataclasses.asdict(Tells("its", verdict)))
    assert second == []
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
    with pytest.raises(CodedError, match="the seconds in JAXCODED_JOINS must"):
        started.awaited()


@fuzzed
@given(values)
def test_nothing_else_is_a_verdict(said):
    assert outcome(read, Verdict, said) is None
