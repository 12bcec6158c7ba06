import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.bursts import Bursts
from jaxcoded.tools.simulator.sequential import Play, Scheme


@dataclasses.dataclass(frozen=True)
class SelectiveRepeat(Scheme):
    """Selective repeat (SR-SGC, Krishnan et al. 2023).

    Each job has a gradient code that tolerates ``s = ⌈B λ / (W − 1 + B)⌉`` late workers. If more workers are late for
    job ``t``, some of them compute their part of job ``t`` in round ``t + B``, instead of their part of job ``t + B``.
    The scheme tolerates the bursty model (`Bursts`), and any ``s`` late workers in each round.

    Attributes:
        stragglers: ``λ``, the largest number of workers that are late in a window.
        burst: ``B``, the largest number of rounds in a row in which a worker is late.
        window: ``W``, the number of rounds in a window; ``W − 1`` is a multiple of
            ``B``.

    Example:
        >>> from jaxcoded.tools.simulator import SelectiveRepeat
        >>> scheme = SelectiveRepeat(256, stragglers=23, burst=2, window=3)
        >>> scheme.tolerance, round(scheme.load, 4), scheme.delay  # the authors' choice
        (12, 0.0508, 2)
    """

    burst: int
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require.integer("workers", self.workers, 2)
        burst = _require.integer("burst", self.burst, 1)
        window = _require.integer("window", self.window, 2)
        if (window - 1) % burst:
            above = (window - 1) // burst * burst + burst + 1
            raise ValueError(
                f"window - 1 must be a multiple of burst={burst}, got window={window}; "
                f"give window={above}"
            )

    @property
    def tolerance(self) -> int:
        """Return ``s`` of each job's code."""
        rounds = self.window - 1 + self.burst
        return math.ceil(self.burst * self.stragglers / rounds)

    @property
    def load(self) -> float:
        return (self.tolerance + 1) / self.workers

    @property
    def delay(self) -> int:
        return self.burst

    def play(self, jobs: int) -> Play:
        return _Repeating(self, jobs)


class _Repeating(Play):
    def __init__(self, scheme: SelectiveRepeat, jobs: int) -> None:
        self.scheme, self.jobs = scheme, jobs
        self.round = -1
        self.returned = np.zeros((jobs, scheme.workers), bool)
        self.bursts = Bursts(
            scheme.workers, scheme.burst, scheme.window, scheme.stragglers
        )

    def loads(self) -> np.ndarray:
        self.round += 1
        self.repeat = np.zeros(self.scheme.workers, bool)
        before = self.round - self.scheme.burst
        if before >= 0:
            missing = np.flatnonzero(~self.returned[before])
            self.repeat[missing[: max(0, len(missing) - self.scheme.tolerance)]] = True
        works = self.repeat | (self.round < self.jobs)
        return np.where(works, self.scheme.load, 0.0)

    def harmless(self, late: np.ndarray) -> bool:
        """Return whether no job needs these workers in this round, neither the round's own job nor an older job. Then
        their work is not repeated."""
        return bool(not self.repeat.any() and late.sum() <= self.scheme.tolerance)

    def tolerates(self, late: np.ndarray) -> bool:
        return self.harmless(late) or self.bursts.allow(late)

    def end(self, late: np.ndarray) -> Iterable[int]:
        self.bursts.record(late & (not self.harmless(late)))
        before = self.round - self.scheme.burst
        if before >= 0:
            self.returned[before] |= self.repeat & ~late
        if self.round < self.jobs:
            self.returned[self.round] = ~self.repeat & ~late
        enough = self.scheme.workers - self.scheme.tolerance
        return [
            job
            for job in (before, self.round)
            if 0 <= job < self.jobs and self.returned[job].sum() >= enough
        ]
