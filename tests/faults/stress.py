"""Do everything at once, under the sanitizers.

Several threads in each process open, use, replan and close their groups, one after the
other. Another thread reads the state of all groups, and the process ends in the middle
of rounds.

``stress.py DIRECTORY SEED EPISODES END``: each thread has EPISODES groups. END is what
the last rank does while its threads are in rounds: ``close`` (all ranks close their
groups), ``exit`` or ``raise``. The program checks all sums, including the sums that other ranks get after the last rank
has ended.
"""

import contextlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import uncounted
from harness import EXAMPLES, Board
from mpi4py import MPI

import jaxcoded

THREADS = 3
ROUNDS = 8  # most rounds with a group
LAST_ROUNDS, FAULT = 100, 3  # rounds with the last group; the process ends before this
WIDTHS = 3, 300, 5000, 70_000
PAUSE = 2e-3  # seconds, on average

directory, seed, episodes, end = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
board = Board(directory)
SCALES = 1.0 + np.arange(EXAMPLES)
open_groups = {}  # by thread
leaving = threading.Event()
in_last_group = []  # widths, of threads that have done rounds with it
failures = []


class Rounds:
    """Rounds of a group, each checked against the whole batch's sum in float64.

    Args:
        group: the group.
        width: the length of a gradient.
    """

    def __init__(self, group, width):
        self.group = group
        self.token = jnp.int32(0)
        self._base = np.random.default_rng(width).standard_normal(width)
        part = group.batch(EXAMPLES)
        self._coefficient = float(np.asarray(part.weights) @ SCALES[part.indices])
        group_ = group
        self._jitted = jax.jit(
            lambda x, token: uncounted.coded_allreduce(x, group_, token=token)
        )
        self._start = jax.jit(
            lambda x, token: uncounted.coded_allreduce_start(x, group_, token=token)
        )
        self._done = jax.jit(
            lambda handle, token: jaxcoded.coded_allreduce_done(handle, token=token)
        )

    def local(self, number):
        return self._coefficient * number * self._base

    def check(self, number, total):
        expected = SCALES.sum() * number * self._base
        error = np.abs(np.asarray(total) - expected).max()
        assert error <= 1e-11 * np.abs(expected).max(), f"round {number}: {error:.1e}"

    def host(self, number):
        self.check(number, uncounted.allreduce(self.local(number), self.group))

    def jitted(self, number):
        total, _, self.token = self._jitted(self.local(number), self.token)
        self.check(number, total)

    def started(self, number, several=3):
        """Start several rounds, so that more than one is in flight."""
        handles = []
        for each in range(several):
            handle, _, self.token = self._start(self.local(number + each), self.token)
            handles.append(handle)
        for each, handle in enumerate(handles):
            total, _, self.token = self._done(handle, self.token)
            self.check(number + each, total)

    def start(self, number):
        """Start rounds whose results no caller takes."""
        for each in range(3):
            *_, self.token = self._start(self.local(number + each), self.token)


def episode(thread, comm, shared, own):
    """Use a group from opening to close. ``shared`` draws the same numbers on all ranks, ``own`` does not."""
    group = jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(fanout=int(shared.choice([2, 3]))),
        transport="engine",
        options=jaxcoded.Options(
            piece_bytes=int(shared.choice([64, 4096, 1 << 18])),
            history_bytes=int(shared.choice([0, 1 << 28])),
            telemetry_rounds=int(shared.choice([0, 4, 1024])),
        ),
    )
    open_groups[thread] = group
    if shared.random() < 0.3:
        group.on_round(lambda seen: seen.number)
    for _ in range(int(shared.integers(1, 3))):
        rounds = Rounds(group, int(shared.choice(WIDTHS)))
        for number in range(1, int(shared.integers(2, ROUNDS))):
            time.sleep(own.exponential(PAUSE))
            way = shared.choice(["host", "host", "jitted", "started"])
            getattr(rounds, way)(number)
            if shared.random() < 0.3:
                group.snapshot({"number": np.full(2000, number)}, every=1)
        if shared.random() < 0.5:
            group = group.replan(shared.uniform(0.5, 2, group.size))
            open_groups[thread] = group
    time.sleep(own.exponential(PAUSE))
    open_groups.pop(thread)
    group.close()


def last(comm, width, call, own):
    """Use a group that the last rank leaves between rounds or in the middle of one."""
    group = jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(),
        transport="engine",
        options=jaxcoded.Options(deadline=None),
    )
    rounds = Rounds(group, width)
    quits = end != "close" and board.rank == board.size - 1
    for number in range(1, LAST_ROUNDS + 1):
        time.sleep(own.exponential(PAUSE))
        if quits and number == FAULT and call == "started":
            # when Python ends, JAX aborts threads that are in JAX's calls
            while len(in_last_group) < THREADS and not failures:
                time.sleep(1e-3)
            leaving.set()
            rounds.start(number)
            return
        getattr(rounds, call)(number)
        if number == FAULT:
            in_last_group.append(width)
    if not quits:
        group.close()


def look():
    """Read the state of all open groups, as a monitor would."""
    while not leaving.is_set():
        for group in list(open_groups.values()):
            with contextlib.suppress(jaxcoded.GroupClosed):
                assert group._session.transport.host_lag() >= 0
                assert group._session.transport.status()
                assert len(group.telemetry().rounds) >= 0
                group.statistics()
        time.sleep(1e-3)


def live(thread, comm):
    shared = np.random.default_rng([seed, thread])
    own = np.random.default_rng([seed, thread, board.rank])
    try:
        for _ in range(episodes):
            episode(thread, comm, shared, own)
        last(comm, WIDTHS[1 + thread], "host", own)
    except BaseException as error:
        if not leaving.is_set():
            failures.append(f"thread {thread}: {error!r}")
        raise


communicators = [MPI.COMM_WORLD.Dup() for _ in range(THREADS + 1)]
looking = threading.Thread(target=look, daemon=True)
looking.start()
threads = [
    threading.Thread(target=live, args=(thread, comm), daemon=True)
    for thread, comm in enumerate(communicators[:THREADS])
]
for each in threads:
    each.start()
last(communicators[THREADS], WIDTHS[0], "started", np.random.default_rng(board.rank))
# the process leaves its threads in the middle of rounds, with one round in flight
if leaving.is_set():
    board.report(failures=failures)
    if end == "raise":
        raise RuntimeError(f"injected into rank {board.rank}")
    sys.exit(0)
for each in threads:
    each.join()
leaving.set()
looking.join()
board.report(failures=failures)
