"""The (B, W, λ)-bursty model of Krishnan et al. 2023: which workers may be late next."""

import numpy as np


class Bursts:
    """Record the late workers of the latest rounds, and tell which workers may be late in the
    next round.

    In any ``window`` consecutive rounds at most ``stragglers`` different workers are late. All late
    rounds of one worker lie within ``burst`` consecutive rounds.
    """

    def __init__(self, workers: int, burst: int, window: int, stragglers: int) -> None:
        self.stragglers = stragglers
        # one row for each round, the oldest first
        self.late = np.zeros((window - 1, workers), bool)
        # the rounds that are so long ago that their bursts have ended
        self.over = self.late[: window - burst]

    def allow(self, late: np.ndarray) -> bool:
        """Return whether these workers may be late in the next round."""
        few = (self.late.any(axis=0) | late).sum() <= self.stragglers
        return bool(few and not (self.over.any(axis=0) & late).any())

    def record(self, late: np.ndarray) -> None:
        """Record the late workers of a round."""
        self.late[:-1] = self.late[1:].copy()
        self.late[-1] = late
