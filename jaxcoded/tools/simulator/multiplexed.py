import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.bursts import Bursts
from jaxcoded.tools.simulator.sequential import Scheme, Turn


@dataclasses.dataclass(frozen=True)
class Multiplexed(Scheme):
    """Multiplexed (M-SGC, Krishnan et al. 2023).

    Each job lasts ``W − 1 + B`` rounds, and each worker has one task of the job in each of these rounds. A worker's
    first ``W − 1`` tasks are chunks that no other worker has. In each of its last ``B`` tasks it computes a chunk that
    it missed, if any, or otherwise its part of a gradient code that tolerates ``λ`` late workers. The scheme tolerates
    the bursty model (`Bursts`). It also tolerates ``λ`` late workers in ``W − 1 + B`` consecutive rounds if each
    worker is late in at most ``B`` of these rounds. A dead worker stops the scheme, since no other worker has its
    chunks. Each worker sends ``W − 1 + B`` vectors in a round.

    Attributes:
        stragglers: ``λ``, the largest number of workers that are late in a window.
        burst: ``B``, the largest number of rounds in a row in which a worker is late.
        window: ``W``, the number of rounds in a window, larger than ``B``.

    Example:
        >>> from jaxcoded.tools.simulator import Multiplexed
        >>> scheme = Multiplexed(4, stragglers=2, burst=2, window=3)
        >>> scheme.load, scheme.delay  # 4 tasks, each 3/32 of a batch
        (0.375, 3)
    """

    burst: int
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        burst = _require.integer("burst", self.burst, 1)
        _require.integer("window", self.window, burst + 1)

    @property
    def task(self) -> float:
        """Return the fraction of a batch in one task: a chunk, or ``λ + 1`` smaller chunks of the
        code."""
        own = self.window - 1
        # There is no code: all workers may be late, and they repeat chunks.
        if self.stragglers == self.workers:
            return 1 / (self.workers * own)
        copies = self.stragglers + 1
        return copies / (self.workers * (self.burst + own * copies))

    @property
    def load(self) -> float:
        return (self.delay + 1) * self.task

    @property
    def delay(self) -> int:
        return self.window - 2 + self.burst

    def play(self, jobs: int) -> Iterator[Turn]:
        own, enough = self.window - 1, self.workers - self.stragglers
        # how many of its own chunks each worker has returned
        chunks = np.zeros((jobs, self.workers), np.int64)
        # how many workers have returned each coded task
        coded = np.zeros((jobs, self.burst), np.int64)
        bursts = Bursts(self.workers, self.burst, self.window, self.stragglers)

        def turn(number: int) -> Turn:
            active = range(max(0, number - self.delay), min(number + 1, jobs))
            tasks = chunks[active.start : active.stop] < own
            if enough:  # a worker that has missed no chunk has a task of the code
                tasks[:] = True

            def end(late: np.ndarray) -> list[int]:
                bursts.record(late)
                decoded = []
                for job in active:
                    missed = chunks[job] < own
                    if number >= job + own:
                        coded[job, number - job - own] = (~missed & ~late).sum()
                    chunks[job] += missed & ~late
                    if (chunks[job] == own).all() and coded[job].min() >= enough:
                        decoded.append(job)
                return decoded

            return Turn(self.task * tasks.sum(axis=0), bursts.allow, end)

        return map(turn, range(jobs + self.delay))
