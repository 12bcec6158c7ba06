"""The trees and codes that the planner compares, and shared work."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxcoded import _format, _require
from jaxcoded.plan import Coded, Plan, Shared, Strategy, Uncoded, make_plan
from jaxcoded.plan.tree import regular_size
from jaxcoded.tools.simulator import Layout, Ring
from jaxcoded.transport.options import PIECE

_PIECES = (64 << 10, PIECE, 1 << 20)
_FANOUTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_STRAGGLERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SLICES = (1, 2, 4)
_REPLICAS = (1, 2, 3)  # and all others
_MOST_SHARING = 64  # ranks in jobs whose work may be shared
_BLOCK = 5e-3  # seconds that a block takes at least
_MOST_BLOCKS = 12  # of a rank
_MOST_CHILDREN = 1024  # codes are matrices with a row for each child
# children of codes that are drawn at random, which costs time and digits
MOST_DRAWN = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to sum over the ranks of a job."""

    strategy: Strategy | None  # None: a ring all-reduce, of which there is no group
    piece: int = PIECE  # bytes in which messages move
    # Whether the load of each rank is in proportion to the speed that it had in the step before. To compare with: a
    # group comes to that with `CodedGroup.replan` after each step.
    balanced: bool = False

    @property
    def tree(self) -> bool:
        """Whether a group can be made of it."""
        return self.strategy is not None

    @property
    def shared(self) -> bool:
        """Whether ranks compute blocks of others."""
        return isinstance(self.strategy, Shared)

    @property
    def coded(self) -> bool:
        """Whether ranks compute or send more than their own part of the batch."""
        return isinstance(self.strategy, Coded)

    @property
    def plain(self) -> bool:
        """Whether all ranks are waited for, and the batch is divided once."""
        return not (self.coded or self.shared or self.balanced)

    @property
    def fanout(self) -> int:
        """Most children of a parent; 0 if there are none."""
        return getattr(self.strategy, "fanout", None) or 0

    @property
    def stragglers(self) -> int:
        """Children of a parent that its code may miss."""
        return getattr(self.strategy, "stragglers", 0)

    @property
    def slices(self) -> int:
        """How many times shorter the messages of its code are."""
        return getattr(self.strategy, "slices", 1)

    @property
    def replicas(self) -> int:
        """Other ranks that hold each block of the batch."""
        return getattr(self.strategy, "replicas", 0)

    @property
    def name(self) -> str:
        """In words."""
        name = repr(self.strategy) if self.tree else "ring all-reduce"
        return name + ", speeds of the step before" * self.balanced

    def held(self, layout: Layout | Ring) -> float:
        """The largest part of the batch whose data a rank holds; in its `layout`."""
        return float(layout.loads.max()) * (1 + self.replicas)

    def layout(self, ranks: int) -> Layout | Ring:
        """What the simulator takes."""
        it = self.strategy
        if not isinstance(it, Coded | Uncoded):
            return Layout.of(self.plan(ranks)) if self.shared else Ring(ranks)
        layout = Layout.balanced(ranks, self.fanout, it.stragglers, it.slices)
        if not it.root_computes:
            return layout
        # the root takes as much as the busiest of the others
        loads = layout.loads / (1 + layout.loads.max())
        loads[0] = loads.max()
        return dataclasses.replace(layout, loads=loads)

    def plan(self, ranks: int) -> Plan:
        """Return the plan of a group; a ValueError if there is none."""
        return make_plan(ranks, self.strategy)

    @property
    def base(self) -> "Candidate":
        """The one that this is a variant of."""
        strategy: Any = self.strategy
        return Candidate(
            strategy and dataclasses.replace(strategy, root_computes=False)
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
            strategy: Any = self.strategy
            yield Candidate(
                dataclasses.replace(strategy, root_computes=root_computes), piece
            )


RING = Candidate(None)


def code_tree(
    fanout: int, stragglers: int = 0, slices: int = 1, seed: int = 0
) -> Candidate:
    """A tree whose root has no data; with a code if it has any use for one."""
    if stragglers == 0 and slices == 1:
        return Candidate(Uncoded(fanout=fanout, root_computes=False))
    return Candidate(
        Coded(fanout=fanout, stragglers=stragglers, slices=slices, seed=seed)
    )


def candidates(ranks: int, seed: int = 0) -> list[Candidate]:
    """Trees and codes for so many ranks, and the ring, without their `variants`: see ``docs/planning.md``."""
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
    out = [RING]
    for fanout, s, m in itertools.product(
        sorted(fanout for fanout in trees.values() if fanout <= _MOST_CHILDREN),
        _STRAGGLERS,
        _SLICES,
    ):
        if s + m <= fanout and s <= fanout // 2:
            out.append(code_tree(fanout, s, m, seed))
    return out


def checked_replicas(replicas: int, ranks: int) -> int:
    """Return replicas that so many ranks can have; a ValueError if there are not so
    many others."""
    replicas = _require.integer("replicas", replicas, 0)
    if replicas >= ranks:
        raise ValueError(
            f"replicas={replicas}: of {ranks} ranks only {ranks - 1} others can hold a "
            f"rank's part of the batch: give replicas={ranks - 1} or less"
        )
    return replicas


def why_not_shared(ranks: int, work: float, most: int | None = None) -> str:
    """Why there are no ways to share the work, in words that follow "shared work"; empty if
    there are some. The arguments are those of `sharing`."""
    if most == 0:
        return "is left out by replicas=0"
    if not 3 <= ranks <= _MOST_SHARING:
        return f"is looked at for 3 to {_MOST_SHARING} ranks"
    if (part := work / ranks) < 2 * _BLOCK:
        return (
            f"needs two blocks of {_format.seconds(_BLOCK)} or more for each rank, whose "
            f"part of the batch takes {_format.seconds(part)}"
        )
    return ""


def sharing(ranks: int, work: float, most: int | None = None) -> list[Candidate]:
    """Return ways to share the work of so many ranks, which one usual rank would do in ``work`` seconds, without
    their `variants`. ``most``: other ranks that may hold each block; default all."""
    if why_not_shared(ranks, work, most):
        return []
    blocks = min(int(work / ranks / _BLOCK), _MOST_BLOCKS)
    all_others = ranks - 2  # as the root may have no data
    most = all_others if most is None else min(most, all_others)
    return [
        Candidate(Shared(replicas=each, blocks=blocks, root_computes=False))
        for each in sorted({*_REPLICAS, most})
        if each <= most
    ]


def _smallest_fanout(ranks: int, depth: int) -> int:
    fanout = max(1, round((ranks - 1) ** (1 / depth)) - 1)
    while regular_size(fanout, depth) < ranks:
        fanout += 1
    return fanout


def may_be_drawn(layout: Layout, candidate: Candidate, amplification: float) -> bool:
    """Whether its code may be looked for, as far as that is known without drawing any."""
    return not (
        too_many_to_draw(layout, candidate) or exceeds(layout, candidate, amplification)
    )


def too_many_to_draw(layout: Layout, candidate: Candidate) -> bool:
    """Whether a parent of more than 64 children has a code that is no repetition, which takes long to find."""
    return candidate.coded and max(_most_drawn(layout)) > MOST_DRAWN


def exceeds(layout: Layout, candidate: Candidate, amplification: float) -> bool:
    """Whether κ is above a bound, as far as that is known without drawing codes.

    Codes that are no repetition were drawn for up to 128 children: with one straggler κ
    is above ``n / 2``, with more of them far above its square. With slices that holds where ``s + m``
    does not divide ``n``, as the code falls into small blocks otherwise.
    """
    it = candidate.strategy
    if not isinstance(it, Coded):
        return False
    product = 1.0
    lost = it.stragglers + it.slices
    for most in _most_drawn(layout):
        if it.slices == 1 or most % lost:
            product *= max(1.0, most / 2) ** min(max(min(lost, most) - 1, 0), 2)
    return product > amplification


def _most_drawn(layout: Layout) -> list[int]:
    """Return, for each layer, the most children of a parent whose code is not a repetition."""
    return [
        int(layout.counts[layer][layout.copies[layer] == 1].max(initial=0))
        for layer in layout.layers
    ]
