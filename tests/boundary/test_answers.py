"""Fuzz the JSON that ranks send each other, and the answers of ranks that a command has started."""

import json
import socket

import numpy as np
import pytest
from documents import changed, damaged, fuzzed, outcome, values
from hypothesis import example, given
from hypothesis import strategies as st
from test_doctor import RANK

from jaxcoded.errors import CodedError
from jaxcoded.tools.cli import doctor
from jaxcoded.tools.doctor.findings import BAD, Finding
from jaxcoded.tools.launch import asking, ends, job, launcher
from jaxcoded.transport import agreement

SAID = [{"host": "a", "ports": [1, 2.5]}, "text", None, -1]
documents = damaged(
    st.sampled_from(SAID).map(json.dumps).map(str.encode)
    | st.sampled_from([b"[" * 100_000, b"NaN", b"9" * 5000, b"\x80\x04\x95", b""])
)
sizes = st.none() | st.integers(-2, 20) | st.sampled_from([2**24 + 1, 2**62, -(2**63)])


class Ranks:
    """A communicator whose other ranks send given bytes, and the number of these
    bytes."""

    rank = 0

    def __init__(self, text):
        self._said, self.size = text, 1 + len(text)

    def Allgather(self, mine, sizes):
        sizes[0] = mine[0]
        for rank, (data, size) in enumerate(self._said, 1):
            sizes[rank] = len(data) if size is None else size

    def Allgatherv(self, mine, everything):
        room, (counts, _), _ = everything
        texts = [mine.tobytes(), *(data for data, _ in self._said)]
        parts = [data[:count].ljust(count, b"\0") for data, count in zip(texts, counts)]
        room[:] = np.frombuffer(b"".join(parts), np.uint8)


@fuzzed
@given(st.lists(st.tuples(documents, sizes), min_size=1, max_size=3))
def test_answers_of_ranks(said):
    """The result holds this rank's answer, or the error names the unreadable rank."""
    found = outcome(agreement.gathered, Ranks(said), SAID, errors=(CodedError,))
    if found is not None:
        assert len(found) == 1 + len(said) and found[0] == SAID
        for (data, size), value in zip(said, found[1:]):
            assert repr(json.loads(data[:size])) == repr(value)


answers = st.lists(
    st.sampled_from(["sum", " of ", ", ", "f8[2, 3]", "(", "]", "x"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@fuzzed
@given(st.lists(answers, min_size=2, max_size=4))
def test_differences(answers):
    """Each reported difference is a part of some rank's answer."""
    for answer, words in zip(answers, agreement.differences(answers), strict=True):
        assert words == "nothing" or words in answer


# Ranks that doctor and bench have started

MPIRUN = launcher.Launcher("mpirun", launcher.OPEN_MPI, 5)
FOUND = [RANK | {"rank": rank} for rank in range(2)]
NOISE = [b"", b"a warning\n", b"\xff\xfe\x85", asking._MARK.encode(), b"\0" * 50]


def asked(printed, status):
    """Return what the command reports for a job with this output and exit status."""

    def play(*_, output, **__):
        output.flush()
        output.buffer.write(printed)
        output.buffer.flush()
        return job.End(status, status == job.TOO_LONG)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "play", play)
        return outcome(
            lambda: [asking.answered(MPIRUN, 2, ["-c", ""])], errors=(asking.NoAnswer,)
        )


def lines(document):
    """Draw the lines that rank 0 prints, with other lines between them."""
    text = st.one_of(
        changed(document).map(json.dumps),
        damaged(json.dumps(document).encode()).map(
            lambda value: value.decode(errors="replace")
        ),
        st.sampled_from(["[" * 100_000, "9" * 5000, "NaN", "", "\ud800"]),
    ).map(lambda value: f"{asking._MARK}{value}\n".encode(errors="replace"))
    noise = st.sampled_from(NOISE)
    return st.tuples(noise, text, noise).map(b"".join)


@fuzzed
@given(lines(SAID), st.sampled_from([0, 0, 0, 1, job.TOO_LONG]))
def test_what_a_job_prints(printed, status):
    found = asked(printed, status)
    assert found is None or status == 0


@fuzzed
@given(changed(FOUND) | values)
@example([])
@example([{}, {}])
def test_doctor_reads_findings(everything):
    """Findings that are not a list of objects count as a bad finding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "answered", lambda *_, **__: everything)
        found = list(doctor._tried(2, MPIRUN, {}))
    assert found and all(isinstance(each, Finding) for each in found)
    assert all(type(each.found) is str and len(each.found) < 6000 for each in found)
    right = isinstance(everything, list) and len(everything) == 2
    assert right or any(each.state == BAD for each in found)


def test_doctor_reads_findings_of_another_jaxcoded():
    everything = [{"rank": 0, "host": "a"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "answered", lambda *_, **__: everything)
        (found,) = doctor._tried(2, MPIRUN, {})
    assert found.state == BAD and "install the same jaxcoded" in found.remedy


# A rank's end

TOKEN = "0123456789abcdef"


class Line:
    """A socket that accepts callers with given messages, and then no more callers."""

    def __init__(self, text):
        self._said = list(text)

    def getsockname(self):
        return "127.0.0.1", 5

    def accept(self):
        if not self._said:
            raise OSError
        here, there = socket.socketpair()
        there.sendall(self._said.pop(0))
        there.shutdown(socket.SHUT_WR)
        there.close()
        return here, None


words = st.sampled_from(
    [TOKEN, "0", "1", "-1", "-9", "begun", "ends", "٣", "²", "9" * 150, "-" + "9" * 150]
)
callers = st.one_of(
    st.binary(max_size=30),
    st.lists(words | st.text(max_size=4), max_size=5).map(
        lambda item: " ".join([TOKEN, *item, "\n"]).encode(errors="replace")
    ),
    damaged(f"{TOKEN} 1 -9 ends\n".encode()),
    st.just(b"x" * 10_000),
)


@fuzzed
@given(st.lists(callers, max_size=4))
@example([b"x" * 10_000, f"{TOKEN} 1 -9 ends\n".encode()])
def test_reports_of_ranks_ends(said):
    """Only callers with the token can report a rank's end, and all callers are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_hex", lambda _: TOKEN)
        heard = ends.Ends(4, Line(said), "127.0.0.1", near=True, sure=True)
    heard.hear()
    if not any(TOKEN.encode() in each for each in said):
        assert not heard.heard_any and not heard.of_job.is_set()
    assert heard.failure >= 0
    assert all(0 < len(line) < 1000 for line in heard.words())
    if f"{TOKEN} 1 -9 ends\n".encode() in said:
        assert 1 in heard.ended and heard.of_job.is_set()
