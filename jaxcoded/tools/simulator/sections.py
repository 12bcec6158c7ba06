"""Simulate sections: the ranks of a family form a long sum together (``docs/engine.md``).

The root chooses the messages that enter the sum, and cuts the sum into sections. The maker of each section fetches
this section's part of the chosen messages, and every rank fetches all sections. All ports are in use at the same
time. So in any order, forming the sum takes the time of the busiest port. The sizes of the sections minimize this
time.
"""

from typing import NamedTuple

import numpy as np

from jaxcoded.plan.sections import SECTION_PIECES, pay_in_layers
from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.network import Network
from jaxcoded.tools.simulator.way_up import WayUp

IN_SECTIONS = "long sums are formed in sections"  # a text for reports

# As in the engine (``node.h``):
# the least time in seconds for which the root waits for latecomers
_STALL = 0.002
_LEAST_PIECE, _MOST_PIECE = 16 << 10, 32 << 10  # bytes of a piece

# The fraction of the time in which the busiest port is busy, apart from the first and last pieces. It was measured on
# 13 hosts with 200 Mbit/s; tests/simulator/test_simulated_sections.py has the figures. The test simulates rounds
# piece by piece, with processors that are always free; there the fraction is 0.9 to 1.
_BUSY = 0.9


class Traffic(NamedTuple):
    """Bytes that each rank's port carries in a round, float64 ``(N,)``, and which messages enter the sum."""

    terms_sent: np.ndarray  # bytes of the rank's message, sent to the makers
    # bytes of other messages, received for the rank's section
    terms_received: np.ndarray
    sections_sent: np.ndarray  # bytes of the rank's section, sent to all ranks
    sections_received: np.ndarray  # bytes of other sections, received
    used: np.ndarray  # bool, whether the rank's message enters the sum


def forms_sections(layout: Layout, network: Network, payload: float) -> bool:
    """Return whether the engine forms a sum in sections. It does so if the sum is long, and if ports then transfer
    fewer bytes. Every rank counts as a host."""
    least = network.sections_from
    if not least or payload < least or _pieces(layout.size, network, payload) < 2:
        return False
    if layout.counts[0] == layout.size - 1:  # all other ranks are the root's children
        return True
    if not (layout.messages == 1).all():
        return False
    most = max(int(layout.counts[0]), int(layout.counts[1:].max()) + 1)
    return pay_in_layers(
        int(layout.needs[0]), int(layout.counts[0]), len(layout.layers) - 2, most
    )


def in_a_layer(
    layout: Layout, network: Network, payload: float, children: int
) -> float:
    """Return how many seconds a parent below the root needs to form its message in sections with this many children.
    The children need the same time to get the result from the parent. The parent's port transfers the vector once, in
    pieces; control messages and first pieces come before that, and last pieces after."""
    pieces = _pieces(layout.size, network, payload)
    moving = payload / min(network.bandwidth, network.sending)
    turns = (children - 1) * payload / pieces / network.bandwidth
    words = 2 * network.trips * network.latency
    return words + 2 * pieces * network.overhead + (moving + turns) / _BUSY


def _pieces(ranks: int, network: Network, payload: float) -> int:
    wanted = payload / (SECTION_PIECES * ranks)
    piece = min(network.piece, max(_LEAST_PIECE, min(wanted, _MOST_PIECE)))
    return max(1, int(np.ceil(payload / piece)))


class Sections:
    """The parts of the simulated sections that are the same in every round: those of the root's family. The other
    ranks of the layout do not matter."""

    def __init__(self, layout: Layout, network: Network, payload: float) -> None:
        self.network, self.payload = network, payload
        self.children = int(layout.counts[0])
        self.needs, self.copies = int(layout.needs[0]), int(layout.copies[0])
        self.pieces = _pieces(1 + self.children, network, payload)
        # lengths of the ranks' messages, relative to the sum
        self.lengths = np.append(1.0, layout.messages[1 : 1 + self.children])
        # a root without data sends no message
        self.sends_root = bool(layout.loads[0] > 0)
        self._late = 0  # number of late ranks in this round
        self._lasted = 0.0  # seconds in which the latest sum was formed
        # the time until which the root sends results to late ranks
        self._sends_until = -np.inf

    def up(self, called: np.ndarray, busy: np.ndarray) -> WayUp:
        """Return the way up of a round, whose sum is formed by the ranks that are in time. ``called`` is the time at
        which each rank has its message, minus infinity for a rank without a message. ``busy`` is the time until which
        the rank computes."""
        network, latency = self.network, self.network.latency
        heard = called[1:] + latency
        comes = np.maximum(called, busy)[1:] + latency
        suffices = max(called[0], self._suffices(heard))
        begun = self._begun(suffices, comes)
        in_time = comes <= begun
        has_message = called[1:] > -np.inf
        joins = np.zeros(self.children, bool)
        traffic = self.traffic(in_time, has_message, joins)
        root, everybody = self._moving(traffic)
        # the latencies of the root's plan, of a piece to form, and of a formed piece
        begun += 2 * network.trips * latency
        joins = ~in_time & (comes <= begun + root)
        if joins.any():
            traffic = self.traffic(in_time, has_message, joins)
            root, everybody = self._moving(traffic)
        # the root's port may still be sending older results to late ranks
        terms = self._sends_until + traffic.terms_sent[0] / network.sending
        begun += max(0.0, terms - (begun + root))
        last = np.full(1 + self.children, np.inf)
        last[0] = begun + root
        self._lasted = root
        section = terms + traffic.sections_sent[0] / network.sending
        done = max(begun + everybody, last[0] + latency, section)
        last[1:][in_time] = done
        fetched = comes + network.trips * latency + self.payload / network.bandwidth
        last[1:][joins] = np.maximum(fetched, done)[joins]
        self._late = int((np.isinf(last[1:]) & np.isfinite(comes)).sum())
        return WayUp(last, last, traffic.used)

    def down(self, last: np.ndarray) -> np.ndarray:
        """Return when each rank has the result, given when its sum was ready (`up`). Late ranks get it from the root."""
        network = self.network
        sent = self._late * self.payload / network.sending
        self._sends_until = max(self._sends_until, last[0]) + sent
        fetched = last[0] + self.payload / network.bandwidth
        fetched = max(fetched, self._sends_until) + network.trips * network.latency
        return np.where(np.isinf(last), fetched, last)

    def traffic(
        self, in_time: np.ndarray, has_message: np.ndarray, joins: np.ndarray
    ) -> Traffic:
        """Return what ports carry. Each argument is bool ``(N − 1,)`` and marks some children. The children in
        ``in_time`` come in time and form sections, the children in ``has_message`` contribute, and the children in
        ``joins`` come later and only fetch the sum."""
        usable = np.append(self.sends_root, in_time & has_message)
        serves, terms = self._serves(usable)
        own = self._sections(np.append(True, in_time), usable, serves, terms)
        # A maker does not have to receive the part of its own message that belongs to
        # its section.
        uses_own = np.minimum(own, serves) * self.lengths
        fetching = np.append(True, in_time | joins)
        used = serves > 0
        used[0] = False
        return Traffic(
            terms_sent=(serves * self.lengths - uses_own) * self.payload,
            terms_received=(own * terms - uses_own) * self.payload,
            sections_sent=own * (fetching.sum() - 1) * self.payload,
            sections_received=(fetching - own) * self.payload,
            used=used,
        )

    def _begun(self, suffices: float, comes: np.ndarray) -> float:
        """Return when the root stops waiting for latecomers. It waits no longer than the time that their
        help saves."""
        comes = np.sort(comes[np.isfinite(comes)])
        if not comes.size or not np.isfinite(suffices):
            return np.inf
        counts = np.arange(1, len(comes) + 1)
        messages = self.needs * self.lengths[1:].max(initial=0.0)
        # the time to form the sum: how many vectors each port transfers
        lasts = (messages + counts) / (counts + 1)
        patience = np.maximum(_STALL, self._lasted * (lasts / lasts[-1] - 1))
        patience[-1] = 0.0
        begins = np.maximum(comes, suffices + patience)
        return float(begins[begins < np.append(comes[1:], np.inf)][0])

    def _suffices(self, heard: np.ndarray) -> float:
        """Return when the root knows of enough messages for the sum."""
        if self.copies > 1:
            heard = heard.reshape(-1, self.copies).min(axis=1)
        elif self.needs < self.children:
            heard = np.partition(heard, self.needs - 1)[: self.needs]
        overhead = self.network.overhead
        waits = np.sort(heard) - overhead * np.arange(len(heard))
        return float(waits.max() + overhead * len(heard))

    def _serves(self, usable: np.ndarray) -> tuple[np.ndarray, float]:
        """Return for which fraction of the sum each rank's message is used, float64 ``(N,)``, and the total length of
        the used messages. Ranks that send copies, or surplus messages, are used for equal fractions."""
        children = usable[1:]
        if self.copies > 1:
            table = children.reshape(-1, self.copies)
            alike = table.sum(axis=1)
            terms = int((alike > 0).sum())
            part = np.repeat(1 / np.maximum(alike, 1), self.copies)
        else:
            terms = min(self.needs, int(children.sum()))
            part = np.full(self.children, terms / max(int(children.sum()), 1))
        serves = usable * np.append(1.0, part)
        return serves, float(serves @ self.lengths)

    def _sections(
        self, makers: np.ndarray, usable: np.ndarray, serves: np.ndarray, terms: float
    ) -> np.ndarray:
        """Return the fraction of the sum that each maker forms, float64 ``(N,)``, in whole pieces. The fractions are
        such that the busiest port transfers as little as possible. A maker sends its message, except the part that it
        uses itself, and sends its section to all other ranks. It receives messages for its section, and the other
        sections. What it sends and what it receives both grow with the size of its section."""
        receivers = np.count_nonzero(makers) - 1
        own_message = usable * self.lengths
        sends = np.maximum(receivers - own_message, 1e-9)[makers]
        receives = np.maximum(terms - 1.0 - own_message, 1e-9)[makers]
        already = (serves * self.lengths)[makers]

        def formed(most: float) -> np.ndarray:
            room = np.minimum((most - already) / sends, (most - 1) / receives)
            return np.maximum(room, 0.0)

        least, most = 0.0, 1.0 + terms + receivers
        for _ in range(40):
            middle = (least + most) / 2
            if formed(middle).sum() < 1:
                least = middle
            else:
                most = middle
        bounds = np.cumsum(formed(most))
        bounds = np.round(bounds / bounds[-1] * self.pieces)
        own = np.zeros(1 + self.children)
        own[makers] = np.diff(bounds, prepend=0.0) / self.pieces
        return own

    def _moving(self, traffic: Traffic) -> tuple[float, float]:
        """Return the seconds until the root has all sections, and the seconds until all
        ranks have all sections."""
        network = self.network
        sent = (traffic.terms_sent + traffic.sections_sent) / network.sending
        terms, sections = traffic.terms_received, traffic.sections_received
        received = (terms + sections) / network.bandwidth
        others = max(received.max(), (terms / network.combine).max(), sent[1:].max())
        # pieces that a rank receives and sends, and the announcements of pieces
        handled = terms + traffic.terms_sent + 2 * sections + traffic.sections_sent
        handling = float(handled.max()) * self.pieces / self.payload * network.overhead
        # the time until the first pieces are formed, and the time in which all ranks fetch
        # the last piece of each maker
        ranks = np.count_nonzero(sections)
        turns = (ranks - 1) * self.payload / self.pieces / network.bandwidth
        return (  # the root waits for what other ranks send, not for what it sends
            handling + float(others + turns / 2) / _BUSY,
            handling + float(max(others, sent[0]) + turns) / _BUSY,
        )
