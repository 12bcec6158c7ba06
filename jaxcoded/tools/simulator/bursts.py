"""The (B, W, λ)-bursty model of Krishnan et al. 2023: which workers may be late next."""

import numpy as np


class Bursts:
    """Record the late workers of the last rounds, and tell which may be late in the next round.

    In any ``window`` rounds in a row at most ``stragglers`` different workers are late, each of them
    within ``burst`` rounds in a row.
    """

    def __init__(self, workers: int, burst: int, window: int, stragglers: int) -> None:
        self.stragglers = stragglers
        self.late = np.zeros((window - 1, workers), bool)  # by round, the oldest first
        # rounds so long ago that their bursts have ended
        self.over = self.late[: window - burst]

    def allow(self, late: np.ndarray) -> bool:
        """Return whether these workers may be late in the next round."""
        few = (self.late.any(axis=0) | late).sum() <= self.stragglers
        return bool(few and not (self.over.any(axis=0) & late).any())

    def record(self, late: np.ndarray) -> None:
        """Enter the late workers of a round."""
        self.late[:-1] = self.late[1:].copy()
        self.late[-1] = late
