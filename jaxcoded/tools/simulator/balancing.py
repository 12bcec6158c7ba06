"""Static balancing: the load of each rank in proportion to the speed that it had in the round before.

What a job without codes comes to that divides its batch again after each step, by the seconds that all ranks
have measured, as with ``group.replan(group.telemetry().speeds)``. Nobody helps others during a step.
"""

import numpy as np

from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.ring import Ring

_SLOWEST = 1e-3  # of the fastest, as in `jaxcoded.Uncoded`


class Fixed:
    """The loads of a layout, the same in each round.

    Attributes:
        loads: float64 ``(N,)``, the part of the batch that each rank computes in the next round.
    """

    def __init__(self, layout: Layout | Ring) -> None:
        self.loads = layout.loads

    def took(self, seconds: np.ndarray) -> None:
        """Ranks took so long in a round; infinite: they did not end."""


class Balancing(Fixed):
    """See above. All begin with the loads of the layout."""

    def __init__(self, layout: Layout | Ring) -> None:
        super().__init__(layout)
        if not isinstance(layout, Layout):
            return
        if layout.placement.blocks or (layout.needs < layout.counts).any():
            raise ValueError(
                "balanced=True needs a layout that waits for all ranks, such as Layout.of(make_plan(size, Uncoded()))"
            )

    def took(self, seconds: np.ndarray) -> None:
        known = (self.loads > 0) & (seconds > 0)
        speeds = np.divide(self.loads, seconds, out=np.zeros(len(seconds)), where=known)
        if not known.any() or not speeds.max() > 0:
            return
        speeds[known] = np.maximum(speeds[known], _SLOWEST * speeds.max())
        self.loads = speeds * (self.loads[known].sum() / speeds.sum())
