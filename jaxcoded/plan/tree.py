import dataclasses
import functools
from collections.abc import Sequence

from jaxcoded import _require

NO_PARENT = -1


@dataclasses.dataclass(frozen=True)
class Tree:
    """A rooted tree over ranks ``0 … N−1``.

    Args:
        parents: the parent of each rank; the root has ``-1`` or its own number.

    Raises:
        ValueError: there is not exactly one root, a parent is out of range, or the tree
            has a cycle. The message names the rank.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        last = len(self.parents) - 1
        parents = tuple(
            NO_PARENT
            if parent == rank
            else _require.integer(f"the parent of rank {rank}", parent, -1, last)
            for rank, parent in enumerate(self.parents)
        )
        object.__setattr__(self, "parents", parents)
        roots = [rank for rank, parent in enumerate(parents) if parent == NO_PARENT]
        if len(roots) != 1:
            raise ValueError(
                "parents must name exactly one root (parent -1), got roots "
                f"{_require.shown(roots)}"
            )
        unreached = set(range(len(parents))) - set(self.order)
        if unreached:
            raise ValueError(f"parents contain a cycle through rank {min(unreached)}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parents)

    @functools.cached_property
    def root(self) -> int:
        """The rank without a parent."""
        return self.parents.index(NO_PARENT)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each rank, in rank order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent != NO_PARENT:
                children[parent].append(rank)
        return tuple(map(tuple, children))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks in breadth-first order, beginning with the root."""
        order = [self.root]
        for rank in order:  # the list grows during the loop
            order.extend(self.children[rank])
        return tuple(order)

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """Distance of each rank from the root."""
        layers = [0] * self.size
        for rank in self.order[1:]:
            layers[rank] = layers[self.parents[rank]] + 1
        return tuple(layers)

    @functools.cached_property
    def depth(self) -> int:
        """Number of layers below the root: ``L`` of an (n, L)-regular tree."""
        return max(self.layers)


def regular_size(fanout: int, depth: int) -> int:
    """Return the number of ranks of an (n, L)-regular tree: ``1 + n + … + n^L``."""
    return sum(fanout**layer for layer in range(depth + 1))


def default_fanout(size: int, needed: int) -> int:
    """Return the default fan-out. It is the smallest fan-out that reaches ``size`` at
    the smallest depth, and gives every parent the ``s + m`` children that it needs.

    A parent gets at most ``max(8, 2 · needed)`` children, so that no parent receives
    messages from too many children.
    """
    largest = max(8, 2 * needed)
    depth = 1
    while regular_size(largest, depth) < size:
        depth += 1
    fitting = [n for n in range(needed, largest + 1) if regular_size(n, depth) >= size]
    below = size - 1
    return next((n for n in fitting if -(-below // n) * needed <= below), fitting[0])


def balanced_parents(size: int, fanout: int, needed: int) -> tuple[int, ...]:
    """Return the parent of each rank of a tree of any size, whose ranks are numbered
    breadth first. Its parents have numbers of children that are as equal as possible,
    and at most ``fanout``.

    With ``size = 1 + n + … + n^L`` this is the (n, L)-regular tree, ``parent(r) =
    (r−1)//n``.

    A parent with fewer than ``needed`` children (``s + m``) cannot tolerate ``s``
    stragglers. If ``size`` allows no tree in which every parent has ``needed … fanout``
    children, only the last parent gets fewer than ``needed``.
    """
    below = size - 1
    # the smallest number of parents that can have all ranks except the root as children
    inner = -(-below // fanout)
    if below >= inner * needed:
        counts = _even(below, inner)
    else:  # only the last parent gets fewer than `needed`
        last = below - (inner - 1) * needed
        counts = [*_even(below - last, inner - 1), last]
    return (
        NO_PARENT,
        *(parent for parent, count in enumerate(counts) for _ in range(count)),
    )


def parents_by_host(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the parent of each rank of a tree of two layers that follows hosts. The
    first rank of each host, except the root, is the root's child. The host's other
    ranks are the children of this first rank. So a host's traffic does not grow with
    the number of its ranks. With one rank on each host the tree is a star.
    """
    first: dict[str, int] = {}
    below = [
        (rank, first.setdefault(host, rank)) for rank, host in enumerate(hosts) if rank
    ]
    return (NO_PARENT, *(0 if rank == leader else leader for rank, leader in below))


def _even(total: int, parts: int) -> list[int]:
    small, more = divmod(total, parts) if parts else (0, 0)
    return [small + 1] * more + [small] * (parts - more)
