"""Processes started to join are found by their environment."""

import os
import subprocess
import sys
import time
import uuid

import pytest
from launch import slowness

from jaxcoded import CodedError
from jaxcoded.group.membership import joining, started
from jaxcoded.tools.launch import launcher, rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

# as a wrapper does: first a child with the same command, and then with another
PROGRAM = """
import os, sys, time
child = os.fork()
if child == 0:
    time.sleep(0.3)
    os.execvp("sleep", ["sleep", "1000"])
if sys.argv[1] == "waits":
    os.waitpid(child, 0)
else:
    sys.stdin.read()
    os.kill(child, 9)
"""


@pytest.fixture
def one():
    """Return a token that only this test has, as other tests may run at the same time."""
    return uuid.uuid4().hex


@pytest.fixture
def start():
    processes = []

    def begin(token, how="waits"):
        job = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdin=subprocess.PIPE,
            env=os.environ | {started.MARK: f"{token}:60"},
            start_new_session=True,
        )
        processes.append(job)
        return job

    yield begin
    for job in processes:
        job.kill()
        job.communicate()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(started, "_LOOKS", 0.0)


def looks(process, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        process.look()
        time.sleep(0.01)


def test_a_process_that_becomes_another_program_has_not_ended(start, one):
    job = start(one)
    other = start(one + "two", "ends")
    process = started.Started(one)
    looks(process, 0.5 + 0.5 * slowness())
    other.communicate()
    looks(process, 0.1)
    assert job.poll() is None and {each.pid for each in process._seen} == {job.pid}


def test_ended_processes_are_noticed(start, one):
    process = started.Started(one)
    start(one)
    job = start(one, "ends")
    until = time.monotonic() + 60 * slowness()
    while len(process._seen) < 2:
        assert time.monotonic() < until
        process.look()
    job.stdin.close()
    with pytest.raises(CodedError, match="has ended before"):
        looks(process, 60 * slowness())


@pytest.mark.parametrize("wrapped", [False, True])
def test_all_are_ended(start, one, monkeypatch, wrapped):
    """The small process around another process ends by itself."""
    if wrapped:
        monkeypatch.setenv("JAXCODED_STARTER", "python\nrank.py")
    jobs = [start(one), start(one)]
    other = start(one + "two")
    until = time.monotonic() + 60 * slowness()
    while len(list(started._marked(one))) < 4:
        assert time.monotonic() < until
    started.Started(one).end()
    assert {job.wait(60 * slowness()) for job in jobs} == ({0} if wrapped else {-9})
    assert not list(started._marked(one)) and other.poll() is None
    started.Started("").end()
    assert other.poll() is None


def test_names_of_variables():
    """The wrapper processes around ranks use the same names, but import nothing else."""
    assert rank.STARTER == started._WRAPPER
    assert rank.JOINS == started.MARK
    assert rank.TAKES_IN == joining.FORGIVES


def test_why_no_ranks_can_join(monkeypatch):
    for name, value in {rank.TAKES_IN: "1", **launcher.TAKES_IN}.items():
        monkeypatch.setenv(name, value)
    assert joining.why_not(1) == joining.why_not(3) == ""
    monkeypatch.delenv("OMPI_MCA_coll_han_priority")
    assert joining.why_not(1) == ""
    assert "OMPI_MCA_coll_han_priority=-1" in joining.why_not(3)
    monkeypatch.delenv(rank.TAKES_IN)
    assert "jaxcoded run --ft" in joining.why_not(1)


def test_a_wrapper_without_a_rank_is_ended(start, one, monkeypatch):
    monkeypatch.setenv("JAXCODED_STARTER", "python\nrank.py")
    job = subprocess.Popen(["sleep", "1000"], env={started.MARK: f"{one}:60"})
    started.Started(one).end()
    assert job.wait(60 * slowness()) == -9


def test_a_process_that_starts_one_program_after_another_is_found(one, tmp_path):
    """While a process starts a program, the system shows no environment of it."""
    again = tmp_path / "again"
    again.write_text(f"exec sh {again}")
    job = subprocess.Popen(["sh", again], env=os.environ | {started.MARK: f"{one}:60"})
    try:
        for _ in range(100):
            assert [process.pid for process, _ in started._marked(one)] == [job.pid]
    finally:
        job.kill()
        job.wait()
