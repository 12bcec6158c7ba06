"""List the trees, codes and ways to share work that the planner compares."""

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
# numbers of replicas to compare, in addition to the number of all other ranks
_REPLICAS = (1, 2, 3)
_MOST_SHARING = 64  # the most ranks for which shared work is compared
_BLOCK = 5e-3  # seconds of the shortest block
_MOST_BLOCKS = 12  # the most blocks of a rank
# the most children of a coded parent: a code is a matrix with a row for each child
_MOST_CHILDREN = 1024
# the most children of a parent with a random code: larger codes take long to find, and
# amplify rounding errors more
MOST_DRAWN = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to sum over the ranks of a job."""

    strategy: Strategy | None  # None: a ring all-reduce, which a group cannot use
    piece: int = PIECE  # bytes in each piece of a message
    # Whether loads follow the speeds in the previous step, as if `CodedGroup.replan` were called
    # after each step.
    balanced: bool = False
    # whether batches are divided by the number of examples, and not by their known
    # costs
    blind: bool = False

    @property
    def tree(self) -> bool:
        """Return whether a group can use this candidate."""
        return self.strategy is not None

    @property
    def shared(self) -> bool:
        """Return whether ranks compute blocks of other ranks."""
        return isinstance(self.strategy, Shared)

    @property
    def coded(self) -> bool:
        """Return whether this candidate has a code."""
        return isinstance(self.strategy, Coded)

    @property
    def plain(self) -> bool:
        """Return whether a step waits for all ranks, and the batch is divided once, by the known costs and speeds."""
        return not (self.coded or self.shared or self.balanced or self.blind)

    @property
    def fanout(self) -> int:
        """Return the fan-out of the candidate's tree, or 0 if it has no tree."""
        return getattr(self.strategy, "fanout", None) or 0

    @property
    def stragglers(self) -> int:
        """Return how many children of a parent may be late."""
        return getattr(self.strategy, "stragglers", 0)

    @property
    def slices(self) -> int:
        """Return the factor by which the candidate's code shortens messages."""
        return getattr(self.strategy, "slices", 1)

    @property
    def replicas(self) -> int:
        """Return how many other ranks hold each block."""
        return getattr(self.strategy, "replicas", 0)

    @property
    def name(self) -> str:
        """Return a text that names the candidate."""
        name = repr(self.strategy) if self.tree else "ring all-reduce"
        name += ", speeds of the step before" * self.balanced
        return name + ", costs ignored" * self.blind

    def held(self, layout: Layout | Ring) -> float:
        """Return the largest part of the batch whose data a rank holds."""
        return float(layout.loads.max()) * (1 + self.replicas)

    def layout(self, ranks: int) -> Layout | Ring:
        """Return the layout for the simulator."""
        strategy = self.strategy
        if not isinstance(strategy, Coded | Uncoded):
            return Layout.of(self.plan(ranks)) if self.shared else Ring(ranks)
        layout = Layout.balanced(
            ranks, self.fanout, strategy.stragglers, strategy.slices
        )
        if not strategy.root_computes:
            return layout
        # the root computes as much as the busiest other rank
        loads = layout.loads / (1 + layout.loads.max())
        loads[0] = loads.max()
        return dataclasses.replace(layout, loads=loads)

    def plan(self, ranks: int) -> Plan:
        """Return the plan of a group with this candidate. Raise a ValueError if there
        is no such plan."""
        return make_plan(ranks, self.strategy)

    @property
    def base(self) -> "Candidate":
        """Return the candidate whose `variants` include this candidate."""
        strategy: Any = self.strategy
        return Candidate(
            strategy and dataclasses.replace(strategy, root_computes=False)
        )

    def variants(self, payload: float) -> Iterator["Candidate"]:
        """Yield candidates with the same tree and code, with different sizes of pieces, and
        with and without data at the root."""
        if not self.tree:
            yield self
            return
        longer = [piece for piece in _PIECES if piece < payload]
        # pieces that are longer than the payload are all equivalent
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
    """Return the strategy of a tree whose root has no data: coded if stragglers or
    slices are requested, otherwise uncoded."""
    if stragglers == 0 and slices == 1:
        return Candidate(Uncoded(fanout=fanout, root_computes=False))
    return Candidate(
        Coded(fanout=fanout, stragglers=stragglers, slices=slices, seed=seed)
    )


def candidates(ranks: int, seed: int = 0) -> list[Candidate]:
    """Return the ring, the trees and the codes for this many ranks, without their `variants`
    (``docs/planning.md``)."""
    below = ranks - 1
    fitting = {fanout for fanout in _FANOUTS if fanout < below}
    # If all parents have the same number of children, more of their codes are repetition codes, whose κ
    # is 1.
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
    """Return ``replicas``, or raise a ValueError if there are not enough ranks."""
    replicas = _require.integer("replicas", replicas, 0)
    if replicas >= ranks:
        raise ValueError(
            f"replicas={replicas} does not fit {ranks} ranks: only {ranks - 1} other ranks can hold a rank's part of "
            f"the batch; give replicas={ranks - 1} or less"
        )
    return replicas


def why_not_shared(ranks: int, work: float, most: int | None = None) -> str:
    """If `sharing` returns no candidates, return why, as words that continue a sentence after
    "shared work". Otherwise return an empty text."""
    if most == 0:
        return "is left out by replicas=0"
    if not 3 <= ranks <= _MOST_SHARING:
        return f"is compared only for 3 to {_MOST_SHARING} ranks"
    if (part := work / ranks) < 2 * _BLOCK:
        return (
            f"needs two blocks of at least {_format.seconds(_BLOCK)} for each rank, but a rank's part of the batch "
            f"takes {_format.seconds(part)}"
        )
    return ""


def sharing(ranks: int, work: float, most: int | None = None) -> list[Candidate]:
    """Return candidates that share the work, without their `variants`. ``work`` is the seconds that one usual rank
    would take for the whole batch. ``most`` is how many other ranks may hold each block, by default all."""
    if why_not_shared(ranks, work, most):
        return []
    blocks = min(int(work / ranks / _BLOCK), _MOST_BLOCKS)
    all_others = ranks - 2  # the root may have no data
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


def may_be_drawn(ranks: int, candidate: Candidate, amplification: float) -> bool:
    """Return whether it may be useful to draw the candidate's code: if it does not take too long, and if κ is not above
    a bound, as far as this is known before the draw.

    Random codes for up to 128 children have κ above ``n / 2`` with one straggler, and far above ``(n / 2)²`` with more
    stragglers. With slices this holds only if ``s + m`` does not divide ``n``: if it divides ``n``, the code consists
    of small blocks.
    """
    strategy = candidate.strategy
    if not isinstance(strategy, Coded):
        return True
    drawn = _most_drawn(ranks, candidate)
    product = 1.0
    lost = strategy.stragglers + strategy.slices
    for most in drawn:
        if strategy.slices == 1 or most % lost:
            product *= max(1.0, most / 2) ** min(max(min(lost, most) - 1, 0), 2)
    return max(drawn) <= MOST_DRAWN and product <= amplification


def too_many_to_draw(ranks: int, candidate: Candidate) -> bool:
    """Return whether a parent of more than 64 children needs a random code, which would take long to
    find."""
    return max(_most_drawn(ranks, candidate)) > MOST_DRAWN


def _most_drawn(ranks: int, candidate: Candidate) -> list[int]:
    """Return, for each layer, the most children of a parent whose code is not a repetition."""
    layout = candidate.layout(ranks)
    assert isinstance(layout, Layout)
    return [
        int(layout.counts[layer][layout.copies[layer] == 1].max(initial=0))
        for layer in layout.layers
    ]
