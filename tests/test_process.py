"""Killing a process never hits another process with the same number."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from jaxcoded.group.process import BEGAN, Process, stat

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def child():
    with subprocess.Popen(SLEEPS) as process:
        yield process
        process.kill()


def of(child):
    return Process.own()._replace(pid=child.pid, started=int(stat(child.pid)[BEGAN]))


def test_a_stopped_process_is_killed(child):
    child.send_signal(signal.SIGSTOP)
    assert of(child).kill() == 0
    assert child.wait(60) == -signal.SIGKILL


def test_a_later_process_of_the_same_number_is_not(child):
    earlier = of(child)._replace(started=1)
    assert earlier.kill() == errno.ESRCH
    assert child.poll() is None


def test_one_that_is_gone(child):
    gone = of(child)
    child.kill()
    child.wait()
    assert gone.kill() == errno.ESRCH


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is needed")
def test_another_users_process(child):
    other = of(child)
    os.setresuid(65534, 65534, 0)
    try:
        assert other.kill() == errno.EPERM
    finally:
        os.setresuid(0, 0, 0)
    assert child.poll() is None


ASKS = """
import sys
from jaxcoded.group.process import Process
print(Process("", "", *map(int, sys.argv[1:])).is_first(), flush=True)
sys.stdin.read()
"""


def test_one_of_several_is_the_first(child):
    """A process is the first until it ends."""
    command = [sys.executable, "-c", ASKS, str(child.pid), "5"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    texts = []
    for _ in range(2):
        with subprocess.Popen(command, **pipes) as one:
            texts.append(one.stdout.readline())
            other = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
            )
            texts.append(other.stdout)
            one.stdin.close()
    assert texts == ["True\n", "False\n"] * 2


def test_processes_that_can_be_reached():
    own = Process.own()
    assert own.pid == os.getpid()
    assert own.reachable(own._replace(pid=1, started=0))
    assert not own.reachable(own._replace(host="another"))
    assert not own._replace(numbers="a container's").reachable(own)
    nowhere = own._replace(numbers="")  # without /proc
    assert not nowhere.reachable(nowhere)
