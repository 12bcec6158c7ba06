import dataclasses
import functools
import itertools

import numpy as np

from jaxcoded.plan.costs import divided

MOST_BLOCKS = 1 << 20  # the most blocks of all ranks together


@dataclasses.dataclass(frozen=True)
class Placement:
    """The blocks of a batch, and the ranks that hold them.

    Every computing rank owns the same number of blocks, which it computes itself if no
    rank is late. The data of each block is also on ``replicas`` other ranks. Different
    blocks of an owner are on different other ranks, so that as many ranks as possible
    hold some of its blocks.

    Example:
        >>> from jaxcoded.plan.placement import Placement
        >>> placement = Placement((0, 1, 2), replicas=1, blocks=2)
        >>> placement.holders
        ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1))
        >>> placement.held(1), placement.examples(10).tolist()
        ((2, 3, 0, 5), [0, 1, 3, 5, 6, 8, 10])
    """

    ranks: tuple[int, ...]  # the computing ranks, in order
    replicas: int  # how many ranks hold each block, in addition to its owner
    blocks: int  # number of blocks of each rank

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each block, its owner first."""
        n, replicas = len(self.ranks), self.replicas
        holders = []
        for owner, block in itertools.product(range(n), range(self.blocks)):
            turns = range(block * replicas, (block + 1) * replicas)
            others = [(owner + 1 + turn % (n - 1)) % n for turn in turns]
            holders.append(tuple(self.ranks[each] for each in (owner, *others)))
        return tuple(holders)

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the blocks that a rank computes if no rank is late."""
        return tuple(b for b, ranks in enumerate(self.holders) if ranks[0] == rank)

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the blocks whose data a rank holds, its own first."""
        own = self.owned(rank)
        others = (b for b, ranks in enumerate(self.holders) if rank in ranks[1:])
        return (*own, *others)

    def examples(self, batch_size: int) -> np.ndarray:
        """Return the beginning of each block in a batch, and the end of the batch:
        int64 ``(blocks + 1,)``. The sizes of blocks differ by at most 1."""
        number = len(self.holders)
        starts = [block * batch_size // number for block in range(number + 1)]
        return np.array(starts, np.int64)  # the products may not fit into an int64

    def divided(self, costs: np.ndarray) -> list[np.ndarray]:
        """Return the examples of each block, int64, for known costs."""
        return divided(costs, [[len(costs)] * self.blocks] * len(self.ranks))


NOTHING = Placement((), 0, 0)  # the placement of a plan without blocks
