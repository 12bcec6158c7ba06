"""Static balancing: loads in proportion to the speeds in the previous round.

This simulates a job without codes that calls ``group.replan(group.telemetry().speeds)`` after each
step.
"""

import numpy as np

from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.ring import Ring

# the lowest speed, as a fraction of the fastest rank's, as in `jaxcoded.Uncoded`
_SLOWEST = 1e-3


def check_waits(layout: Layout | Ring) -> None:
    """Raise a ValueError unless the root waits for all ranks."""
    if isinstance(layout, Layout) and (
        layout.placement.blocks or (layout.needs < layout.counts).any()
    ):
        raise ValueError(
            "balanced=True needs a layout that waits for all ranks, such as Layout.of(make_plan(size, Uncoded()))"
        )


def rebalanced(loads: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the loads of the next round, given the ``seconds`` that each rank took in this round: infinite for a rank
    that did not finish."""
    known = (loads > 0) & (seconds > 0)
    speeds = np.divide(loads, seconds, out=np.zeros(len(seconds)), where=known)
    if not known.any() or not speeds.max() > 0:
        return loads
    speeds[known] = np.maximum(speeds[known], _SLOWEST * speeds.max())
    return speeds * (loads[known].sum() / speeds.sum())
