"""Simulate a round of shared work: which rank computes which blocks, and when all are computed.

The simulation follows ``docs/engine.md``, for blocks that are computed on the host. Every rank begins with its own
blocks, except blocks that other ranks have begun. A rank that begins its last block gets a free block, or a block
that is recalled from the rank that would finish last. The simulation's events are only those messages after which the
ledger may make a decision.

The simulated ledger knows how long each rank takes for a block in this round. A real ledger measures this with
the first block.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxcoded.plan.costs import relative
from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.network import Network
from jaxcoded.tools.simulator.stragglers import Delays

# These constants are the engine's (``ledger.cpp``, ``node.h``).
# seconds after which the ledger gives up a rank that does not answer a recall
_PATIENCE = 0.05
# the fraction of a block's time by which a rank must be faster to take the block back
_WORTH = 0.1
_SHORTEST = 1e-12  # the shortest time of a block, in seconds
_MORE = 1 + 1e-6  # equally fast ranks must not take blocks from each other in turn


class Sharing:
    """The parts of a simulated job that are the same in every round."""

    def __init__(self, layout: Layout, network: Network, work: float) -> None:
        at = {rank: place for place, rank in enumerate(layout.ranks.tolist())}
        self.holders = [
            frozenset(at[rank] for rank in ranks) for ranks in layout.placement.holders
        ]
        self.held: list[set[int]] = [set() for _ in at]
        self.owned: list[set[int]] = [set() for _ in at]
        # each block's place among the blocks of its owner
        self.place = [b % layout.placement.blocks for b in range(len(self.holders))]
        for block, ranks in enumerate(layout.placement.holders):
            self.owned[at[ranks[0]]].add(block)
            for rank in ranks:
                self.held[at[rank]].add(block)
        self.work = work
        self.seconds = work / len(self.holders)
        # the cost of each block, as a multiple of `seconds`
        self.costs = [1.0] * len(self.holders)
        # seconds until a message has arrived and is handled; the root sends itself no
        # messages
        self.trips = [network.latency + network.overhead] * layout.size
        self.trips[0] = 0.0
        self.call = network.call

    def cost(self, blocks: np.ndarray) -> None:
        """Set what the blocks cost in the next round, as fractions of a usual batch's
        cost."""
        self.seconds = self.work * float(blocks.mean())
        self.costs = relative(blocks.tolist())

    def round(self, free: np.ndarray, delay: Delays) -> tuple[np.ndarray, np.ndarray]:
        """Simulate a round until all ranks know that all blocks are computed. ``free`` has the time of each rank's
        call, float64 ``(N,)``.

        Return two arrays like ``free``: when each rank hands over its sum (minus infinity if it has no block, infinite
        if some blocks are never computed), and when it ends its computation, even if no rank needs the result."""
        begun = float(free[0])
        if not math.isfinite(begun + delay.stopped[0] * delay.seconds[0]):
            return np.full(len(free), math.inf), free
        # Use times relative to the round's beginning: they are small, so no digits are
        # lost.
        played = Round(self, free - begun, delay)
        over = played.play() + self.call
        called = [
            over + member.trip if member.blocks else -math.inf
            for member in played.members
        ]
        called[0] = over
        busy = [max(member.busy, member.ends) for member in played.members]
        return begun + np.array(called), begun + np.array(busy)


class _Member:
    """A rank in a round. It begins block ``first`` of its ``blocks`` at ``begins``; the later blocks follow
    without a pause."""

    def __init__(
        self,
        costs: list[float],
        trip: float,
        seconds: float,
        called: float,
        late: float,
    ) -> None:
        self.costs = costs  # the costs of all blocks
        self.trip = trip
        self.seconds = seconds  # the rank's time for a block of cost 1
        self.ready = called + late  # the rank computes nothing before this time
        self.answers = -math.inf  # its engine answers nothing before this time
        self.present = False
        self.blocks: list[int] = []
        self.first = 0
        self.done: list[float] = []  # the cumulative costs from the first block on
        self.begins = self.ends = called
        # the time until which the rank computes something that is not used
        self.busy = called
        # recalled blocks without an answer, each with the rank that is to get the block
        self.recalled: dict[int, int] = {}
        # recalled blocks that the rank kept, since it had begun them
        self.kept: set[int] = set()
        self.promised = 0  # number of blocks that are recalled for this rank

    def begins_at(self, place: int) -> float:
        done = self.done[place - self.first - 1] if place > self.first else 0
        return self.begins + done * self.seconds

    def added(self, time: float) -> int:
        """Return how many blocks the rank has computed by this time."""
        if time < self.begins:
            return self.first
        done = (time - self.begins) / self.seconds + 1e-6
        return self.first + bisect.bisect_right(self.done, done)

    def known(self, now: float) -> int:
        """Return how many computed blocks the root knows of."""
        return self.added(now - self.trip)

    def left(self, now: float) -> int:
        return len(self.blocks) - self.known(now)

    def last_begins(self) -> float:
        """Return when the rank begins its last block."""
        return self.begins_at(max(len(self.blocks) - 1, self.first))

    def changed(self) -> None:
        costs = [self.costs[block] for block in self.blocks[self.first :]]
        self.done = list(itertools.accumulate(costs))
        self.ends = self.begins_at(len(self.blocks))


class Round:
    """A simulated round. It begins with the root's call."""

    def __init__(self, job: Sharing, called: np.ndarray, delay: Delays) -> None:
        self.job = job
        seconds = np.maximum(job.seconds * delay.factor, _SHORTEST).tolist()
        self.members = [
            _Member(job.costs, *each)
            for each in zip(job.trips, seconds, called.tolist(), delay.seconds.tolist())
        ]
        for place in np.flatnonzero(delay.stopped).tolist():
            self.members[place].answers = self.members[place].ready
        self.free = set(range(len(job.holders)))
        # how often each block was taken from a rank that was computing it
        self.taken = [0] * len(job.holders)
        self.asks: set[int] = set()  # ranks with little left to compute
        # ranks that have asked for a block and have not got any
        self.waits: set[int] = set()
        # ranks that have not answered a recall for too long
        self.silent: set[int] = set()
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        self.fastest = min(seconds)
        # the root decides nothing before this time
        self.opens = max(0.0, self.members[0].answers)

    def play(self) -> float:
        """Return when the root knows that all blocks are computed, or infinity if they never
        are."""
        for m, member in enumerate(self.members):
            if self.job.held[m]:
                self.at(member.begins + member.trip, self.arrived, m)
        while self.events:
            now, _, action, arguments = heapq.heappop(self.events)
            action(now, *arguments)
            self.deal(now)
        if self.free:
            return math.inf
        return max(each.ends + each.trip for each in self.members if each.blocks)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        if time < math.inf:
            event = (max(time, self.opens), next(self.numbers), action, arguments)
            heapq.heappush(self.events, event)

    # The root receives messages.

    def arrived(self, now: float, m: int) -> None:
        self.members[m].present = True
        self.asks.add(m)
        own = self.free & self.job.owned[m]
        if own:
            # The rank has begun its own blocks without asking, except blocks that other ranks have
            # begun.
            begun = len(own) == len(self.job.owned[m])
            self.grant(m, sorted(own), now, self.members[m].begins if begun else None)

    def heard(self, now: float, m: int) -> None:
        self.asks.add(m)
        member = self.members[m]
        if member.left(now) == 1:
            last = member.blocks[-1]
            if self.worth(m, self.fastest * self.job.costs[last], now):
                self.asks |= self.waits & self.job.holders[last]

    def answered(self, now: float, v: int, block: int, reached: float) -> None:
        """Process the answer to a recall. The recall reached the rank at the time
        ``reached``."""
        member = self.members[v]
        if block not in member.recalled:
            return  # the ledger has given up the rank
        m = member.recalled.pop(block)
        self.members[m].promised -= 1
        self.silent.discard(v)
        self.asks.add(m)
        place = member.blocks.index(block)
        if place <= member.added(reached):  # the rank has begun the block
            member.kept.add(block)
            return
        del member.blocks[place]
        member.changed()
        self.at(max(now, member.last_begins() + member.trip), self.heard, v)
        self.free.add(block)
        if self.members[m].present:
            self.grant(m, [block], now)
        else:
            self.asks |= self.waits

    def unanswered(self, now: float, v: int, block: int) -> None:
        if block in self.members[v].recalled:
            self.silent.add(v)

    # The ledger decides.

    def deal(self, now: float) -> None:
        for v in [v for v in self.silent if self.replaceable(v)]:
            self.give_up(v, now)
        while self.asks:
            m = min(self.asks, key=lambda m: self.members[m].ends)
            self.asks.remove(m)
            member = self.members[m]
            if not member.present or member.left(now) + member.promised > 1:
                continue
            if block := self.free & self.job.held[m]:
                # Choose the block that its owner would reach last; of several such
                # blocks, the first.
                last = max(sorted(block), key=self.job.place.__getitem__)
                self.grant(m, [last], now)
            elif not self.take_back(m, now):
                self.waits.add(m)

    def grant(
        self, m: int, blocks: Iterable[int], now: float, arrives: float | None = None
    ) -> None:
        """Grant blocks to a rank. The grant arrives one message later, or at the time
        ``arrives``."""
        member = self.members[m]
        arrives = now + member.trip if arrives is None else arrives
        if member.ends <= arrives:  # the rank has nothing to do
            member.first = len(member.blocks)
            member.begins = max(arrives, member.ready)
        member.blocks.extend(blocks)
        member.changed()
        self.free.difference_update(blocks)
        self.at(max(now, member.last_begins() + member.trip), self.heard, m)
        self.at(max(now, member.ends + member.trip), self.heard, m)

    def take_back(self, m: int, now: float) -> bool:
        """Recall a block for rank ``m`` from the rank that would end last, if rank ``m`` would end the block
        sooner. Return whether there was such a block."""
        member, held = self.members[m], self.job.held[m]
        # after three messages: recall, return and grant
        begins = max(now + 3 * member.trip, member.ends)
        idle = member.left(now) == 0
        later = [v for v, other in enumerate(self.members) if other.ends > begins]
        for v in sorted(later, key=lambda v: -self.members[v].ends):
            other = self.members[v]
            added = other.known(now)
            left = len(other.blocks) - added
            if not other.present or v == m or left <= len(other.recalled):
                continue
            last = left == 1  # the rank is already computing the block
            for block in reversed(other.blocks[added if last else added + 1 :]):
                if block not in held or block in other.recalled:
                    continue
                done = begins + member.seconds * self.job.costs[block] * _MORE
                if other.ends <= done:
                    continue
                if last and not (idle and self.worth(v, done - now, now)):
                    continue
                if block in other.kept and not last:
                    continue
                if last and (added or block in other.kept):
                    self.taken[block] += 1
                    self.give_up(v, now)
                    self.asks.add(m)
                else:
                    self.recall(v, block, m, now)
                return True
        return False

    def worth(self, v: int, seconds: float, now: float) -> bool:
        """Return whether another rank should compute the last block of rank ``v`` again. The other rank would need
        ``seconds``."""
        other = self.members[v]
        block = other.blocks[-1]
        times = (1 + _WORTH) * 2.0 ** self.taken[block]
        gain = other.ends - now
        if gain <= times * seconds or not (other.known(now) or block in other.kept):
            return gain > times * seconds
        # Without rank `v`, all blocks in its vector are lost, too, and must be computed again.
        return gain > times * self.anew(v, now) and self.replaceable(v)

    def anew(self, v: int, now: float) -> float:
        """Return how many seconds the other ranks would need to compute all blocks that were granted to rank
        ``v``."""
        ends = {
            m: max(now, each.ends)
            for m, each in enumerate(self.members)
            if each.present and m != v
        }
        done = now
        for block in self.members[v].blocks if ends else ():
            cost = self.job.costs[block]
            done, m = min(
                (end + self.members[m].seconds * cost, m) for m, end in ends.items()
            )
            ends[m] = done
        return done - now

    def recall(self, v: int, block: int, m: int, now: float) -> None:
        member = self.members[v]
        member.recalled[block] = m
        self.members[m].promised += 1
        reached = max(now + member.trip, member.answers)
        self.at(reached + member.trip, self.answered, v, block, reached)
        self.at(now + _PATIENCE, self.unanswered, v, block)

    def replaceable(self, v: int) -> bool:
        """Return whether other ranks can compute the blocks of rank ``v``, and the free blocks that it might get."""
        return all(
            any(
                each != v and self.members[each].present
                for each in self.job.holders[block]
            )
            for block in (self.free & self.job.held[v]).union(self.members[v].blocks)
        )

    def give_up(self, v: int, now: float) -> None:
        member = self.members[v]
        begun = member.added(now + member.trip)
        if begun < len(member.blocks):
            member.busy = member.begins_at(begun + 1)
        self.free.update(member.blocks)
        for m in member.recalled.values():
            self.members[m].promised -= 1
            self.asks.add(m)
        self.asks |= self.waits
        member.blocks, member.recalled, member.present = [], {}, False
        member.first, member.begins = 0, member.busy
        member.changed()
        self.silent.discard(v)
