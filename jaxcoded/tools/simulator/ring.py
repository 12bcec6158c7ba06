import dataclasses

import numpy as np

from jaxcoded import _require


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of all ranks, each with an equal part of the batch. ``N − 1`` steps sum the ``N`` pieces of the payload,
    and ``N − 1`` more steps pass the sums around the ring.

    Every step of a rank needs the previous step of its neighbour. So with equal links the ring ends ``2 (N − 1)`` steps
    after the last rank has begun.

    Attributes:
        size: number of ranks ``N``.
    """

    size: int

    def __post_init__(self) -> None:
        _require.integer("size", self.size, 2)

    @property
    def loads(self) -> np.ndarray:
        """Return equal parts of the batch, float64 ``(N,)``."""
        return np.full(self.size, 1 / self.size)
