from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxcoded import _require
from jaxcoded._format import fraction, s
from jaxcoded.plan.parent_code import Coding, uncoded
from jaxcoded.plan.placement import MOST_BLOCKS, Placement
from jaxcoded.plan.strategy import Assigned, Strategy
from jaxcoded.plan.tree import NO_PARENT, Tree

if TYPE_CHECKING:
    from jaxcoded.plan.plan import Plan


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Shared(Strategy):
    """Every rank computes its own blocks of the batch, and then blocks of ranks that are late.

    This is the default strategy, and fits any number of ranks. No block is computed
    twice, so a step costs as much as without a code. The strategy needs the engine; see
    ``docs/sharing.md``.

    Attributes:
        replicas: the number of other ranks that hold the data of each block, ≥ 0. Any
            ``replicas`` ranks except the root may be missing. A single rank computes
            everything.
        blocks: the number of blocks of each rank, ≥ 1. A single rank has one block.
        root_computes: whether the root also owns blocks.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Example:
        >>> import jaxcoded
        >>> print(jaxcoded.make_plan(4, jaxcoded.Shared(replicas=2)).describe())
        4 ranks: root 0 (with data) and 3 workers, which share the work: any 2 ranks but the root may be missing
        a rank computes 1/4 of the batch, in 12 blocks, if no rank is late; a rank that is done computes blocks of other ranks
        a rank holds the data of 3/4 of the batch: each block lies on its owner and 2 other ranks
    """

    by_blocks: ClassVar[bool] = True

    replicas: int = 1
    blocks: int = 12
    root_computes: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (("replicas", 0, None), ("blocks", 1, MOST_BLOCKS)):
            value = _require.integer(name, getattr(self, name), least, most)
            object.__setattr__(self, name, value)
        _require.boolean("root_computes", self.root_computes)

    def parents_of(self, size: int, hosts: Sequence[str] | None) -> tuple[int, ...]:
        del hosts
        return (NO_PARENT, *(0 for _ in range(size - 1)))

    def check(self, tree: Tree) -> None:
        if tree.depth > 1 or tree.root:
            raise ValueError(
                f"{self!r} needs all workers as children of rank 0, but this tree has root {tree.root} "
                f"and {tree.depth} layers below it: take Coded(parents=...)"
            )
        placed = self.placement(tree.size)
        others = len(placed.ranks) - 1
        if self.replicas > max(others, 1) and tree.size > 1:
            raise ValueError(
                f"{self!r} does not fit size={tree.size} ranks: only {others} other rank{s(others)} can hold a "
                f"rank's part of the batch; give replicas={others} or less"
            )
        if len(placed.ranks) * self.blocks > max(MOST_BLOCKS, 12 * tree.size):
            raise ValueError(
                f"{self!r} does not fit size={tree.size} ranks: all ranks together can have at most {MOST_BLOCKS} "
                f"blocks; give blocks={max(1, MOST_BLOCKS // tree.size)} or less"
            )

    def placement(self, size: int) -> Placement:
        first = 0 if self.root_computes or size == 1 else 1
        ranks = tuple(range(first, size))
        # A single rank has no other rank with which to share, so it computes the whole
        # batch.
        blocks = self.blocks if len(ranks) > 1 else 1
        return Placement(ranks, min(self.replicas, len(ranks) - 1), blocks)

    def coding(self, tree: Tree, rank: int, capacities: tuple[Fraction, ...]) -> Coding:
        del tree, rank
        return uncoded(capacities, "shared")

    def describe(self, plan: Plan) -> str:
        placed = plan.placement
        n, others = len(placed.ranks), placed.replicas
        missing = (
            f"any {others} ranks" if others > 1 else "any rank" if others else "no rank"
        )
        helped = (
            "a rank that is done computes blocks of other ranks"
            if others
            else "with replicas=0 no other rank has its data, and all ranks wait for it"
        )
        each = Fraction(1, n)
        with_data = "with" if self.root_computes else "without"
        workers = plan.size - 1
        return "\n".join(
            [
                (
                    f"{plan.size} ranks: root {plan.root} ({with_data} data) and "
                    f"{workers} worker{s(workers)}, which share the work: "
                    f"{missing} {'but the root ' * (others > 0)}may be missing"
                ),
                (
                    f"a rank computes {fraction(each)} of the batch, in {placed.blocks} "
                    f"block{s(placed.blocks)}, if no rank is late; {helped}"
                ),
                (
                    f"a rank holds the data of {fraction((1 + others) * each)} of the batch: "
                    f"each block lies on its owner"
                    + f" and {others} other rank{s(others)}"
                    * (others > 0)
                ),
            ]
        )

    def loads(self, plan: Plan, batch_size: int) -> np.ndarray:
        sizes = np.diff(plan.placement.examples(batch_size))
        owned = (plan.placement.owned(rank) for rank in range(plan.size))
        return np.array([sizes[list(blocks)].sum() for blocks in owned], np.int64)

    def shares(self, plan: Plan, rank: int, batch_size: int) -> Assigned:
        starts, owned = plan.placement.examples(batch_size), plan.placement.owned(rank)
        spans = [np.arange(starts[block], starts[block + 1]) for block in owned]
        indices = np.concatenate([np.arange(0), *spans])
        return indices, np.ones((len(indices), 1, 1))

    def assignment(self, plan: Plan, rank: int, batch_size: int) -> Assigned:
        """Return the examples of a rank's blocks, all padded to the same length. Weights
        are 0 in other ranks' blocks, which a rank without sharing does not sum."""
        placed = plan.placement
        starts = placed.examples(batch_size)
        held, owned = placed.held(rank), placed.owned(rank)
        size = int(np.diff(starts).max())
        if not held:
            return np.zeros(1, np.int64), np.zeros(1)
        first = starts[list(held)][:, None]
        present = np.arange(size) < np.diff(starts)[list(held)][:, None]
        indices = np.where(
            present, first + np.arange(size), np.minimum(first, batch_size - 1)
        )
        weights = present * (np.arange(len(held)) < len(owned))[:, None]
        return indices.reshape(-1), weights.reshape(-1).astype(float)

    def bounds(self, plan: Plan) -> tuple[Fraction, ...]:
        blocks = len(plan.placement.holders)
        return tuple(Fraction(block, blocks) for block in range(blocks + 1))

    def cuts(self, plan: Plan, batch_size: int) -> list[np.ndarray]:
        """Return the positions at which the batch is cut into each rank's blocks."""
        starts, blocks = plan.placement.examples(batch_size), plan.placement.blocks
        owners = range(0, len(starts) - 1, blocks)
        return [starts[first : first + blocks + 1] for first in owners]

    def refuse(self, given: str) -> None:
        why = (
            "blocks are assigned during the round, and the sum is over the whole batch"
        )
        if given == "residual":
            why = 'its sums are exact, unless on_deadline="approximate"'
        raise ValueError(f"{given} cannot be given in a group with {self!r}: {why}")

    def why_not_split(self, plan: Plan) -> str:
        del plan
        return f"with {self!r} examples belong to blocks"

    def why_not_compared(self, plan: Plan, wait: bool | str) -> str:
        if wait != "all" and not plan.placement.replicas:
            return "has nothing to compare: each block is on one rank only; take replicas=1 or more"
        if wait is True:
            return "waits for surplus messages, but shared work has none: leave out wait=True"
        return ""  # examples are counted, and `audit` compares blocks

    def with_speeds(self, speeds: Sequence[Any]) -> Strategy:
        raise ValueError(
            f"{self!r} measures the speeds of ranks itself: leave speeds={list(speeds)} out"
        )

    def for_others(self, speeds: Sequence[Fraction]) -> Strategy:
        del speeds
        return self
