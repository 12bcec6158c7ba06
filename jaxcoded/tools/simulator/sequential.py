"""Coding schemes whose jobs last several rounds, and the rule by which their master
waits.

In sequential gradient coding (Krishnan, Ebrahimi and Khisti, ICLR 2023) job ``t`` begins in round ``t``. It must be
decoded at most ``delay`` rounds later, so later rounds can make up for late workers. If the scheme tolerates the late
workers, a round ends at ``1 + mu`` times the fastest worker's time. A late worker loses its work of the round, and
begins the next round with the others.
"""

import abc
import bisect
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.protocol import Outcome
from jaxcoded.tools.simulator.stragglers import Stragglers, as_model


class Turn(NamedTuple):
    """A round of a scheme. A set of workers is a bool array ``(workers,)``."""

    loads: np.ndarray  # each worker's fraction of a batch, ``(workers,)``
    # returns whether all jobs are decoded in time if the round ends without these workers, or without only some of them.
    tolerates: Callable[[np.ndarray], bool]
    # ends the round without these workers, and returns the jobs that are now decoded.
    end: Callable[[np.ndarray], list[int]]


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """A scheme determines which worker computes what in which round.

    Attributes:
        workers: the number of workers; the master computes nothing.
        stragglers: how many workers may be late: ``s`` of gradient coding, ``λ`` of the
            other schemes.
    """

    workers: int
    stragglers: int

    def __post_init__(self) -> None:
        _require.integer("workers", self.workers, 1)
        _require.integer("stragglers", self.stragglers, 0, self.workers)

    @property
    @abc.abstractmethod
    def load(self) -> float:
        """Return the fraction of a batch that a worker computes in a round in which it
        has all its work."""

    @property
    @abc.abstractmethod
    def delay(self) -> int:
        """Return the largest number of rounds from the first round of a job to the round in which the
        job is decoded."""

    @abc.abstractmethod
    def play(self, jobs: int) -> Iterator[Turn]:
        """Yield the scheme's rounds for this many jobs. Each round must end before the next one is requested."""


def simulate_sequence(
    scheme: Scheme,
    *,
    work: float,
    stragglers: Stragglers | str | None = None,
    jobs: int = 100,
    mu: float = 1.0,
    one_by_one: bool = False,
    seed: int = 0,
) -> Outcome:
    """Simulate jobs of a scheme. Messages take no time beyond what the model adds.

    Args:
        scheme: `GradientCoding`, `SelectiveRepeat` or `Multiplexed`.
        work: seconds that one usual worker would take for a whole batch. Each worker takes its load times these
            seconds, slowed down by ``stragglers``. Worker 0 is the model's rank 0.
        stragglers: a model, or the text that names a model. Default: no stragglers. For the delays
            that the authors published (the seconds of each worker with load 0), pass ``trace(path=…,
            seconds=True)``.
        jobs: the number of jobs.
        mu: a worker is late if it takes more than ``1 + mu`` times as long as the fastest
            worker.
        one_by_one: if the scheme does not tolerate the late workers, whether the master waits for one
            after the other until the scheme does. Otherwise it waits for all of them, as the authors'
            program does.
        seed: the seed of the model's draws.

    Returns:
        When the master has the results of each job and all previous jobs, or infinity if it waits for a dead worker.
        Also, for each worker, the number of rounds to which it contributed, and the number in which its work was
        lost.

    Raises:
        TypeError: ``scheme`` is not one of these schemes.
        ValueError: a number is out of its range.

    Example:
        >>> from jaxcoded.tools.simulator import GradientCoding, simulate_sequence
        >>> # the load is 2/4; the master waits for 2 × 0.5 s, and never for the slow worker
        >>> simulate_sequence(
        ...     GradientCoding(4, stragglers=1), work=1.0, stragglers="fixed(factor=3)", jobs=2
        ... ).ends.tolist()
        [1.0, 2.0]
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(
            "scheme must be GradientCoding, SelectiveRepeat or Multiplexed, got "
            f"{_require.kind(scheme)}; simulate takes a Layout or a Ring"
        )
    jobs = _require.integer("jobs", jobs, 1)
    work = _require.positive("work", work)
    mu = _require.not_negative("mu", mu)
    _require.boolean("one_by_one", one_by_one)
    model = as_model(stragglers)
    drawn = model.rounds(scheme.workers, _require.integer("seed", seed, 0))
    now, ends = 0.0, np.full(jobs, np.inf)
    used, lost = np.zeros((2, scheme.workers), np.int64)
    for turn, delays in zip(scheme.play(jobs), drawn):
        works = turn.loads > 0
        # The master does not wait for a worker without work, even if the worker's process is
        # stopped.
        times = np.where(works, delays.time(work * turn.loads), 0.0)
        patience = (1 + mu) * times[works].min(initial=np.inf)
        later = np.unique(times[times > patience])
        ends_at = [patience, *later[0 if one_by_one else -1 :]]
        # If a set of late workers is tolerated, so is each of its subsets. The empty set is
        # always tolerated.
        enough = bisect.bisect_left(
            ends_at, True, key=lambda until: turn.tolerates(times > until)
        )
        until = ends_at[enough]
        late = times > until
        now += float(min(until, times.max()))
        if now == np.inf:
            break
        used += works & ~late
        lost += late
        for job in turn.end(late):
            ends[job] = min(ends[job], now)
    return Outcome(np.maximum.accumulate(ends), used, lost)
