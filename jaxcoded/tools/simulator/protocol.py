"""Simulate rounds of the engine's protocol, computing all ranks of a layer at a time.

The rounds follow ``docs/engine.md``. Ranks announce their messages to their parents. A parent that has called the round
fetches the messages of the first children that suffice, piece by piece. It adds them up and announces its own message.
Results go down in the same way. A rank that calls a decided round leaves out its work and takes the result. A port
transfers one message at a time. Long sums are formed in sections (`sections`). A round is a few array operations per
layer, so the simulation of a round of millions of ranks takes well under a second.

The simulation leaves out the bound of the history, control messages, and processors that ranks share.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.balancing import check_waits, rebalanced
from jaxcoded.tools.simulator.costs import Costs, Parts
from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.network import Network
from jaxcoded.tools.simulator.ring import Ring
from jaxcoded.tools.simulator.sections import Sections, forms_sections, in_a_layer
from jaxcoded.tools.simulator.sharing import Sharing
from jaxcoded.tools.simulator.stragglers import Delays, Stragglers, as_model
from jaxcoded.tools.simulator.way_up import Parents, WayUp

# A rank whose parent does not answer asks further up after this many seconds, or after 4
# median rounds, whichever is longer.
_PATIENCE = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A simulated job.

    Attributes:
        ends: float64 ``(rounds,)``, when the root had each result, in seconds from the beginning; infinite if it
            never has the result.
        used: int64 ``(N,)``, the number of rounds in which each rank's message entered the sum.
        skipped: int64 ``(N,)``, the number of rounds in which each rank was behind and left out its work.
    """

    ends: np.ndarray
    used: np.ndarray
    skipped: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Return the seconds of each round, from result to result at the root: float64 ``(rounds,)``."""
        with np.errstate(invalid="ignore"):
            lasted = np.diff(self.ends, prepend=0.0)
        return np.where(np.isnan(lasted), np.inf, lasted)

    @property
    def mean(self) -> float:
        """Return the mean seconds of a round."""
        return float(self.ends[-1] / len(self.ends))


def simulate(
    layout: Layout | Ring,
    network: Network,
    *,
    payload: float,
    work: float,
    stragglers: Stragglers | str | None = None,
    rounds: int = 100,
    seed: int = 0,
    fresh: bool = False,
    balanced: bool = False,
    costs: Costs | None = None,
) -> Outcome:
    """Simulate rounds of an all-reduce, with computation before each round.

    Args:
        layout: the tree, as a `Layout`; or a `Ring`.
        network: the ports and links.
        payload: bytes that are summed.
        work: seconds that one usual rank would take for the whole batch. Each rank takes its load times these
            seconds, slowed down by ``stragglers``.
        stragglers: a model, or the text that names a model. Default: no stragglers.
        rounds: the number of rounds.
        seed: the seed of the model's draws.
        fresh: whether all ranks begin each round when the root has the previous result, as in the papers' models. Then
            no rank is behind, and the way down takes no time.
        balanced: whether loads are in proportion to the speeds in the previous round; only for layouts that wait for
            all ranks. Known costs are then ignored.
        costs: the costs of the examples in the batches. Default: all examples cost the same.

    Raises:
        TypeError: ``layout`` is not a `Layout` or `Ring`, but for example a plan.
        ValueError: a number is negative, there are no rounds, or ``balanced`` is given for a layout with a code or
            shared work. Also if ``costs`` are given for `Layout.balanced` with a code, or unknown costs for shared
            work.

    Example:
        >>> from jaxcoded.tools.simulator import stragglers
        >>> from jaxcoded.tools.simulator import Layout, Network, simulate
        >>> slow = stragglers.named("fixed(ranks=(12,), factor=10)")
        >>> times = [
        ...     simulate(
        ...         Layout.balanced(13, fanout=3, stragglers=s),
        ...         Network(), payload=4e6, work=1.0, stragglers=slow, rounds=20,
        ...     ).mean
        ...     for s in (0, 1)
        ... ]
        >>> [round(t, 2) for t in times]  # 10/12, and 4/15, and the network
        [0.85, 0.28]
    """
    if not isinstance(layout, Layout | Ring):
        raise TypeError(
            "layout must be a Layout or a Ring (Layout.of takes a Plan), got "
            f"{type(layout).__name__}"
        )
    _require.integer("rounds", rounds, 1)
    for name, value in (("payload", payload), ("work", work)):
        if not (0 <= value < np.inf):
            raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    seed = _require.integer("seed", seed, 0)
    delays = as_model(stragglers).rounds(layout.size, seed)
    if balanced:
        check_waits(layout)
    parts = None if costs is None else Parts(costs, layout, seed, balanced)
    if isinstance(layout, Ring):
        return _ring(layout, network, payload, work, delays, rounds, balanced, parts)
    job = _Job(layout, network, payload)
    numbers, loads = layout.ranks, layout.loads
    free = np.zeros(layout.size)
    frozen = np.full(layout.size, -np.inf)
    ends = np.full(rounds, np.inf)
    used = np.zeros(layout.size, np.int64)
    skipped = np.zeros(layout.size, np.int64)
    sharing = None
    if layout.placement.blocks and work:
        sharing = Sharing(layout, network, work)
    lasted: deque[float] = deque(maxlen=31)
    for number in range(rounds):
        drawn = next(delays)
        delay = Delays(*(column[numbers] for column in drawn))
        cost = loads if parts is None else parts.loads(number, loads)
        took = delay.time(work * cost)
        if balanced:
            loads = rebalanced(loads, took)
        called = busy = free + took
        frozen = np.where(delay.stopped, free + delay.seconds, frozen)
        if sharing is not None:
            if parts is not None:
                sharing.cost(parts.blocks(number))
            called, busy = sharing.round(free, delay)
        up = job.up(called, busy)
        if not np.isfinite(up.last[0]):
            break
        used += up.used & (called > -np.inf)
        ends[number] = up.last[0] + network.call
        if fresh:
            free[:] = ends[number]
            continue
        lasted.append(float(ends[number] - ends[number - 1] if number else ends[0]))
        median = statistics.median(lasted)
        received = job.down(up, frozen, max(_PATIENCE, 4 * median))
        behind = (free >= received) & np.isfinite(free)  # dead ranks are never behind
        skipped += behind
        replayed = free + payload / network.combine
        free = np.where(behind, replayed, np.maximum(busy, received)) + network.call
    total = np.zeros((2, layout.size), np.int64)
    total[:, numbers] = used, skipped
    return Outcome(ends, total[0], total[1])


def _ring(
    layout: Ring,
    network: Network,
    payload: float,
    work: float,
    delays: Iterator[Delays],
    rounds: int,
    balanced: bool,
    parts: Parts | None,
) -> Outcome:
    """Simulate a ring: all ranks have the result when the last message has gone around
    the ring."""
    n = layout.size
    piece = payload / n
    step = network.latency + network.overhead
    step += piece / min(network.bandwidth, network.sending)
    moving = (n - 1) * (2 * step + piece / network.combine)
    loads, lasted = layout.loads, np.empty(rounds)
    for number in range(rounds):
        cost = loads if parts is None else parts.loads(number, loads)
        took = next(delays).time(work * cost)
        lasted[number] = took.max() + moving + network.call
        if balanced:
            loads = rebalanced(loads, took)
    ends = np.cumsum(lasted)
    done = np.full(n, np.isfinite(ends).sum())
    return Outcome(ends, done, np.zeros(n, np.int64))


class _Below:
    """The ranks of one layer on the way down."""

    def __init__(
        self,
        layout: Layout,
        network: Network,
        payload: float,
        pieces: int,
        ranks: slice,
        in_sections: bool,
    ) -> None:
        self.ranks, self.above = ranks, layout.parents[ranks]
        children = layout.counts[self.above]
        inlined = payload <= network.inline
        piece = payload / pieces
        period = children * network.overhead
        transit = network.latency
        if not inlined:
            port = children * piece / network.sending
            period = period + np.maximum(piece / network.bandwidth, port)
            # seconds until an announced piece has arrived
            transit += (network.trips - 1) * network.latency
        # seconds for the first piece, and for all later pieces
        self.period, self.rest = transit + period, (pieces - 1) * period
        # a rank relays the result only once the whole result has arrived
        if in_sections:
            most = int(children.max())
            self.period, self.rest = in_a_layer(layout, network, payload, most), 0.0
        # the same port sends results down and sums up
        self.sending = transit + payload * children / network.sending
        own_message = payload * layout.messages[self.above] / network.sending
        self.sending_both = self.sending + own_message


class _Job:
    """The parts of a simulated job that are the same in every round."""

    def __init__(self, layout: Layout, network: Network, payload: float) -> None:
        self.layout, self.network, self.payload = layout, network, payload
        in_sections = forms_sections(layout, network, payload)
        # the simulated sections of the root's sum
        self.sections = Sections(layout, network, payload) if in_sections else None
        self.family = slice(0, 1 + int(layout.counts[0]))
        self.parents = [
            parents
            for layer in reversed(layout.layers[1:] if in_sections else layout.layers)
            for parents in self._alike(np.arange(layer.start, layer.stop))
        ]
        # the result has the same length on all ranks
        self.pieces = max(1, int(np.ceil(payload / network.piece)))
        self.below = [
            _Below(layout, network, payload, self.pieces, ranks, in_sections)
            for ranks in layout.layers[2 if in_sections else 1 :]
        ]
        # when ranks below a frozen rank ask further up
        self.asked = np.full(layout.size, -np.inf)

    def _alike(self, ranks: np.ndarray) -> list[Parents]:
        layout = self.layout
        ranks = ranks[layout.counts[ranks] > 0]
        if not len(ranks):
            return []
        keys = np.stack(
            [layout.counts[ranks], layout.needs[ranks], layout.copies[ranks]]
        )
        kinds, kind = np.unique(keys, axis=1, return_inverse=True)
        return [
            Parents(
                layout,
                self.network,
                self.payload,
                ranks[np.ravel(kind) == number],
                in_a_layer(layout, self.network, self.payload, int(kinds[0, number]))
                if self.sections
                else None,
            )
            for number in range(kinds.shape[1])
        ]

    def up(self, called: np.ndarray, busy: np.ndarray) -> WayUp:
        """Return the way up of a round. ``called`` is the time at which each rank calls, and ``busy`` the
        time until which it computes."""
        first, last = called.copy(), called.copy()
        used = np.zeros(self.layout.size, bool)
        for parents in self.parents:
            parents.sum_up(called, first, last, used)
        if self.sections:
            ranks = self.family
            busy = np.maximum(busy[ranks], last[ranks])
            first[ranks], last[ranks], used[ranks] = self.sections.up(last[ranks], busy)
        # if a late rank's message is missing, the ranks below it are missing, too
        for layer in self.layout.layers[2:]:
            used[layer] &= used[self.layout.parents[layer]]
        return WayUp(first, last, used)

    def down(self, up: WayUp, frozen: np.ndarray, patience: float) -> np.ndarray:
        """Return when each rank has the result. ``frozen`` is the time until which each rank relays nothing. After
        ``patience`` seconds the ranks below a frozen rank ask further up, until it relays results again."""
        first, last = up.first.copy(), up.last.copy()
        if self.sections:
            ranks = slice(1, self.family.stop)
            done = self.sections.down(up.last[self.family])[1:]
            first[ranks], last[ranks] = self._passed_on(
                ranks, done, done, frozen, patience
            )
        for below in self.below:
            ranks, above = below.ranks, below.above
            begun = first[above] + below.period
            done = np.maximum(begun + below.rest, last[above] + below.period)
            if self.pieces > 1 and not self.sections:
                busy = np.where(
                    up.used[above],
                    up.first[above] + below.sending_both,
                    first[above] + below.sending,
                )
                done = np.maximum(done, busy)
            first[ranks], last[ranks] = self._passed_on(
                ranks, begun, done, frozen, patience
            )
        return np.where(np.isposinf(frozen), np.inf, np.maximum(last, frozen))

    def _passed_on(
        self,
        ranks: slice,
        begun: np.ndarray,
        done: np.ndarray,
        frozen: np.ndarray,
        patience: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when the ranks below these ranks can have the first and the last
        piece."""
        asked, still = self.asked[ranks], frozen[ranks]
        late = still > begun
        if not late.any():
            asked[:] = -np.inf
            return begun, done
        new = late & np.isinf(asked)
        asked[new] = begun[new] + patience
        asked[~late] = -np.inf
        # Ranks above the frozen ranks relay results once the ranks below ask them.
        until = np.minimum(still, asked)
        return np.maximum(begun, until), np.maximum(done, until)
