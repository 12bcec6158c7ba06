"""Which ranks hold the data of which blocks of the batch."""

import dataclasses
import functools

import numpy as np

from jaxcoded.plan.costs import divided

MOST_BLOCKS = 1 << 20  # of all ranks


@dataclasses.dataclass(frozen=True)
class Placement:
    """The blocks of a batch, and who holds them.

    Every rank that computes owns as many blocks, which it computes itself where nobody is
    late. Their data lie on ``replicas`` other ranks too, in turn, so that the blocks of one
    rank lie on as many others as possible.

    Attributes:
        ranks: those that compute, in order.
        replicas: other ranks that hold each block.
        blocks: of each rank.

    Example:
        >>> from jaxcoded.plan.placement import Placement
        >>> placement = Placement((0, 1, 2), replicas=1, blocks=2)
        >>> placement.holders
        ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1))
        >>> placement.held(1), placement.examples(10).tolist()
        ((2, 3, 0, 5), [0, 1, 3, 5, 6, 8, 10])
    """

    ranks: tuple[int, ...]
    replicas: int
    blocks: int

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each block, its owner first."""
        n = len(self.ranks)
        return tuple(
            tuple(
                self.ranks[each]
                for each in (
                    owner,
                    *(
                        (owner + 1 + (block * self.replicas + i) % (n - 1)) % n
                        for i in range(self.replicas)
                    ),
                )
            )
            for owner in range(n)
            for block in range(self.blocks)
        )

    def owned(self, rank: int) -> tuple[int, ...]:
        """The blocks that a rank computes where nobody is late."""
        return tuple(b for b, ranks in enumerate(self.holders) if ranks[0] == rank)

    def held(self, rank: int) -> tuple[int, ...]:
        """The blocks whose data a rank holds, its own first."""
        own = self.owned(rank)
        others = (b for b, ranks in enumerate(self.holders) if rank in ranks[1:])
        return (*own, *others)

    def examples(self, batch_size: int) -> np.ndarray:
        """Where each block begins in a batch, and the end: int64 ``(blocks + 1,)``. Sizes
        differ by 1 at most."""
        number = len(self.holders)
        starts = [block * batch_size // number for block in range(number + 1)]
        return np.array(starts, np.int64)  # the products may not fit into an int64

    def divided(self, costs: np.ndarray) -> list[np.ndarray]:
        """The examples of each block, int64, whose costs are known; see `jaxcoded.plan.costs.divided`."""
        return divided(costs, [[len(costs)] * self.blocks] * len(self.ranks))


NOTHING = Placement((), 0, 0)  # where there are no blocks
