import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.bursts import Bursts
from jaxcoded.tools.simulator.sequential import Play, Scheme


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

    def play(self, jobs: int) -> Play:
        return _Multiplexing(self, jobs)


class _Multiplexing(Play):
    def __init__(self, scheme: Multiplexed, jobs: int) -> None:
        self.scheme, self.jobs = scheme, jobs
        self.round = -1
        self.own = scheme.window - 1
        # how many of its own chunks each worker has returned
        self.chunks = np.zeros((jobs, scheme.workers), np.int64)
        # how many workers have returned each coded task
        self.coded = np.zeros((jobs, scheme.burst), np.int64)
        self.bursts = Bursts(
            scheme.workers, scheme.burst, scheme.window, scheme.stragglers
        )

    def loads(self) -> np.ndarray:
        self.round += 1
        first = max(0, self.round - self.scheme.delay)
        self.active = range(first, min(self.round + 1, self.jobs))
        missed = self.chunks[first : self.active.stop] < self.own
        if self.scheme.stragglers < self.scheme.workers:
            missed[:] = True  # a worker that has missed no chunk has a task of the code
        return self.scheme.task * missed.sum(axis=0)

    def tolerates(self, late: np.ndarray) -> bool:
        return self.bursts.allow(late)

    def end(self, late: np.ndarray) -> Iterable[int]:
        self.bursts.record(late)
        decoded = []
        enough = self.scheme.workers - self.scheme.stragglers
        for job in self.active:
            missed = self.chunks[job] < self.own
            code = self.round - job - self.own
            if code >= 0:
                self.coded[job, code] = (~missed & ~late).sum()
            self.chunks[job] += missed & ~late
            if (self.chunks[job] == self.own).all() and self.coded[job].min() >= enough:
                decoded.append(job)
        return decoded
