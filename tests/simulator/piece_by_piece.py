"""Simulate a sum in sections piece by piece, with the requests of
``node_sections.cpp``.

Ports send and receive one piece at a time, in the order of requests or arrivals.
"""

import collections
import heapq
import itertools

TERMS_AHEAD, SECTIONS_AHEAD, FROM_ONE = 24, 48, 4


class Play:
    """A round that all ranks have called.

    Args:
        sections: for each section, its maker, the ranks whose messages form it, and its number of pieces.
        ranks: number of ranks.
        sending, receiving: seconds that a port takes for a piece.
        latency: seconds.

    Attributes:
        here: the time at which each rank has the whole sum.
        sent, received: number of pieces of each rank.
    """

    def __init__(self, sections, ranks, sending, receiving, latency):
        self.ranks = ranks
        self.seconds = {"out": sending, "in": receiving}
        self.latency = latency
        self.makers, self.terms, lengths = zip(*sections)
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.pieces, count = self.bounds[-1], len(sections)
        self.from_one = max(FROM_ONE, SECTIONS_AHEAD // count)
        self.free = collections.defaultdict(float)  # when each port is free
        self.sent, self.received = [0] * ranks, [0] * ranks
        self.next = {k: self.bounds[k] for k in range(count)}  # next piece to form
        self.known = [dict(self.next) for _ in range(ranks)]  # available pieces
        self.asked = [set() for _ in range(ranks)]
        self.terms_here = [set() for _ in range(ranks)]
        self.terms_asked = [set() for _ in range(ranks)]
        self.have = [set() for _ in range(ranks)]
        self.here = [0.0] * ranks
        self.events, self.numbers = [], itertools.count()
        for rank in range(ranks):
            self.at(latency if rank else 0.0, self.form, rank)
        while self.events:
            now, _, action, arguments = heapq.heappop(self.events)
            action(now, *arguments)
        assert all(len(pieces_here) == self.pieces for pieces_here in self.have)

    def at(self, time, action, *arguments):
        heapq.heappush(self.events, (time, next(self.numbers), action, arguments))

    def through(self, now, way, rank, action, *arguments):
        """Move a piece through a port once the port is free."""
        self.free[way, rank] = max(self.free[way, rank], now) + self.seconds[way]
        self.at(self.free[way, rank], action, *arguments)

    def ask(self, now, source, rank, arrived, *what):
        self.at(now + self.latency, self.send, source, rank, arrived, *what)

    def send(self, now, source, *arguments):
        self.sent[source] += 1
        self.through(now, "out", source, self.travel, *arguments)

    def travel(self, now, *arguments):
        self.at(now + self.latency, self.receive, *arguments)

    def receive(self, now, rank, arrived, *what):
        self.received[rank] += 1
        self.through(now, "in", rank, arrived, rank, *what)

    def form(self, now, rank):
        """Ask for terms of the rank's first unfinished section, and form the possible
        pieces.
        """
        mine = [
            k
            for k, maker in enumerate(self.makers)
            if maker == rank and self.next[k] < self.bounds[k + 1]
        ]
        if not mine:
            return
        k, asked, there = mine[0], self.terms_asked[rank], self.terms_here[rank]
        terms = self.terms[k]
        for piece in range(self.next[k], self.bounds[k + 1]):
            for turn in range(len(terms)):
                source = terms[(turn + k) % len(terms)]
                if source == rank or (piece, source) in asked:
                    continue
                if len(asked) - len(there) < TERMS_AHEAD:
                    asked.add((piece, source))
                    self.ask(now, source, rank, self.term, piece, source)
        while self.next[k] < self.bounds[k + 1] and all(
            term == rank or (self.next[k], term) in there for term in terms
        ):
            self.next[k] += 1
            for other in range(self.ranks):
                later = 0.0 if other == rank else self.latency
                self.at(now + later, self.told, other, k, self.next[k])
        if self.next[k] == self.bounds[k + 1]:
            self.form(now, rank)

    def term(self, now, rank, *which):
        self.terms_here[rank].add(which)
        self.form(now, rank)

    def told(self, now, rank, k, ready):
        self.known[rank][k] = max(self.known[rank][k], ready)
        self.take(now, rank)

    def take(self, now, rank):
        """Ask for the pieces of other ranks; each rank begins with a different rank's pieces."""
        have, asked = self.have[rank], self.asked[rank]
        for turn in range(1, len(self.terms) + 1):
            k = (turn + rank) % len(self.terms)
            mine = self.makers[k] == rank
            ready = range(self.bounds[k], self.known[rank][k])
            on_their_way = sum(piece in asked for piece in ready)
            for piece in ready:
                if piece in have or piece in asked:
                    continue
                if mine:
                    have.add(piece)
                    continue
                if len(asked) >= SECTIONS_AHEAD or on_their_way >= self.from_one:
                    break
                asked.add(piece)
                on_their_way += 1
                self.ask(now, self.makers[k], rank, self.piece, piece)
        if len(have) == self.pieces and not self.here[rank]:
            self.here[rank] = now

    def piece(self, now, rank, piece):
        self.asked[rank].remove(piece)
        self.have[rank].add(piece)
        self.take(now, rank)
