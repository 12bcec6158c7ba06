"""`Roll` with simulated ranks, messages and time: any order and any death, without real
waits.

A rank is a thread that runs alone until it sleeps. A seed decides which rank is next,
how long messages take, when ranks die, and which of their last messages are lost.
"""

import errno
import functools
import threading
import types

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.membership import channel, roll
from jaxcoded.group.membership.messages import Kill, Stay

SECONDS = 2.0  # simulated seconds that callers of the roll wait
SLOWEST = 0.1  # most seconds of a message, or between two polls of a rank
SEEN = 10 * SLOWEST  # seconds until other ranks know that a rank has come
ENDS = 60.0  # seconds after which ranks need not come again, if all of them live
LATEST = 400.0  # seconds within which all live ranks have met, even if they come late every time
PAUSE = 10e-3


class Killed(BaseException):
    """Raised to end the thread of a rank."""


class Interrupted(Exception):
    """Raised by the program's signal handler at any place."""


class World:
    """The state that simulated ranks share.

    Attributes:
        now: the simulated time in seconds.
        dead: the dead ranks.
        reported: when a rank learns of another rank's death, by both ranks.
        channels: messages as (arrival time, tag, words), by sender and receiver.
        put_out: when a caller has ordered that a rank be killed.
        busy: since when a rank has been in `Roll.call` or `wait` without a stop.
        interrupts: when a signal interrupts ranks there.
    """

    def __init__(self, size, random):
        self.size, self.random = size, random
        self.now = 0.0
        self.dead, self.reported, self.channels = set(), {}, {}
        self.put_out, self.busy, self.interrupts = {}, {}, {}
        self._wakes = dict.fromkeys(range(size), 0.0)
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._here = threading.local()
        self._failures = []
        self._planned, self._sent = [], [0] * size

    def plan(self, rank, when, seconds):
        """Plan to stop a rank for ``seconds``, or to kill it (None): at a time, or
        after it has sent a number of messages (int).
        """
        self._planned.append((rank, when, seconds))

    def _happens(self, rank, when):
        """Return what is planned for a rank up to this time."""
        for event in [each for each in self._planned if each[0] == rank]:
            _, planned, seconds = event
            if type(planned) is not type(when) or planned > when:
                continue
            self._planned.remove(event)
            if seconds is None:
                self.kill(rank)
            elif rank in self._wakes:
                self._wakes[rank] = max(self._wakes[rank], self.now) + seconds
                if rank in self.busy:
                    self.busy[rank] = self._wakes[rank]

    def sent(self, rank):
        """Count one more message of a rank."""
        self._sent[rank] += 1
        before = self._wakes[rank], rank in self.dead
        self._happens(rank, self._sent[rank])
        if before != (self._wakes[rank], rank in self.dead):
            self._hand_over(rank)

    def kill(self, rank):
        """Kill a rank; only a part of its messages in flight still arrives."""
        if rank in self.dead:
            return
        self.dead.add(rank)
        for to in range(self.size):
            self.reported[rank, to] = self.now + self.random.uniform(0, 1)
            channel = self.channels.get((rank, to), [])
            there = sum(when <= self.now for when, _, _ in channel)
            del channel[self.random.integers(there, len(channel) + 1) :]

    def run(self, program):
        """Run ``program(rank)`` on all ranks to its end."""
        for rank in range(self.size):
            threading.Thread(
                target=self._live, args=(program, rank), daemon=True
            ).start()
        while self._wakes:
            first = min(self._wakes.values())
            self.now = max(self.now, first)
            assert self.now < LATEST, f"ranks {sorted(self._wakes)} wait for ever"
            for rank in range(self.size):
                self._happens(rank, self.now)
            able = [wake for wake, when in self._wakes.items() if when <= self.now]
            if not able:  # the rank was stopped
                continue
            rank = able[self.random.integers(len(able))]
            self._turns[rank].release()
            self._back.acquire()
            if self._failures:
                raise self._failures[0]

    def _live(self, program, rank):
        self._here.rank = rank
        self._turns[rank].acquire()
        try:
            program(rank)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # for `run`
            self._failures.append(error)
        del self._wakes[rank]
        self._back.release()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        rank = self._here.rank
        self._wakes[rank] = self.now + seconds + self.random.uniform(0, SLOWEST)
        self._hand_over(rank)
        if rank in self.busy and self.interrupts.get(rank, LATEST) <= self.now:
            del self.interrupts[rank]
            raise Interrupted

    def _hand_over(self, rank):
        self._back.release()
        self._turns[rank].acquire()
        if rank in self.dead:
            raise Killed


class Comm:
    """The group's communicator on one rank."""

    def __init__(self, world, rank):
        self.size, self.rank, self._world = world.size, rank, world

    def _hears_of(self, rank):
        if self._world.reported.get((rank, self.rank), LATEST) <= self._world.now:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def Isend(self, words, to, tag):
        self._hears_of(to)
        world = self._world
        channel = world.channels.setdefault((self.rank, to), [])
        before = channel[-1][0] if channel else 0.0
        there = max(before, world.now + world.random.uniform(0, SLOWEST))
        # a reader sees the sender's memory at the time of reading
        channel.append((there, tag, words))
        world.sent(self.rank)

        def is_over():
            return there <= world.now

        def test():
            assert is_over(), "MPI would free a message to a dead rank"
            return True

        return types.SimpleNamespace(Get_status=is_over, Test=test)

    def _next(self, rank, tag):
        channel = self._world.channels.get((rank, self.rank), [])
        for number, (when, of, _) in enumerate(channel):
            if when <= self._world.now and of == tag:
                return channel, number
        self._hears_of(rank)
        return None

    def Iprobe(self, rank, tag, status):
        if (found := self._next(rank, tag)) is None:
            return False
        there, number = found
        status.Set_elements(MPI.BYTE, there[number][2].nbytes)
        return True

    def Irecv(self, words, rank, tag):
        def test():
            if (found := self._next(rank, tag)) is None:
                return False
            channel, number = found
            words[:] = channel.pop(number)[2]
            return True

        return types.SimpleNamespace(Test=test)


class Process:
    """A rank's process, which other ranks of its host can kill."""

    def __init__(self, world, rank, host):
        self._world, self._rank, self._host = world, rank, host

    def reachable(self, other):
        return self._host == other._host

    def kill(self):
        if self._rank in self._world.dead:
            return errno.ESRCH
        when = self._world.put_out.get(self._rank, self._world.now)
        waited = when - self._world.busy.get(self._rank, when)
        assert waited < SEEN, f"rank {self._rank} has been here for {waited} s"
        self._world.kill(self._rank)
        return 0

    def is_first(self):
        return True

    def __str__(self):
        return f"rank {self._rank}"


class Meeting:
    """The meeting in one of MPI's collectives, which waits for all live ranks. All of
    them agree on whether any rank has died meanwhile.
    """

    def __init__(self, world):
        self._world, self._come, self.dead = world, set(), None

    def come(self, rank):
        self._come.add(rank)
        return self

    def done(self):
        live = set(range(self._world.size)) - self._world.dead
        if self.dead is None and live <= self._come:
            self.dead = frozenset(self._world.dead)
        return self.dead is not None


def rolls(world, hosts, monkeypatch):
    """Return a `Roll` for each rank."""
    processes = [Process(world, rank, host) for rank, host in enumerate(hosts)]
    monkeypatch.setattr(roll, "time", world)
    monkeypatch.setattr(roll, "_PAUSE", PAUSE)
    monkeypatch.setattr(channel, "_sent", [])
    monkeypatch.setattr(channel, "_coming", [])
    comms = [Comm(world, rank) for rank in range(world.size)]
    return [roll.Roll(comm, processes, root=0) for comm in comms]


TIMES = st.floats(0, 12) | st.integers(1, 40)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 5),
    deaths=st.lists(TIMES, max_size=3),
    stops=st.lists(st.tuples(TIMES, st.floats(0, 20)), max_size=2),
    failed=st.booleans(),
    put_out=st.booleans(),
    apart=st.booleans(),
    interrupts=st.dictionaries(st.integers(0, 4), st.floats(0, 12), max_size=2),
)
@example(  # the root had decided with the answer of a rank that had given up meanwhile
    seed=107,
    size=3,
    deaths=[],
    stops=[(1, 6.0)],
    failed=False,
    put_out=False,
    apart=False,
    interrupts={},
)
@example(  # a caller was stopped as it called the roll, and killed ranks in haste
    seed=643,
    size=5,
    deaths=[1.0, 3.0, 0.0],
    stops=[(1, 2.0)],
    failed=False,
    put_out=True,
    apart=False,
    interrupts={},
)
@example(  # a rank that had given up and come again was not asked again, and was killed
    seed=7626,
    size=5,
    deaths=[1.0, 1.0, 1.0],
    stops=[],
    failed=True,
    put_out=True,
    apart=False,
    interrupts={1: 0.0},
)
@example(  # the root came again and waited from the start; the other ranks gave up
    seed=440,
    size=5,
    deaths=[18, 3.0, 3.0],
    stops=[(0.0, 0.0), (6.0, 8.0)],
    failed=False,
    put_out=True,
    apart=False,
    interrupts={0: 9.0},
)
def test_all_live_ranks_meet(
    seed, size, deaths, stops, failed, put_out, apart, interrupts, monkeypatch
):
    """Ranks come, give up, stop and die at any time. ``failed``: a round has failed on one of these ranks."""
    random = np.random.default_rng(seed)
    world = World(size, random)
    with monkeypatch.context() as patched:
        hosts = [rank % 2 if apart else 0 for rank in range(size)]
        each = rolls(world, hosts, patched)
        for when, seconds in [(when, None) for when in deaths] + stops:
            world.plan(int(random.integers(size)), when, seconds)
        world.interrupts = dict(interrupts)
        failing = int(random.integers(size)) if failed else None
        shrunk, agreed = [[Meeting(world) for _ in range(20)] for _ in range(2)]
        made, gave_up = {}, {}

        def tell(rank, message):
            text = message(visit=0)
            if isinstance(text, Stay):
                away = set(range(size)) - world.dead - set(world.busy)
                assert all(world.now - gave_up.get(item, -SEEN) < SEEN for item in away)
            if isinstance(text, Kill):
                for late in text.late:
                    world.put_out[late] = world.now
            original(each[rank], message)

        original = roll.Roll._tell
        for rank in range(size):
            each[rank]._tell = functools.partial(tell, rank)

        def visit(rank, attempt):
            """Return whether a new group was made."""
            broken = rank == failing
            if not each[rank].call(SECONDS, put_out, broken=broken):
                return None
            assert world.dead or failed
            for meeting in shrunk[attempt], agreed[attempt]:
                pending = meeting.come(rank)
                each[rank].wait(pending, 2 * SECONDS + 1, SECONDS, put_out)
            return shrunk[attempt].dead == agreed[attempt].dead

        def program(rank):
            attempt = 0
            at_once = False
            while world.dead or failed or world.now < ENDS:
                if not at_once:
                    world.sleep(random.uniform(0, 1.5 * SECONDS))
                at_once = False
                world.busy[rank] = world.now
                try:
                    done = visit(rank, attempt)
                except (CodedError, Interrupted) as error:
                    gave_up[rank] = world.now
                    at_once = isinstance(error, Interrupted)
                    continue
                finally:
                    world.busy.pop(rank, None)
                if done:
                    made[rank] = attempt
                    return
                if done is not None:
                    each[rank].next_attempt()
                    attempt += 1
            world.kill(rank)  # the rank's program ends

        world.run(program)
    live = set(range(size)) - world.dead
    assert live <= set(made) and len(set(made.values())) <= 1
