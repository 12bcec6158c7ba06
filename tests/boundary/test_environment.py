"""Fuzz the environment variables of launchers, schedulers and users."""

import os
import subprocess
import types

import pytest
from documents import fuzzed, outcome
from hypothesis import example, given
from hypothesis import strategies as st

from jaxcoded import Options
from jaxcoded.tools.launch import places, rank

# A variable can hold any bytes except 0, so also malformed or huge numbers.
texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from("\udc80\udcff"),
    max_size=12,
)
numbers = st.integers(-2, 9).map(str) | st.sampled_from(
    ["", "²", "٣", "1_0", " 1", "9" * 400, "9" * 5000, "65536", "4294967297", "0x1"]
)


class Unheard:
    """A socket whose other end reads nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def sendall(self, data):
        assert data.endswith(b"\n") and len(data) < 10_000

    def recv(self, _):
        return b""


def connect(address, patience):
    """Act as `socket.create_connection` to a host that always exists."""
    host, port = address
    host.encode("idna")
    if not 0 <= port < 65536:
        raise OverflowError("port must be 0-65535")
    if port == 1:
        raise ConnectionRefusedError
    assert 0 < patience < 10
    return Unheard()


@fuzzed
@given(
    st.none() | texts | st.builds("{}:{}:{}".format, texts, numbers | texts, texts),
    st.none() | texts | numbers,
    st.integers(-64, 255) | st.sampled_from(["begun", "1 ends"]),
)
@example("a:1", None, 0)
@example("a..b:2:3", None, 0)
@example("a:99999:3", None, 0)
def test_reports_of_a_ranks_end_to_any_address(told, number, code):
    """The job continues whatever the address is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.create_connection", connect)
        for name in rank._RANK:
            patch.delenv(name, raising=False)
        patch.delenv(rank.VARIABLE, raising=False)
        if told is not None:
            patch.setenv(rank.VARIABLE, told)
        if number is not None:
            patch.setenv("PMIX_RANK", number)
        rank._tell(code)


@fuzzed
@given(
    numbers | texts,
    numbers | texts,
    st.lists(texts | numbers, max_size=5).map(",".join),
)
@example("5", "2", "0,1")
@example("0", "0", "0,1")
@example("²", "²", "0")
def test_gpus_of_a_rank(number, ranks, gpus):
    """A rank gets some of the existing GPUs, or the environment does not change."""
    names = rank._LOCAL[0]
    with pytest.MonkeyPatch.context() as patch:
        for name in rank._LOCAL[1]:
            patch.delenv(name, raising=False)
        patch.setenv(names[0], number)
        patch.setenv(names[1], ranks)
        patch.setenv(rank._VISIBLE, gpus)
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
        visible = rank._visible_gpus()
        rank._divide_gpus()
        now = os.environ[rank._VISIBLE]
        assert now == gpus or (now and set(now.split(",")) <= set(visible))


tasks = st.lists(
    st.builds("{}{}".format, numbers, st.sampled_from(["", "(x", "(x3)", ")"]))
    | st.builds("{}(x{})".format, numbers, numbers)
    | texts,
    max_size=4,
).map(",".join)


@fuzzed
@given(tasks, st.binary(max_size=12) | st.just(b"a\nb\nc\n"))
@example("2(x99999999999)", b"a\nb\n")
@example(f"2(x{'9' * 5000})", b"a\nb\n")
@example("1", b"\xff\n")
def test_a_job_of_slurm(tasks, names):
    """The result has hosts with their numbers of tasks, or only hosts, or it is empty."""

    def scontrol(command, text=False, errors="strict", **_):
        words = names.decode(errors=errors) if text else names
        return types.SimpleNamespace(returncode=0, stdout=words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", scontrol)
        patch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
        patch.setenv("SLURM_TASKS_PER_NODE", tasks)
        hosts = outcome(places.of_slurm)
    if hosts is not None:
        listed = names.decode(errors="replace").split()
        each = hosts.split(",")
        assert each == ",".join(listed).split(",") or all(
            count.isascii() and count.isdigit()
            for count in (item.rpartition(":")[2] for item in each)
        )


@fuzzed
@given(
    st.sampled_from(["JAXCODED_STATUS_SIGNAL", "JAXCODED_PTRACER"]),
    st.sampled_from(["", "ON", "OFF", "on", "1"]) | texts,
)
def test_switches(name, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, text)
        found = outcome(lambda: Options().complete().validate() or True)
    assert (found is True) == (text in ("", "ON", "OFF"))
