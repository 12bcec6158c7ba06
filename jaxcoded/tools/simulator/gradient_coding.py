import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.sequential import Scheme, Turn


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

    def play(self, jobs: int) -> Iterator[Turn]:
        loads = np.full(self.workers, self.load)

        def turn(job: int) -> Turn:
            return Turn(
                loads,
                tolerates=lambda late: bool(late.sum() <= self.stragglers),
                end=lambda late: [job],
            )

        return map(turn, range(jobs))
