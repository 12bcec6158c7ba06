"""Compute what each rank's part of a batch costs if examples have unequal costs."""

import dataclasses
from typing import Any

import numpy as np

from jaxcoded import _require
from jaxcoded.plan.costs import checked, divided
from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.ring import Ring

_MOST = 1 << 17  # the most examples in all batches together; there are 8 to 64 batches


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Examples of unequal cost, in batches like those of `CodedGroup.epoch`.

    Attributes:
        each: float64 ``(examples,)``, the cost of each example of a data set, as a multiple
            of the mean cost.
        batch_size: the number of examples in a batch.
        known: whether each batch is divided by cost, as with ``group.epoch(..., costs=...)``.

    Example:
        >>> from jaxcoded.tools.simulator import Costs
        >>> Costs.of([1, 1, 4, 2], batch_size=2).each.tolist()
        [0.5, 0.5, 2.0, 1.0]
    """

    each: np.ndarray
    batch_size: int
    known: bool = True

    @classmethod
    def of(cls, costs: Any, batch_size: int) -> "Costs":
        """Return the known costs of a data set.

        Args:
            costs: finite numbers ≥ 0 in any unit, with shape ``(examples,)``.
            batch_size: from 1 to ``examples``.

        Raises:
            TypeError: ``costs`` are not numbers.
            ValueError: there are no costs; a cost is negative or not finite; all costs are 0; or ``batch_size`` is
                larger than the number of costs.
        """
        if not np.size(costs):
            raise ValueError("costs must have one number for each example, got none")
        each = checked(costs, np.size(costs))
        if not each.any():
            raise ValueError("costs must not all be 0: leave them out")
        batch_size = _require.integer("batch_size", batch_size, 1, len(each))
        return cls(each / each.mean(), batch_size)

    @property
    def unknown(self) -> "Costs":
        """Return the same costs for batches that are divided by the number of examples."""
        return dataclasses.replace(self, known=False)

    def batches(self, seed: int) -> np.ndarray:
        """Return batches of shuffled epochs, float64 ``(batches, batch_size)``, which a simulation uses in turn."""
        random = np.random.default_rng([seed, len(self.each)])
        count = min(max(_MOST // self.batch_size, 8), 64)
        used = len(self.each) // self.batch_size * self.batch_size
        epochs = -(-count * self.batch_size // used)
        drawn = [random.permutation(self.each)[:used] for _ in range(epochs)]
        return np.concatenate(drawn).reshape(-1, self.batch_size)[:count]


class Parts:
    """The cost of each rank's examples in each batch, as a fraction of a usual batch's cost. With ``balanced``,
    each rank's number of examples changes from round to round, and does not depend on costs."""

    def __init__(
        self, costs: Costs, layout: Layout | Ring, seed: int, balanced: bool = False
    ) -> None:
        size = costs.batch_size
        self.batches = costs.batches(seed)
        # each rank's examples, if they are not consecutive
        self._shares: list[np.ndarray] | None = None
        self._starts = np.zeros(1, np.int64)  # the first example of each block
        if isinstance(layout, Layout) and layout.plan and not balanced:
            plan = layout.plan
            self._shares = [
                plan.strategy.shares(plan, rank, size)[0]
                for rank in layout.ranks.tolist()
            ]
            cuts = plan.strategy.cuts(plan, size)
            if plan.placement.blocks:
                self._starts = plan.placement.examples(size)
        else:
            if isinstance(layout, Layout) and (layout.needs < layout.counts).any():
                raise ValueError(
                    "costs need the plan of a code: take Layout.of(plan), not Layout.balanced"
                )
            cuts = [np.array(pair) for pair in zip(*_bounds(layout.loads, size))]
        if costs.known and not balanced:
            rooms = [np.diff(cut).tolist() for cut in cuts]
            for batch in self.batches:
                batch[:] = batch[np.concatenate(divided(batch, rooms))]
        elif len(self._starts) > 1:
            raise ValueError("shared work is simulated only with known costs")
        self._known: dict[int, np.ndarray] = {}

    def loads(self, number: int, loads: np.ndarray) -> np.ndarray:
        """Return what each rank's part of a round's batch costs, float64 ``(N,)``, in the order of the layout.
        ``loads`` has each rank's number of examples, as a fraction of the batch."""
        at = number % len(self.batches)
        batch = self.batches[at]
        if self._shares is None:
            before = np.concatenate([[0.0], np.cumsum(batch)])
            first, end = _bounds(loads, len(batch))
            return (before[end] - before[first]) / len(batch)
        if at not in self._known:
            costs = [batch[share].sum() for share in self._shares]
            self._known[at] = np.array(costs) / len(batch)
        return self._known[at]

    def blocks(self, number: int) -> np.ndarray:
        """Return what each block of shared work costs, float64 ``(blocks,)``."""
        batch = self.batches[number % len(self.batches)]
        before = np.concatenate([[0.0], np.cumsum(batch)])
        return np.diff(before[self._starts]) / len(batch)


def _bounds(loads: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each rank's first example, and the example after its last example, for ranks that have consecutive parts
    of the batch."""
    ends = np.floor(np.cumsum(loads) / loads.sum() * size + 1e-9).astype(np.int64)
    return np.concatenate([[0], ends[:-1]]), ends
