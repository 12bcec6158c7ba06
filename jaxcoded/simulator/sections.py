"""Rounds in sections: the ranks of one family form a long sum together (``docs/engine.md``).

The root chooses the messages and cuts the sum into sections; each has a maker, who fetches its part
of these messages, and everybody fetches all sections. All ports are in use at the same time, so what
counts is what the busiest one has to send or to receive, whatever the order is.
"""

from typing import NamedTuple

import numpy as np

from jaxcoded.simulator.layout import Layout
from jaxcoded.simulator.network import Network
from jaxcoded.simulator.way_up import WayUp

IN_SECTIONS = "long sums are formed in sections"  # in words

# As in the engine (``node.h``, ``node_sections.cpp``, ``engine.py``).
_STALL = 0.002  # seconds that the root waits for those who come a little later
_MOST = 64  # sections
_LEAST_PIECE = 16 << 10  # bytes
_PIECES = 2  # of each rank's section, at least
_AHEAD = 6  # pieces that a section is formed from, which its maker asks for at a time

# By which part the busiest ports take longer than they have to, where sections are formed from many
# more messages than their makers ask for at a time, since these wait for some while other ports are
# idle. About what rounds of up to 64 ranks took that were played piece by piece, as in
# tests/simulator/test_simulated_sections.py.
_IDLE = 0.3


class Traffic(NamedTuple):
    """What each rank's port carries in a round, float64 ``(N,)`` in bytes, and who forms what.

    Attributes:
        terms_sent: of its message, to the makers.
        terms_received: of the messages of others, for its own section.
        sections_sent: of its own section, to everybody.
        sections_received: of those of others.
        used: bool ``(N,)``, whether its message enters the sum.
        sections: how many there are.
        terms: from how many messages each is formed.
    """

    terms_sent: np.ndarray
    terms_received: np.ndarray
    sections_sent: np.ndarray
    sections_received: np.ndarray
    used: np.ndarray
    sections: int
    terms: int


def forms_sections(layout: Layout, network: Network, payload: float) -> bool:
    """Whether the engine forms sums of so many bytes in sections: those that are long enough, where
    all ranks are the root's children and their messages as long as the sum.

    Example:
        >>> from jaxcoded.simulator import Layout, Network
        >>> from jaxcoded.simulator.sections import forms_sections
        >>> star, tree = Layout.balanced(13, 12), Layout.balanced(13, 3)
        >>> [forms_sections(it, Network(), 20e6) for it in (star, tree)]
        [True, False]
        >>> forms_sections(star, Network(), 1e3)
        False
    """
    least = network.sections_from
    if not least or payload < least or not layout.one_family:
        return False
    return _pieces(layout, network, payload) > 1


def _pieces(layout: Layout, network: Network, payload: float) -> int:
    shortest = max(_LEAST_PIECE, payload / (_PIECES * layout.size))
    return max(1, int(np.ceil(payload / min(network.piece, shortest))))


class Sections:
    """What does not change from round to round."""

    def __init__(self, layout: Layout, network: Network, payload: float) -> None:
        self.layout, self.network, self.payload = layout, network, payload
        self.children = layout.size - 1
        self.needs, self.copies = int(layout.needs[0]), int(layout.copies[0])
        self.pieces = _pieces(layout, network, payload)
        # its vector is added, whatever it is; where work is shared, if there are blocks in it
        self.adds_root = layout.placement is None or layout.loads[0] > 0
        self._late = 0  # ranks, in this round
        self._sends_until = (
            -np.inf
        )  # when the root has sent results to those who were late

    def up(self, called: np.ndarray, busy: np.ndarray) -> WayUp:
        """The sum of a round, once those who are there in time have formed it.

        Args:
            called: float64 ``(N,)``, when each rank has its message; minus infinity if it has none.
            busy: float64 ``(N,)``, until when it computes.
        """
        network, latency = self.network, self.network.latency
        heard = called[1:] + latency
        comes = np.maximum(called, busy)[1:] + latency
        suffices = max(called[0], self._suffices(heard))
        begun = min(max(suffices, comes.max()), suffices + _STALL)
        there = comes <= begun
        has_message = called[1:] > -np.inf
        joins = np.zeros(self.children, bool)
        traffic = self.traffic(there, has_message, joins)
        root, everybody = self._moving(traffic)
        # word of the sections, a piece to form, and one that is formed
        begun += 2 * network.trips * latency
        joins = ~there & (comes <= begun + root)
        if joins.any():
            traffic = self.traffic(there, has_message, joins)
            root, everybody = self._moving(traffic)
        # the root's port may still be sending older results to those who are late
        terms = traffic.terms_sent[0] / network.sending
        begun += max(0.0, self._sends_until + terms - (begun + root))
        last = np.full(self.layout.size, np.inf)
        last[0] = begun + root
        done = max(begun + everybody, last[0] + latency)
        last[1:][there] = done
        fetched = comes + network.trips * latency + self.payload / network.bandwidth
        last[1:][joins] = np.maximum(fetched, done)[joins]
        self._late = int((np.isinf(last[1:]) & np.isfinite(comes)).sum())
        return WayUp(last, last, traffic.used)

    def down(self, up: WayUp, frozen: np.ndarray, patience: float) -> np.ndarray:
        """When each rank has the result; who was late gets it from the root. See `_Job.down`."""
        network = self.network
        sent = self._late * self.payload / network.sending
        self._sends_until = max(self._sends_until, up.last[0]) + sent
        fetched = up.last[0] + self.payload / network.bandwidth
        fetched = max(fetched, self._sends_until) + network.trips * network.latency
        done = np.where(np.isinf(up.last), fetched, up.last)
        return np.where(np.isposinf(frozen), np.inf, np.maximum(done, frozen))

    def traffic(
        self, there: np.ndarray, has_message: np.ndarray, joins: np.ndarray
    ) -> Traffic:
        """What ports carry.

        Args:
            there: bool ``(N − 1,)``, which children are there in time, so that they form sections.
            has_message: bool ``(N − 1,)``, which of them have a message that may be used.
            joins: bool ``(N − 1,)``, which others come while the sum is formed, and fetch it, too.
        """
        makers = np.append(np.flatnonzero(there) + 1, 0)
        ranks = len(makers)
        count = min(ranks, _MOST, self.pieces)
        bounds = self.pieces * np.arange(count + 1) // count
        sizes = np.diff(bounds) * self.payload / self.pieces
        makers = makers[:count]
        own = np.zeros(self.layout.size)
        own[makers] = sizes
        serves, uses_own, terms = self._turns(there & has_message, makers, sizes)
        served = np.concatenate([[self.adds_root * self.payload], serves])
        used = served > 0
        used[0] = False
        uses_own[makers == 0] = self.adds_root
        fetched = np.zeros(self.layout.size)
        fetched[makers] = (terms + self.adds_root - uses_own) * sizes
        sent = served.copy()
        sent[makers] -= uses_own * sizes
        received = np.zeros(self.layout.size)
        received[0] = self.payload
        received[1:][there | joins] = self.payload
        return Traffic(
            terms_sent=sent,
            terms_received=fetched,
            sections_sent=own * (ranks - 1 + np.count_nonzero(joins)),
            sections_received=received - own,
            used=used,
            sections=count,
            terms=terms + self.adds_root,
        )

    def _suffices(self, heard: np.ndarray) -> float:
        """When the root knows of messages that suffice."""
        if self.copies > 1:
            heard = heard.reshape(-1, self.copies).min(axis=1)
        elif self.needs < self.children:
            heard = np.partition(heard, self.needs - 1)[: self.needs]
        overhead = self.network.overhead
        waits = np.sort(heard) - overhead * np.arange(len(heard))
        return float(waits.max() + overhead * len(heard))

    def _turns(
        self, usable: np.ndarray, makers: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Which messages the sections are formed from: copies take turns, and so does who is not
        needed.

        Returns:
            The bytes for which each child's message is used, float64 ``(N − 1,)``; whether each
            section is formed from its maker's message; and from how many each is.
        """
        count = len(sizes)
        serves, number = np.zeros(self.children), np.arange(count)
        if self.copies > 1:
            table = usable.reshape(-1, self.copies)
            place = np.cumsum(table, axis=1) - 1
            alike = table.sum(axis=1)
            for many in np.unique(alike[alike > 0]):
                share = np.bincount(number % many, sizes, minlength=many)
                mine = table & (alike == many)[:, None]
                serves.reshape(table.shape)[mine] = share[place[mine]]
            of_all = np.repeat(alike, self.copies)[makers - 1]
            turn = number % np.maximum(of_all, 1)
            uses_own = usable[makers - 1] & (place.ravel()[makers - 1] == turn)
            return serves, uses_own & (makers > 0), int((alike > 0).sum())
        rows = np.flatnonzero(usable)
        needed = min(self.needs, len(rows))
        if not needed:
            return serves, np.zeros(count, bool), 0
        start = np.searchsorted(rows, number * self.children // count) % len(rows)
        # those before the start, in a circle, are not needed
        left = len(rows) - needed
        change = np.zeros(2 * len(rows) + 1)
        np.add.at(change, start + needed, sizes)
        np.add.at(change, start + needed + left, -sizes)
        unused = np.cumsum(change[:-1]).reshape(2, -1).sum(axis=0)
        serves[rows] = np.maximum(sizes.sum() - unused, 0.0)
        place = np.searchsorted(rows, makers - 1)
        inside = (place - start) % len(rows) < needed
        return serves, inside & (makers > 0) & usable[makers - 1], needed

    def _moving(self, traffic: Traffic) -> tuple[float, float]:
        """Seconds until the root has all sections, and until everybody has."""
        network = self.network
        terms, sections = traffic.terms_received, traffic.sections_received
        most = -(-self.pieces // traffic.sections)  # pieces of a section
        ways = [
            (
                traffic.terms_sent / network.sending,
                traffic.sections_sent / network.sending,
            ),
            (terms / network.bandwidth, sections / network.bandwidth),
            (terms / network.combine, np.zeros(len(terms))),
        ]
        everybody = _phases(ways, most)
        # it waits for what others send, not for what it sends them
        ways[0] = ways[0][0][1:], ways[0][1][1:]
        root = _phases(ways, most)
        # pieces that come and go, and word of those that can be had
        handled = terms + traffic.terms_sent + 2 * sections + traffic.sections_sent
        handling = float(handled.max()) * self.pieces / self.payload * network.overhead
        ranks = int((sections > 0).sum())
        idle = 1 + _IDLE * max(0.0, 1 - _AHEAD / max(traffic.terms, 1))
        # each maker sends its last piece to one after the other
        turns = (ranks - 1) * self.payload / self.pieces / network.sending
        return handling + idle * root - turns / 2, handling + idle * everybody


def _phases(ways: list[tuple[np.ndarray, np.ndarray]], pieces: int) -> float:
    """Seconds of the busiest ports and processors: until the first pieces of all sections are formed,
    until the last ones are, and until these are everywhere."""
    first = max(float(terms.max()) for terms, _ in ways) / pieces
    last = max(float(sections.max()) for _, sections in ways) / pieces
    both = max(float((terms + sections).max()) for terms, sections in ways)
    return first + both * (1 - 1 / pieces) + last
