import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.sequential import Play, Scheme


@dataclasses.dataclass(frozen=True)
class GradientCoding(Scheme):
    """Gradient coding (Tandon et al. 2017) whose master waits as in the other schemes.

    To let the master wait for any ``n − s`` workers instead, simulate `Layout.balanced` with
    ``fresh=True``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _require.integer("stragglers", self.stragglers, 0, self.workers - 1)

    @property
    def load(self) -> float:
        return (self.stragglers + 1) / self.workers

    @property
    def delay(self) -> int:
        return 0

    def play(self, jobs: int) -> Play:
        return _OneRound(self)


class _OneRound(Play):
    def __init__(self, scheme: GradientCoding) -> None:
        self.scheme = scheme
        self.job = -1

    def loads(self) -> np.ndarray:
        self.job += 1
        return np.full(self.scheme.workers, self.scheme.load)

    def tolerates(self, late: np.ndarray) -> bool:
        return bool(late.sum() <= self.scheme.stragglers)

    def end(self, late: np.ndarray) -> Iterable[int]:
        return [self.job]
