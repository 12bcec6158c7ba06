"""Shared by the programs of this folder: checked rounds, faults at a given rank and
round, and a board with the progress of each rank.

`tests/test_faults.py` starts them as ``PROGRAM DIRECTORY ...`` and reads the files that
the ranks leave in the directory.
"""

import ctypes
import faulthandler
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

import jax
import numpy as np
import uncounted
from mpi4py import MPI

import jaxcoded

jax.config.update("jax_enable_x64", True)

EXAMPLES = 12
LATE = 0.6  # fraction of the job's time limit
SLOWNESS = float(
    os.environ.get("JAXCODED_SLOWNESS", "1")
)  # slowness of the machine, see launch.py
PATIENCE = 30 * SLOWNESS  # seconds in which other ranks must reach the expected round


class Board:
    """A file in which each rank notes how many rounds it has done.

    Args:
        directory: shared by all ranks and by the test. A process that has not ended
            well before the job's time limit hangs: it writes the stacks of its threads
            to ``stacks-RANK``.
    """

    def __init__(self, directory):
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.directory = pathlib.Path(directory)
        stacks = os.open(
            self.directory / f"stacks-{self.rank}", os.O_WRONLY | os.O_CREAT
        )
        limit = float(os.environ.get("JAXCODED_MPIRUN_TIMEOUT", "100"))
        faulthandler.dump_traceback_later(LATE * limit, file=stacks)
        # every rank extends the file, and none changes its contents
        with (self.directory / "board").open("ab") as file:
            os.ftruncate(file.fileno(), 8 * self.size)
        self._done = np.memmap(self.directory / "board", np.int64, "r+")
        self._said = {}
        self._started = time.monotonic()

    def note(self, rounds):
        """Note that this rank has done ``rounds`` rounds."""
        self._done[self.rank] = rounds

    def done(self, rank):
        return int(self._done[rank])

    def wait(self, ranks, rounds):
        """Wait until these ranks have done ``rounds`` rounds, and fail if they do not."""
        until = time.monotonic() + PATIENCE
        while min(self._done[list(ranks)]) < rounds:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"ranks {list(ranks)} should have done {rounds} rounds, but the "
                    f"rounds of all ranks are {self._done.tolist()}"
                )
            time.sleep(2e-3)

    def say(self, words):
        """Write to stderr where this rank is, for the test."""
        passed = time.monotonic() - self._started
        line = f"[{passed:6.2f} s] rank {self.rank}: {words}\n"
        # a single write, so that lines of several ranks do not mix
        sys.stderr.write(line)
        sys.stderr.flush()

    def report(self, **values):
        """Leave values for the test, in ``rank-RANK.json``."""
        self._said |= values
        path = self.directory / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self._said))
        self.say(f"reports {', '.join(values)}")


class Device:
    """A device that a compiled step uses, and waits for while it is `stuck`."""

    def __init__(self):
        self.stuck = False

    def __call__(self, x):
        """Return ``x`` in a compiled function, once the device has handled it."""
        zero = jax.pure_callback(self._work, jax.ShapeDtypeStruct((), x.dtype), x[0])
        return x + zero

    def _work(self, x):
        if self.stuck:
            hang("sleep")
        return np.zeros((), x.dtype)


class Sums:
    """The gradients of every round and example, equal on all ranks, and their true
    sums.

    Args:
        group: the group that sums them.
        widths: the length of a gradient, for one round after the other.
        device: the device that a compiled sum waits for.
    """

    def __init__(self, group, widths=(3000,), device=lambda x: x):
        random = np.random.default_rng(0)
        self._bases = [random.standard_normal((EXAMPLES, width)) for width in widths]
        self._part = group.batch(EXAMPLES)
        self._sum = jax.jit(
            lambda vector: uncounted.coded_allreduce(device(vector), group)
        )
        self._hash = hashlib.sha256()

    def _gradients(self, number):
        """Return a round's gradients as ``scales`` and ``base``: ``scales[:, None] *
        base``.
        """
        scales = np.random.default_rng(number).uniform(1, 2, EXAMPLES)
        return scales, self._bases[number % len(self._bases)]

    def gradient(self, number):
        """Return this rank's contribution to a round."""
        scales, base = self._gradients(number)
        held = self._part.indices
        return (self._part.weights * scales[held]) @ base[held]

    def start(self, number):
        """Start this rank's call of a round, and return before the round is over."""
        return self._sum(self.gradient(number))

    def check(self, number, total):
        """Fail unless this is the true sum of the round."""
        scales, base = self._gradients(number)
        total = np.asarray(total)
        error = abs(total - scales @ base) / abs(base).sum(0)
        assert error.max() < 1e-10, f"round {number} is off by {error.max():.1e}"
        self._hash.update(total)

    @property
    def digest(self):
        """Return the digest of all results, in order."""
        return self._hash.hexdigest()


class Faults:
    """Faults to inject. Every rank plans the same faults, and calls `before` before
    each round.
    """

    def __init__(self, board):
        self._board = board
        self._pids = board.comm.allgather(os.getpid())
        self._plan = {}
        self._down = set()

    def call_at(self, rank, number, action):
        """Have a rank do something before a round."""
        if rank == self._board.rank:
            self._plan.setdefault(number, []).append(action)

    def fail_at(self, rank, number):
        def fail():
            self._board.say(f"fails before round {number}")
            raise RuntimeError(f"injected into rank {rank} before round {number}")

        self.call_at(rank, number, fail)

    def sleep_at(self, rank, number, seconds):
        self.call_at(rank, number, lambda: time.sleep(seconds))

    def stop_at(self, ranks, number, rounds=None):
        """Have rank 0 stop these ranks before a round. It continues them after the
        other ranks have done ``rounds`` rounds without them, or never.
        """

        def stop():
            self._board.wait(self._going(), number - 1)
            for rank in ranks:
                os.kill(self._pids[rank], signal.SIGSTOP)
            while not all(map(self._stopped, ranks)):
                time.sleep(1e-3)
            self._down.update(ranks)
            self._board.say(f"stopped {ranks} before round {number}")

        def go_on():
            self._board.wait(self._going(), number + rounds - 1)
            for rank in ranks:
                assert self._stopped(rank)
                assert self._board.done(rank) <= number
                os.kill(self._pids[rank], signal.SIGCONT)
            self._down.difference_update(ranks)
            self._board.say(f"continued {ranks} before round {number + rounds}")

        self.call_at(0, number, stop)
        if rounds is not None:
            self.call_at(0, number + rounds, go_on)

    def _going(self):
        return set(range(self._board.size)) - self._down

    def signal_at(self, rank, number, what):
        """Send a signal to a rank's own process."""
        self.call_at(rank, number, lambda: os.kill(os.getpid(), what))

    def before(self, number):
        for action in self._plan.pop(number, []):
            action()

    def _stopped(self, rank):
        stat = pathlib.Path(f"/proc/{self._pids[rank]}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"


def pickle_nothing():
    """Let this process raise an error if it sends or receives an object that MPI would pickle."""

    def fail(*_):
        raise AssertionError("something was pickled")

    MPI.pickle.__init__(fail, fail)


def hang(how):
    """Hang for ever: in compiled code that holds the interpreter's lock ("lock") or not
    ("busy"), in Python ("loop"), asleep ("sleep"), or "stopped".
    """
    if how == "lock":
        ctypes.PyDLL(None).sleep(100_000)  # unlike `ctypes.CDLL` it keeps the lock
    if how == "busy":
        thread = threading.Thread(target=time.sleep, args=(100_000,), daemon=True)
        thread.start()
        ctypes.CDLL(None).pthread_join(ctypes.c_ulong(thread.ident), None)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if how == "sleep":
            time.sleep(1.0)


def tree(words):
    """Return a group's strategy and options for some words. "3" is the fan-out, "3 in sections" also forms sums in
    sections, and "hosts" is a tree that follows the hosts.
    """
    if words == "hosts":
        return {"strategy": jaxcoded.Coded(by_host=True)}
    number, _, in_sections = words.partition(" ")
    options = jaxcoded.Options(sections_from=64 << 10 if in_sections else None)
    return {"strategy": jaxcoded.Coded(fanout=int(number)), "options": options}


def widths(words):
    """Return ``"300,3000"`` as numbers."""
    return [int(width) for width in words.split(",")]


def run(board, group, sums, faults, rounds, first=1):
    """Do and check the rounds ``first`` to ``rounds``; return how far behind this rank
    was at most.
    """
    most_lag = 0
    for number in range(first, rounds + 1):
        faults.before(number)
        most_lag = max(most_lag, group.lag())
        sums.check(number, sums.start(number))
        board.note(number)
        if number % 100 == 0:
            board.say(f"has done round {number}")
    return most_lag


def close(board, group, timeout=60.0 * SLOWNESS):
    """Close the group, and report how long it took and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.monotonic()
        group.close(timeout)
    board.report(
        close_seconds=time.monotonic() - start,
        close_warnings=[str(warning.message) for warning in caught],
    )


def resources():
    """Return resources that must not grow: resident MiB, threads, open files."""
    status = pathlib.Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "memory": int(resident.split()[1]) / 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
