"""A tree of ranks whose parents have codes: what `Coded` and `Uncoded` have in
common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxcoded import _require
from jaxcoded._format import s
from jaxcoded.codes._named import needed
from jaxcoded.plan import chunks, dealing
from jaxcoded.plan.describe import describe
from jaxcoded.plan.parent_code import AUTO, Coding, coding_of
from jaxcoded.plan.strategy import Strategy
from jaxcoded.plan.tree import (
    NO_PARENT,
    Tree,
    balanced_parents,
    default_fanout,
    parents_by_host,
)

if TYPE_CHECKING:
    from jaxcoded.plan.plan import Plan


class CodeTree(Strategy, named=False):
    """See `Coded` for the attributes."""

    stragglers: int = 0
    fanout: int | None = None
    code: Any = AUTO
    slices: int = 1
    seed: int = 0
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.fanout is not None:
            fanout = _require.integer("fanout", self.fanout, 1)
            object.__setattr__(self, "fanout", fanout)
        _require.boolean("root_computes", self.root_computes)
        object.__setattr__(self, "speeds", self._checked_speeds())

    # The tree.

    @property
    def root(self) -> int:
        return 0 if self.parents is None else self.parents.index(NO_PARENT)

    def parents_of(self, size: int, hosts: Sequence[str] | None) -> tuple[int, ...]:
        if self.parents is not None:
            return self.parents
        if size == 1:
            return (NO_PARENT,)
        if self.by_host:
            if hosts is None:
                raise ValueError(
                    f"{self!r} needs the name of each rank's host: give make_plan(size, ..., hosts=[...])"
                )
            if len(set(hosts)) > 1:
                return parents_by_host(hosts)
        needed = self._needed
        if size < needed + 1:
            fewer = max(0, self.stragglers - needed - 1 + size)
            raise ValueError(
                f"size={size} ranks are too few for {self!r}: stragglers={self.stragglers} and "
                f"slices={self.slices} need at least {needed + 1} ranks, a parent and "
                f"{needed} children; take more ranks, stragglers={fewer}"
                + " and slices=1" * (size - 1 < self.slices)
                + ", or Shared(), which works on any number of ranks"
            )
        fanout = self.fanout
        if fanout is None:
            fanout = default_fanout(size, needed)
        if fanout < needed:
            raise ValueError(
                f"fanout={fanout} is too small: losing s={self.stragglers} of n children "
                f"with m={self.slices} slices needs n >= s + m = {needed}; take a larger "
                "fan-out, or fewer stragglers or slices"
            )
        return balanced_parents(size, min(fanout, size - 1), needed)

    def check(self, tree: Tree) -> None:
        if self.parents is not None and self.parents != tree.parents:
            raise ValueError(
                f"parents has {len(self.parents)} entries for size={tree.size} ranks"
                if len(self.parents) != tree.size
                else f"parents must be {self.parents}, as in the strategy"
            )
        if self.speeds and len(self.speeds) != tree.size:
            raise ValueError(
                f"speeds has {len(self.speeds)} entries for {tree.size} ranks: give one for each rank"
            )
        if self._names_ranks:
            if self.code[-1][0] >= tree.size:
                raise ValueError(
                    f"code names rank {self.code[-1][0]}, but there are {tree.size} ranks"
                )
        elif isinstance(self.code, tuple) and len(self.code) != tree.depth:
            raise ValueError(
                f"code has {len(self.code)} entries for {tree.depth} layers of parents"
            )
        most = max(map(len, tree.children))
        needed = self._needed
        if tree.size > 1 and needed > most:
            raise ValueError(
                f"stragglers={self.stragglers} and slices={self.slices} need a parent "
                f"with at least {needed} children, but no parent "
                f"has more than {most} (size={tree.size}): take fewer stragglers or "
                "slices, a larger fan-out or more ranks"
            )

    # Codes.

    @property
    def _names_ranks(self) -> bool:
        """Return whether `code` is a mapping of single ranks to codes."""
        return isinstance(self.code, tuple) and isinstance(self.code[0], tuple)

    def code_of(self, tree: Tree, rank: int) -> str:
        """Return the requested code of a parent."""
        if isinstance(self.code, str):
            return self.code
        if self._names_ranks:
            return str(dict(self.code).get(rank, AUTO))
        return str(self.code[tree.layers[rank]])

    def parameters(self, tree: Tree, rank: int) -> tuple[int, int]:
        """Return ``s`` and ``m`` of a parent, which are smaller for too few children."""
        children = len(tree.children[rank])
        slices = min(self.slices, children)
        code = self.code_of(tree, rank)
        least = slices if code == AUTO else needed(code, 0, slices)
        return min(self.stragglers, children - least), slices

    def coding(self, tree: Tree, rank: int, capacities: tuple[Fraction, ...]) -> Coding:
        stragglers, slices = self.parameters(tree, rank)
        return coding_of(
            capacities, stragglers, slices, self.code_of(tree, rank), self.seed
        )

    @property
    def _needed(self) -> int:
        """Return how many children the least demanding code needs."""
        codes: Any = [self.code] if isinstance(self.code, str) else self.code
        texts = dict(codes).values() if self._names_ranks else codes
        lost, m = self.stragglers, self.slices
        return min(
            (needed(text, lost, m) for text in texts if text != AUTO), default=lost + m
        )

    def describe(self, plan: Plan) -> str:
        return describe(plan, self)

    loads = staticmethod(dealing.loads)
    shares = staticmethod(dealing.shares)
    assignment = staticmethod(chunks.assignment)
    bounds = staticmethod(dealing.bounds)
    cuts = staticmethod(dealing.cuts)

    # Checks whether the strategy fits.

    def why_not_split(self, plan: Plan) -> str:
        return (
            f"with {self!r} messages have slices or parts, and weights belong to whole chunks"
            if plan.encoded
            else ""
        )

    def why_not_compared(self, plan: Plan, wait: bool | str) -> str:
        del wait
        if plan.size > 1 and not plan.checked:
            return (
                f"has nothing to compare: {self.gaps(plan)}; take more stragglers or another "
                "code"
            )
        return ""

    def gaps(self, plan: Plan) -> str:
        parents = {rank for rank, _ in plan.coded_parents}
        ranks = sorted(parents - set(plan.checked))
        if not ranks:
            return ""
        return (
            f"messages of the children of rank{s(len(ranks))} "
            f"{', '.join(map(str, ranks))} cannot be checked, as they have no "
            "redundancy or a code below is approximate"
        )

    # Replacements.

    def with_speeds(self, speeds: Sequence[Any]) -> Strategy:
        strategy: Any = self  # every strategy is a dataclass
        return dataclasses.replace(strategy, speeds=tuple(speeds) or None)

    def for_others(self, speeds: Sequence[Fraction]) -> Strategy:
        if self.parents is not None or self._names_ranks:
            raise ValueError(
                f"{self!r} names the parents or codes of single ranks, so it cannot be used for other ranks"
            )
        return super().for_others(speeds)

    def _checked_speeds(self) -> tuple[Fraction, ...] | None:
        """Return speeds relative to the fastest rank that computes."""
        speeds: Any = self.speeds
        if speeds is None:
            return None
        try:
            speeds = list(speeds)
        except TypeError:
            raise ValueError(
                f"speeds must have one number for each rank, got {_require.shown(speeds)}"
            ) from None
        for rank, speed in enumerate(speeds):
            if not _is_speed(speed):
                raise ValueError(
                    f"speeds must be positive and finite, got {_require.shown(speed)} for rank "
                    f"{rank}"
                )
        speeds = [
            Fraction(each if isinstance(each, int | Fraction) else float(each))
            for each in speeds
        ]
        if len(speeds) > 1 and not self.root_computes and self.root < len(speeds):
            rest = [speed for rank, speed in enumerate(speeds) if rank != self.root]
            speeds[self.root] = max(rest)
        fastest = max(speeds, default=Fraction(1))
        out = tuple(Fraction(round(speed / fastest * 1000), 1000) for speed in speeds)
        if out and min(out) == 0:
            slowest = speeds[out.index(min(out))]
            raise ValueError(
                "speeds must be at least 1/1000 of the fastest, got "
                f"{float(slowest):g} and {float(fastest):g}"
            )
        return out or None


def _is_speed(value: Any) -> bool:
    try:
        return 0 < float(value) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False
