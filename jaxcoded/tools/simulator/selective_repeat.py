import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.bursts import Bursts
from jaxcoded.tools.simulator.sequential import Scheme, Turn


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

    def play(self, jobs: int) -> Iterator[Turn]:
        returned = np.zeros((jobs, self.workers), bool)
        bursts = Bursts(self.workers, self.burst, self.window, self.stragglers)

        def turn(number: int) -> Turn:
            repeat = np.zeros(self.workers, bool)
            before = number - self.burst
            if before >= 0:
                missing = np.flatnonzero(~returned[before])
                repeat[missing[: max(0, len(missing) - self.tolerance)]] = True

            def harmless(late: np.ndarray) -> bool:
                """Return whether no job needs these workers in this round, neither the round's own job nor an older
                job. Then their work is not repeated."""
                return bool(not repeat.any() and late.sum() <= self.tolerance)

            def tolerates(late: np.ndarray) -> bool:
                return harmless(late) or bursts.allow(late)

            def end(late: np.ndarray) -> list[int]:
                bursts.record(late & (not harmless(late)))
                if before >= 0:
                    returned[before] |= repeat & ~late
                if number < jobs:
                    returned[number] = ~repeat & ~late
                enough = self.workers - self.tolerance
                return [
                    job
                    for job in (before, number)
                    if 0 <= job < jobs and returned[job].sum() >= enough
                ]

            works = repeat | (number < jobs)
            return Turn(np.where(works, self.load, 0.0), tolerates, end)

        return map(turn, range(jobs + self.delay))
