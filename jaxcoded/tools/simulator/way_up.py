"""Simulate the way up: messages become sums, layer by layer."""

from typing import NamedTuple

import numpy as np

from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.network import Network


class WayUp(NamedTuple):
    """The way up of a round: float64 and bool arrays ``(N,)``."""

    first: np.ndarray  # when the first piece of each rank's sum is ready
    last: np.ndarray  # when the last piece of each rank's sum is ready
    used: np.ndarray  # whether a rank's message enters the root's sum


class Parents:
    """Parents of one layer that have equal numbers of children and of required messages. ``seconds`` is how long
    sections take once children have whole messages; None without sections."""

    def __init__(
        self,
        layout: Layout,
        network: Network,
        payload: float,
        ranks: np.ndarray,
        seconds: float | None = None,
    ) -> None:
        self.ranks, self.latency = ranks, network.latency
        self.count = int(layout.counts[ranks[0]])
        self.needs = int(layout.needs[ranks[0]])
        self.copies = int(layout.copies[ranks[0]])
        children = layout.first[ranks][:, None] + np.arange(self.count)
        start = int(children[0, 0])
        self.rows = np.arange(len(ranks))[:, None]
        neighbours = int(children[-1, -1]) - start + 1 == children.size
        self.children: slice | np.ndarray = (
            slice(start, start + children.size) if neighbours else children.ravel()
        )
        length = payload * layout.messages[start]
        inlined = length <= network.inline
        self.pieces = max(1, int(np.ceil(length / network.piece)))
        piece = length / self.pieces
        # A processor handles one offer at a time, and so does the port if messages are
        # short.
        handling = network.overhead + (piece / network.bandwidth if inlined else 0.0)
        self.turns = handling * np.arange(self.needs)
        self.handling = handling * self.needs
        # Requested pieces arrive one after the other.
        self.asked = 0.0 if inlined else (network.trips - 1) * network.latency
        self.period = self.needs * network.overhead + max(
            0.0 if inlined else self.needs * piece / network.bandwidth,
            0.0 if inlined else piece / network.sending,
            self.needs * piece / network.combine,
        )
        self.as_a_whole = seconds is not None
        if seconds is not None:
            self.pieces, self.asked, self.period = 1, 0.0, seconds

    def sum_up(
        self, called: np.ndarray, first: np.ndarray, last: np.ndarray, used: np.ndarray
    ) -> None:
        """Record when the first and the last piece of these parents' sums are ready, and which children are
        used."""
        ready = last if self.as_a_whole else first
        heard = ready[self.children].reshape(-1, self.count) + self.latency
        if self.copies > 1:  # use the first child of each class
            classes = heard.reshape(len(heard), -1, self.copies)
            chosen = classes.argmin(axis=2) + np.arange(self.needs) * self.copies
        elif self.needs < self.count:
            chosen = np.argpartition(heard, self.needs - 1, axis=1)[:, : self.needs]
        else:
            chosen = np.arange(self.count)[None]
        enough = np.sort(heard[self.rows, chosen], axis=1) - self.turns
        enough = enough.max(axis=1) + self.handling
        begun = np.maximum(called[self.ranks], enough) + self.asked + self.period
        complete = last[self.children].reshape(-1, self.count)
        slowest = complete[self.rows, chosen].max(axis=1)
        done = np.maximum(
            begun + (self.pieces - 1) * self.period,
            slowest + self.latency + self.asked + self.period,
        )
        first[self.ranks], last[self.ranks] = begun, done
        taken = np.zeros(heard.shape, bool)
        taken[self.rows, chosen] = True
        used[self.children] = taken.ravel()
