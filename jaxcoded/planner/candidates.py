"""The trees and codes that the planner compares."""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxcoded.plan import Plan, make_plan
from jaxcoded.plan.tree import regular_size
from jaxcoded.simulator import Layout, Ring
from jaxcoded.transport.options import PIECE

_PIECES = (64 << 10, PIECE, 1 << 20)
_FANOUTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_STRAGGLERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SLICES = (1, 2, 4)
_MOST_CHILDREN = 1024  # codes are matrices with a row for each child
_MOST_DRAWN = (
    64  # children of codes that are drawn at random, which costs time and digits
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to sum over the ranks of a job.

    Attributes:
        fanout: most children of a parent; 0 for a ring all-reduce instead of a tree.
        stragglers: ``s``.
        slices: ``m``.
        piece: bytes in which messages move.
        root_computes: whether the root holds data.
    """

    fanout: int
    stragglers: int = 0
    slices: int = 1
    piece: int = PIECE
    root_computes: bool = False

    @property
    def coded(self) -> bool:
        """Whether ranks compute or send anything but their own part of the batch."""
        return self.stragglers > 0 or self.slices > 1

    @property
    def tree(self) -> bool:
        """Whether a group can be made of it: not of the ring."""
        return self.fanout > 0

    def layout(self, ranks: int) -> Layout | Ring:
        """What the simulator takes."""
        if not self.tree:
            return Ring(ranks)
        layout = Layout.balanced(ranks, self.fanout, self.stragglers, self.slices)
        if not self.root_computes:
            return layout
        # the root takes as much as the busiest of the others
        loads = layout.loads / (1 + layout.loads.max())
        loads[0] = loads.max()
        return dataclasses.replace(layout, loads=loads)

    def plan(self, ranks: int, seed: int = 0) -> Plan:
        """What a group takes.

        Raises:
            ValueError: there is no such plan.
        """
        return make_plan(
            ranks,
            fanout=self.fanout,
            stragglers=self.stragglers,
            slices=self.slices,
            root_computes=self.root_computes,
            seed=seed,
        )

    def variants(self, payload: float) -> Iterator["Candidate"]:
        """The same tree and code with other pieces, and with and without data at the
        root."""
        if not self.tree:
            yield self
            return
        longer = [piece for piece in _PIECES if piece < payload]
        # beyond the payload all are one
        pieces = dict.fromkeys([*longer, *_PIECES[len(longer) : len(longer) + 1]])
        for piece, root_computes in itertools.product(pieces, (False, True)):
            yield dataclasses.replace(self, piece=piece, root_computes=root_computes)


def candidates(ranks: int) -> list[Candidate]:
    """Trees and codes for so many ranks, and the ring; without their `variants`.

    Fan-outs are small numbers with many divisors, those of the smallest trees of each
    depth, those that give all parents equal numbers of children, and the star. No parent has more than 1,024 children, or a
    tolerance of more than half of them.
    """
    below = ranks - 1
    fitting = {fanout for fanout in _FANOUTS if fanout < below}
    # parents with equal numbers of children more often have repetition, without κ
    fitting |= {n for n in range(2, min(below, _MOST_CHILDREN + 1)) if below % n == 0}
    for depth in range(1, ranks):
        fitting.add(fanout := _smallest_fanout(ranks, depth))
        if fanout <= 2:
            break
    # balanced trees with equal numbers of parents are equal
    trees = {-(-below // fanout): fanout for fanout in sorted(fitting, reverse=True)}
    out = [Candidate(0)]
    for fanout, s, m in itertools.product(
        sorted(fanout for fanout in trees.values() if fanout <= _MOST_CHILDREN),
        _STRAGGLERS,
        _SLICES,
    ):
        if s + m <= fanout and s <= fanout // 2:
            out.append(Candidate(fanout, s, m))
    return out


def _smallest_fanout(ranks: int, depth: int) -> int:
    fanout = max(1, round((ranks - 1) ** (1 / depth)) - 1)
    while regular_size(fanout, depth) < ranks:
        fanout += 1
    return fanout


def exceeds(layout: Layout, candidate: Candidate, amplification: float) -> bool:
    """Whether κ is certainly above a bound: to leave out codes without drawing them.

    Codes that are no repetition were drawn for up to 128 children: with one straggler κ
    is above ``n / 2``, with more of them far above its square.
    """
    if not candidate.coded:
        return False
    product = 1.0
    for layer in layout.layers:
        counts = layout.counts[layer][layout.copies[layer] == 1]
        most = int(counts.max(initial=0))
        if most > _MOST_DRAWN:
            return True
        lost = min(candidate.stragglers + candidate.slices, most) - 1
        product *= max(1.0, most / 2) ** min(max(lost, 0), 2)
    return product > amplification
