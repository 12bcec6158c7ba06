"""A family that shares its work, simulated in one process and without real waits.

The parent's ledger and the members' shares are the engine's code. This module simulates
processes, their programs and the links between them.
"""

import heapq
import itertools
import math

from _nodes import Ledger, Order, Share


def spread(workers, blocks, replicas, extra=()):
    """Return the holders of each block: its owner, ``replicas`` other workers in turn,
    and ``extra``.
    """
    return [
        [owner]
        + [
            (owner + 1 + (b * replicas + i) % (workers - 1)) % workers
            for i in range(min(replicas, workers - 1))
        ]
        + list(extra)
        for owner in range(workers)
        for b in range(blocks)
    ]


class World:
    """A simulated family.

    Attributes:
        seconds: the seconds that each member's program takes for a block, or a function
            of member and time.
        latency: a function without arguments: the seconds that a message takes.
        empties: whether programs can empty their vectors.
        costs: the cost of each block, which the parent knows, and which multiplies the block's seconds; none: all costs
            are 1.
        stopped, dead: the stopped and dead processes.
        orders: number of orders of each kind in this round.
        woken: how often the parent has woken up in this round without a message.
        computed: number of blocks computed in this round, including unused ones.
        told: number of members' progress reports.
    """

    def __init__(
        self,
        holders,
        members,
        seconds,
        *,
        latency,
        patience=0.02,
        empties=True,
        costs=(),
    ):
        self.holders = holders
        self.members = members
        self.seconds = seconds
        self.latency = latency
        self.empties = empties
        self.costs = list(costs)
        self.ledger = Ledger(holders, members, patience)
        self.clock = 0.0
        self.stopped, self.dead = set(), set()
        self.events = []
        self.numbers = itertools.count()
        self.round = 0
        self.asks = [False] * members  # whether members ask before they begin

    # Time.

    def at(self, time, action, *args, of=None, cancel=None):
        """Do something later. ``of``: the process that does it, as soon as the process runs."""
        heapq.heappush(
            self.events,
            (time, next(self.numbers), action, args, of, self.round, cancel),
        )

    def sends(self, link, of, action, *args):
        """Send a message over a link, which keeps the order of messages."""
        time = max(self.clock + self.latency(), self.busy.get(link, 0.0))
        self.busy[link] = time
        self.at(time, action, *args, of=of)

    def stop(self, member):
        self.stopped.add(member)

    def wake(self, member):
        self.stopped.discard(member)
        for event in self.held.pop(member, []):
            heapq.heappush(self.events, (self.clock, *event[1:]))

    def die(self, member):
        self.dead.add(member)
        self.stopped.discard(member)

    def give_up(self, member):
        self.ledger.give_up(member, self.clock)
        self._decide()

    def close(self, _=None):
        """Close the round at its deadline."""
        self.ledger.close(self.clock)
        self._decide()

    def found_dead(self, member):
        self.ledger.lost(member)
        self._decide()

    # A round.

    def run(self, *, calls=None, claims=None, faults=(), most=60.0):
        """Play a round; return the seconds that it takes.

        Args:
            calls: when each member's program calls, in seconds from now; default: at once.
            claims: whether each member then begins with its own blocks, unless it must
                ask first; default: all do.
            faults: ``(seconds from now, what, member)``: ``"stop"``, ``"wake"``,
                ``"die"``, ``"found_dead"`` or ``"give_up"`` by the parent, or
                ``"close"``, after which a part of the batch suffices.
            most: seconds in which the round must end.
        """
        self.round += 1
        self.shares = [None] * self.members
        self.vectors = [[] for _ in range(self.members)]
        self.called = set()
        self.computes = [None] * self.members
        self.added_at = [self.clock] * self.members
        self.busy, self.held = {}, {}
        self.fetched = {}
        self.over = False
        self.orders = dict.fromkeys(("grant", "recall", "drop", "hold"), 0)
        self.computed = self.told = self.woken = 0
        self.events = [e for e in self.events if e[5] == self.round]
        began = self.clock
        for seconds, what, member in faults:
            self.at(began + seconds, getattr(self, what), member)
        self.ledger.begin(self.clock, self.costs)
        for m in range(self.members):
            late = calls[m] if calls else 0.0
            own = [b for b, ranks in enumerate(self.holders) if ranks[0] == m]
            claimed = own if claims is None or claims[m] else []
            self.at(began + late, self._calls, m, claimed, of=m)
        self._decide()
        for number in itertools.count():
            if self.over:
                break
            assert number < 100_000, f"events do not change the state: {self.state()}"
            assert self.events, f"nothing more can happen: {self.state()}"
            event = heapq.heappop(self.events)
            time, _, action, args, of, _round, cancel = event
            self.clock = max(self.clock, time)
            assert self.clock - began < most, f"the round does not end: {self.state()}"
            if of in self.dead or (cancel and cancel()):
                continue
            if of in self.stopped:
                self.held.setdefault(of, []).append(event)
                continue
            action(*args)
        return self.clock - began

    def state(self):
        return [
            (self.ledger.version(m), self.vectors[m], m in self.called)
            for m in range(self.members)
        ]

    # Members.

    def _calls(self, m, claimed):
        self.shares[m] = Share(self.empties, claimed=[] if self.asks[m] else claimed)
        self.called.add(m)
        self.added_at[m] = self.clock
        self._tells(m)
        self._goes_on(m)

    def _told(self, m, order):
        share = self.shares[m]
        if order.kind == Order.Kind.hold:
            self.asks[m] = True
            if m not in self.called:
                self.sends(("up", m), None, self._will_ask, m)
            return
        assert m in self.called
        if order.kind == Order.Kind.grant:
            self.asks[m] = False
            share.grant(order.blocks)
        elif order.kind == Order.Kind.recall:
            share.recall(order.blocks)
        else:
            share.drop(order.generation)
        self._tells(m)
        self._goes_on(m)

    def _goes_on(self, m):
        if m in self.called and not self.shares[m].computes:
            fresh = self.shares[m].fresh
            block = self.shares[m].take()
            if block is not None:
                if fresh:
                    self.vectors[m] = []
                self.computes[m] = block
                time = self.seconds
                took = time(m, self.clock) if callable(time) else time[m]
                took *= self.costs[block] if self.costs else 1
                self.at(self.clock + took, self._computed, m, of=m)

    def _computed(self, m):
        self.computed += 1
        self.vectors[m].append(self.computes[m])
        self.added_at[m] = self.clock
        if self.shares[m].done():
            self._tells(m)
        self._goes_on(m)

    def _progress(self, m):
        return self.shares[m].progress(self.clock - self.added_at[m])

    def _tells(self, m):
        self.told += 1
        self.sends(("up", m), None, self._heard, m, self._progress(m))

    # The parent.

    def _heard(self, m, progress):
        self.ledger.arrived(m, progress.claims, self.clock)
        self.ledger.heard(m, progress, self.clock)
        self._decide()

    def _will_ask(self, m):
        self.ledger.will_ask(m)
        self._decide()

    def _decide(self):
        for order in self.ledger.orders(self.clock):
            self.orders[order.kind.name] += 1
            self.sends(
                ("down", order.member), order.member, self._told, order.member, order
            )
        wakes = self.ledger.wakes_at(self.clock)
        assert wakes > self.clock
        self.wakes = wakes
        if wakes < math.inf:
            self.at(wakes, self._wakes_up, cancel=lambda: self.wakes != wakes)
        self._gather()

    def _wakes_up(self):
        self.woken += 1
        self._decide()

    def _gather(self):
        """Fetch the vectors of the sum from one member after the other."""
        if self.over or not self.ledger.settled:
            return
        for m in range(self.members):
            version = self.ledger.version(m)
            if not version[1] or self.fetched.get(m, (None,))[0] == version:
                continue
            if m in self.dead:
                self.found_dead(m)
                return
            if m in self.stopped:
                self.ledger.give_up(m, self.clock)
                self._decide()
                return
            # a member's vector is available while its program waits for blocks
            assert self.shares[m].sealed, m
            assert self.shares[m].version == version, m
            assert version[1] == len(self.vectors[m]), m
            self.fetched[m] = version, list(self.vectors[m])
            self.at(self.clock + self.latency(), self._gather)
            return
        chosen = [
            block
            for m in range(self.members)
            if self.ledger.version(m)[1]
            for block in self.fetched[m][1]
        ]
        lacks = set(range(len(self.holders))).difference(chosen)
        assert len(chosen) + len(lacks) == len(self.holders), sorted(chosen)
        assert self.ledger.closed or not lacks
        assert self.ledger.missing == len(lacks)
        self.over = True
