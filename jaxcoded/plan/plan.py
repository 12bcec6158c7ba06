import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxcoded import _parse, _require
from jaxcoded.codes import GradientCode
from jaxcoded.plan.parent_code import Coding
from jaxcoded.plan.placement import Placement
from jaxcoded.plan.shared import Shared
from jaxcoded.plan.strategy import Strategy, check_strategy
from jaxcoded.plan.tree import Tree

_FORMAT = "jaxcoded.Plan/2"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan: which part of a batch each rank holds, what it sends to its parent, and
    how parents rebuild the sums.

    Use `make_plan` to make a plan. This constructor takes the two attributes that define
    a plan, and derives everything else from these attributes. Two plans are equal if
    these attributes are equal. Plans generalise CodedReduce (Reisizadeh et al. 2021,
    arXiv 1902.01981) to any tree, to slices and to unequal subtrees
    (``docs/theory.md``).

    Attributes:
        parents: parent of each rank, ``-1`` at the root.
        strategy: the strategy that divides the work.

    Raises:
        ValueError: no such plan exists. The message names the value and the remedy.
        TypeError: ``strategy`` is not a strategy.

    Example:
        >>> import jaxcoded
        >>> plan = jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3))
        >>> plan.load
        Fraction(4, 15)
        >>> jaxcoded.Plan.from_json(plan.to_json()) == plan
        True
    """

    parents: tuple[int, ...]
    strategy: Strategy

    def __post_init__(self) -> None:
        tree = Tree(tuple(self.parents))
        object.__setattr__(self, "parents", tree.parents)
        strategy: Any = check_strategy(self.strategy)
        strategy.check(tree)
        if strategy.speeds and len(set(strategy.speeds)) == 1:
            # equal speeds have no effect
            strategy = dataclasses.replace(strategy, speeds=None)
        object.__setattr__(self, "strategy", strategy)
        # Build every code now, so that an impossible code raises an error here.
        self.codings  # noqa: B018

    @property
    def speeds(self) -> tuple[Fraction, ...]:
        """Relative speed of each rank; the fastest rank has speed 1. Empty if all ranks
        are equally fast."""
        return self.strategy.speeds or ()

    @functools.cached_property
    def placement(self) -> Placement:
        """The placement of the batch's blocks, without blocks if the plan has codes."""
        return self.strategy.placement(self.size)

    # The tree.

    @functools.cached_property
    def tree(self) -> Tree:
        """The tree of `parents`."""
        return Tree(self.parents)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parents)

    @property
    def root(self) -> int:
        """The rank without a parent."""
        return self.tree.root

    def coded_children(self, rank: int) -> tuple[int, ...]:
        """Return a rank's children in the order of its code's rows."""
        coding = self.codings[rank]
        rows = () if coding is None else coding.rows
        return tuple(self.tree.children[rank][row] for row in rows)

    def speed(self, rank: int) -> Fraction:
        """Return how much data a rank can compute itself, relative to the fastest rank.
        This is 0 for a root without data, unless the root is the only rank.
        """
        if rank == self.root and not self.strategy.root_computes and self.size > 1:
            return Fraction(0)
        return self.speeds[rank] if self.speeds else Fraction(1)

    # Codes and capacities.

    @functools.cached_property
    def codings(self) -> tuple[Coding | None, ...]:
        """The coding of every rank, ``None`` at leaves."""
        codings: list[Coding | None] = [None] * self.size
        capacities = list(map(self.speed, range(self.size)))
        for rank in reversed(self.tree.order):
            children = self.tree.children[rank]
            if not children:
                continue
            try:
                coding = self.strategy.coding(
                    self.tree, rank, tuple(capacities[c] for c in children)
                )
            except ValueError as error:
                raise ValueError(
                    f"rank {rank} with its {len(children)} children: {error}"
                ) from None
            codings[rank] = coding
            capacities[rank] += coding.capacity
        return tuple(codings)

    @functools.cached_property
    def coded_parents(self) -> tuple[tuple[int, Coding], ...]:
        """The parents, the root first, each with its coding."""
        pairs = ((rank, self.codings[rank]) for rank in self.tree.order)
        return tuple((rank, coding) for rank, coding in pairs if coding is not None)

    @functools.cached_property
    def capacities(self) -> tuple[Fraction, ...]:
        """The size of the largest set that each rank's subtree can be assigned, in units
        of the fastest rank's load."""
        return tuple(
            self.speed(rank) + (coding.capacity if coding else 0)
            for rank, coding in enumerate(self.codings)
        )

    @functools.cached_property
    def assigned(self) -> tuple[Fraction, ...]:
        """The size of the set that each rank's subtree is assigned, in units of the
        fastest rank's load. It is at most the subtree's capacity."""
        assigned = [Fraction(0)] * self.size
        assigned[self.root] = self.capacities[self.root]
        for rank, coding in self.coded_parents:
            coded = assigned[rank] * coding.capacity / self.capacities[rank]
            for child, share in zip(self.coded_children(rank), coding.code.shares):
                assigned[child] = coded * share
        return tuple(assigned)

    @functools.cached_property
    def slices_above(self) -> tuple[int, ...]:
        """The number ``M`` of slices of a gradient, of which each rank sends one: the
        product of the slices of its ancestors' codes."""
        return self._product_above(lambda code: code.m)

    @functools.cached_property
    def parts_above(self) -> tuple[int, ...]:
        """The number ``P`` of vectors in each rank's message: the product of the parts
        of its ancestors' codes."""
        return self._product_above(lambda code: code.parts)

    @functools.cached_property
    def encoded(self) -> bool:
        """Whether messages have slices or parts, and are not single weighted gradients."""
        return max(self.slices_above) > 1 or max(self.parts_above) > 1

    @functools.cached_property
    def approximate(self) -> bool:
        """Whether a parent may continue with an approximation of its sum."""
        return any(coding.code.approximate for _, coding in self.coded_parents)

    @property
    def padding_multiple(self) -> int:
        """Gradients are padded to a multiple of this number, the lcm of `slices_above`."""
        return math.lcm(*self.slices_above)

    def result_length(self, rank: int, length: int) -> int:
        """Return the length of a sum to which this rank contributes ``length`` numbers."""
        return length // self.parts_above[rank] * self.slices_above[rank]

    def coefficients(
        self, rank: int, erased: Sequence[bool] | np.ndarray | None = None
    ) -> np.ndarray:
        """Return the coefficients with which a rank combines its children's messages:
        float64 ``(m, n · parts)`` over `coded_children` and the parts of each child,
        ``(1, 0)`` at a leaf.

        Args:
            rank: the rank that combines the messages.
            erased: bool ``(size,)``, the ranks whose messages are left out. Default: no
                ranks. Children that lack too many of their own children are left out,
                too; see `missing`. If the remaining messages do not suffice (see
                `unrecoverable`), return the least-squares coefficients.
        """
        coding = self.codings[rank]
        if coding is None:
            return np.zeros((1, 0))
        missing = np.zeros(self.size, bool) if erased is None else self.missing(erased)
        answered = ~missing[list(self.coded_children(rank))]
        return coding.code.decode(answered).coefficients

    def missing(self, erased: Sequence[bool] | np.ndarray) -> np.ndarray:
        """Return the ranks whose messages are missing if the ranks ``erased`` are left
        out: bool ``(size,)``. They are the erased ranks, and every parent that lacks
        too many children, since it has no sum to send.

        Args:
            erased: bool ``(size,)``.

        Raises:
            ValueError: ``erased`` has another shape.
        """
        missing = np.array(erased, bool)
        if missing.shape != (self.size,):
            raise ValueError(
                f"erasures must have shape ({self.size},), one for each rank, "
                f"got {missing.shape}"
            )
        for rank, coding in reversed(self.coded_parents):
            if not missing[rank]:
                answered = ~missing[list(self.coded_children(rank))]
                missing[rank] = not coding.code.sufficient(answered)
        return missing

    def unrecoverable(self, erased: Sequence[bool] | np.ndarray) -> list[int]:
        """Return the parents that cannot rebuild their sums without the erased ranks,
        and so prevent the root from rebuilding its sum. The root comes first. The list
        is empty if the plan tolerates these erasures.

        Args:
            erased: bool ``(size,)``.

        Raises:
            ValueError: ``erased`` has another shape.
        """
        missing = self.missing(erased)
        failed: list[int] = []
        for rank in self.tree.order:
            above = self.tree.parents[rank]
            wanted = rank == self.root or (above in failed and not erased[rank])
            if wanted and missing[rank]:
                failed.append(rank)
        return failed

    def why_not(self, erased: Sequence[bool] | np.ndarray) -> str:
        """Return why the plan does not tolerate the erased ranks, or an empty text if it
        tolerates them.

        Args:
            erased: bool ``(size,)``.
        """
        failed = self.unrecoverable(erased)
        if not failed:
            return ""
        if erased[self.root]:
            return f"rank {self.root} is the root, the one rank that cannot be left out"
        missing = self.missing(erased)
        lacks = {
            rank: [child for child in self.coded_children(rank) if missing[child]]
            for rank in failed
        }
        first, *others = failed
        return (
            f"rank {first} cannot rebuild its sum without its children {lacks[first]}"
            + "".join(f", nor rank {rank} without {lacks[rank]}" for rank in others)
            + f": any {self.tolerance(first)} of the {len(self.coded_children(first))} "
            f"children of rank {first} may be left out; make the group with more stragglers"
        )

    def tolerance(self, rank: int) -> int:
        """Return how many of a rank's children may be missing, whichever; 0 at a leaf."""
        coding = self.codings[rank]
        return 0 if coding is None else coding.code.stragglers

    @property
    def load(self) -> Fraction:
        """``r``: the largest part of the batch that a rank computes.

        If all ranks are equally fast, ``r = 1 / c(root)``, where ``c(root)`` is the
        root's capacity. On an (n, L)-regular tree, ``r = 1 / Σ_l (n/(s+m))^l``
        (CodedReduce, for ``m = 1``).
        """
        if not self.speeds:
            return 1 / self.capacities[self.root]
        return max(self.load_of(rank) for rank in range(self.size))

    def load_of(self, rank: int) -> Fraction:
        """Return the part of the batch that a rank computes, before rounding."""
        own = self.assigned[rank] * self.own_share(rank)
        return own / self.capacities[self.root]

    def own_share(self, rank: int) -> Fraction:
        """Return the fraction of its subtree's set that a rank computes itself."""
        return self.speed(rank) / self.capacities[rank]

    @functools.cached_property
    def checked(self) -> tuple[int, ...]:
        """The parents that can check their children's messages once all children have
        answered. The code of such a parent has redundancy, and the codes below it are
        exact.
        """
        blurred = [False] * self.size  # whether a rank's message may be approximate
        parents = []
        for rank, coding in reversed(self.coded_parents):
            below = any(blurred[child] for child in self.tree.children[rank])
            blurred[rank] = below or coding.code.approximate
            if not below and len(coding.code.parity_checks):
                parents.append(rank)
        return tuple(sorted(parents))

    @functools.cached_property
    def amplification(self) -> float:
        """The factor by which rounding can grow on the way to the root. Each rank has the
        product of the ``κ`` of its ancestors' codes; the factor is the largest product.
        """
        return float(max(self._product_above(lambda code: code.amplification)))

    def _product_above(self, number: Callable[[GradientCode], Any]) -> tuple[Any, ...]:
        """Return the product of a number over the codes of each rank's ancestors."""
        product = [1] * self.size
        for rank, coding in self.coded_parents:
            for child in self.tree.children[rank]:
                product[child] = product[rank] * number(coding.code)
        return tuple(product)

    # Text.

    def to_json(self) -> str:
        """Return the plan as JSON text, from which `from_json` makes an equal plan."""
        fields = {
            "format": _FORMAT,
            "parents": self.parents,
            "strategy": json.loads(self.strategy.to_json()),
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan from a text that `to_json` returned.

        Raises:
            ValueError: the text is not a plan.
        """
        try:
            fields = _parse.document(text)
        except ValueError as error:
            raise ValueError(
                f"not a plan written by Plan.to_json: {error}; got {_require.shown(text)}"
            ) from None
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(
                f"not a plan written by Plan.to_json of this version of jaxcoded ({_FORMAT}): "
                f"{_require.shown(text)}"
            )
        _parse.fields("a plan", fields, {"parents": list, "strategy": dict})
        parents = fields["parents"]
        if not all(type(each) is int for each in parents):
            raise ValueError(
                f"parents must be a list of integers, got {_require.shown(parents)}"
            )
        strategy = Strategy.from_json(json.dumps(fields["strategy"]))
        return cls(tuple(parents), strategy)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the plan and of the values of its codes, equal on all
        machines for equal plans.

        The digest uses 6 digits of each of a code's values. The values' last bits
        differ between linear algebra libraries, but a code from a different random draw
        differs in more than the last bits.
        """
        digest = hashlib.sha256(self.to_json().encode())
        for coding in dict.fromkeys(
            coding for coding in self.codings if coding is not None
        ):
            digest.update((np.round(coding.code.B, 6) + 0.0).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return the plan as text with a table. The table has the loads, unused
        capacity, message sizes, tolerance and κ of each layer.
        """
        if self.size == 1:
            return "1 rank: it computes the whole batch, uncoded"
        return self.strategy.describe(self)


def make_plan(
    size: int, strategy: Strategy | None = None, *, hosts: Sequence[str] | None = None
) -> Plan:
    """Return the plan of ``size`` ranks.

    Args:
        size: number of ranks, including the root. A single rank computes everything.
        strategy: `Shared`, `Coded` or `Uncoded`. Default: ``Shared()``.
        hosts: the name of each rank's host, for ``Coded(by_host=True)``; other
            strategies ignore it.

    Returns:
        A `Plan`.

    Raises:
        ValueError: the strategy does not fit this number of ranks. The message names
            the value and the remedy.
        TypeError: ``strategy`` is not a strategy.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.make_plan(13, jaxcoded.Coded(stragglers=1, fanout=3)).load
        Fraction(4, 15)
        >>> jaxcoded.make_plan(13).load
        Fraction(1, 13)
    """
    size = _require.integer("size", size, 1)
    strategy = check_strategy(Shared() if strategy is None else strategy)
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"hosts has {len(hosts)} entries for size={size} ranks")
    parents = strategy.parents_of(size, hosts)
    if len(parents) != size:
        raise ValueError(f"parents has {len(parents)} entries for size={size} ranks")
    return Plan(parents, strategy)
