"""A plan without coefficients: which rank sends what to which rank, and how many messages suffice."""

import dataclasses
import functools

import numpy as np

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.plan.parent_code import largest_coded_sets
from jaxcoded.plan.placement import NOTHING, Placement
from jaxcoded.plan.tree import balanced_parents


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A tree for the simulator, for millions of ranks.

    Ranks are numbered breadth first, so the children of a rank have consecutive
    numbers.

    Attributes:
        parents: int64 ``(N,)``, in non-decreasing order; -1 at the root, rank 0.
        loads: float64 ``(N,)``, the part of the batch that each rank computes.
        needs: int64 ``(N,)``, for how many children, or classes of children, each parent waits; 0 at leaves.
        copies: int64 ``(N,)``, how many consecutive children of each parent send the same message (fractional
            repetition); 1 without copies.
        messages: float64 ``(N,)``, the length of each rank's message, as a fraction of
            the payload.
        ranks: int64 ``(N,)``, the number of each rank in the job.
        plan: the plan from which this layout was made, if any. With shared work, ``loads`` are the loads of steps in
            which no rank is late.
    """

    parents: np.ndarray
    loads: np.ndarray
    needs: np.ndarray
    copies: np.ndarray
    messages: np.ndarray
    ranks: np.ndarray
    plan: Plan | None = None

    @property
    def placement(self) -> Placement:
        """Return which ranks hold which blocks of shared work."""
        return self.plan.placement if self.plan else NOTHING

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.parents)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Return the number of children of each rank, int64 ``(N,)``."""
        return np.bincount(self.parents[1:], minlength=self.size)

    @functools.cached_property
    def first(self) -> np.ndarray:
        """Return the first child of each rank, int64 ``(N,)``. The other children have
        the following numbers."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]]) + 1

    @functools.cached_property
    def layers(self) -> list[slice]:
        """Return the ranks of each layer, the root's first."""
        layers = [slice(0, 1)]
        while layers[-1].stop < self.size:
            last = layers[-1].stop - 1
            layers.append(
                slice(layers[-1].stop, int(self.first[last] + self.counts[last]))
            )
        return layers

    @classmethod
    def of(cls, plan: Plan) -> "Layout":
        """Return the layout of a plan. With some codes, the number of children that have answered does not determine
        whether the parent can decode. With these codes any ``n − s`` children count as enough.

        Example:
            >>> import jaxcoded
            >>> from jaxcoded.tools.simulator import Layout
            >>> Layout.of(jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3))).needs.tolist()[:4]
            [2, 2, 2, 2]
        """
        order: list[int] = [plan.root]
        needs, copies = [], []
        for rank in order:  # the list grows during the loop
            coding = plan.codings[rank]
            if coding is None:
                needs.append(0)
                copies.append(1)
                continue
            children = plan.coded_children(rank)
            needs.append(coding.needs)
            copies.append(coding.copies)
            if coding.copies > 1:  # give children that send copies consecutive numbers
                by_class = np.argsort(coding.code.classes, kind="stable")
                children = tuple(children[row] for row in by_class)
            order.extend(children)
        ranks = np.array(order)
        position = np.empty(len(ranks), np.int64)
        position[ranks] = np.arange(len(ranks))
        parents = np.array(plan.parents)[ranks]
        messages = np.array(plan.parts_above) / np.array(plan.slices_above)
        return cls(
            parents=np.where(parents < 0, -1, position[parents]),
            loads=np.array([float(plan.load_of(rank)) for rank in order]),
            needs=np.array(needs),
            copies=np.array(copies),
            messages=messages[ranks],
            ranks=ranks,
            plan=plan,
        )

    @classmethod
    def balanced(
        cls, size: int, fanout: int, stragglers: int = 0, slices: int = 1
    ) -> "Layout":
        """Return the layout of the balanced tree that `jaxcoded.make_plan` makes, with a root without data. Loads
        are computed in closed form (``docs/theory.md``), so no codes are made.

        Args:
            size: number of ranks ``N``.
            fanout: the largest number of children of a parent; ``size − 1`` gives a
                star.
            stragglers: ``s``.
            slices: ``m``.

        Raises:
            ValueError: there is no such tree.

        Example:
            >>> from jaxcoded.tools.simulator import Layout
            >>> round(float(Layout.balanced(1 + 3 + 9, 3, 1).loads.max()) * 15, 6)
            4.0
        """
        size = _require.integer("size", size, 2)
        holders = _require.integer("stragglers", stragglers, 0) + _require.integer(
            "slices", slices, 1
        )
        fanout = _require.integer("fanout", fanout, 1)
        if holders > min(fanout, size - 1):
            raise ValueError(
                f"stragglers={stragglers} and slices={slices} need fanout >= {holders} "
                f"and more than {holders} ranks, got fanout={fanout}, size={size}"
            )
        parents = np.array(balanced_parents(size, min(fanout, size - 1), holders))
        counts = np.bincount(parents[1:], minlength=size)
        m = np.minimum(slices, np.maximum(counts, 1))
        s = np.minimum(stragglers, np.maximum(counts - m, 0))
        layout = cls(
            parents=parents,
            loads=np.zeros(size),
            needs=np.maximum(counts - s, 0),
            copies=np.ones(size, np.int64),
            messages=np.ones(size),
            ranks=np.arange(size),
        )
        coded, own = np.zeros(size), np.ones(size)
        own[0] = 0.0
        capacity = own.copy()
        for layer in reversed(layout.layers[:-1]):
            inner = np.arange(layer.start, layer.stop)[counts[layer] > 0]
            # the capacities of the children, with a row for each parent
            columns = np.arange(counts[inner].max())
            children = layout.first[inner][:, None] + columns
            present = columns < counts[inner][:, None]
            below = np.where(present, capacity.take(children, mode="clip"), np.inf)
            coded[inner] = largest_coded_sets(below, counts[inner], (s + m)[inner])
            layout._repeat(inner, below, coded[inner], s, m)
            capacity[inner] += coded[inner]
        assigned = np.zeros(size)
        assigned[0] = capacity[0]
        for layer in layout.layers[1:]:
            above = parents[layer]
            share = np.minimum(capacity[layer] / coded[above], 1.0)
            assigned[layer] = assigned[above] * coded[above] / capacity[above] * share
            layout.messages[layer] = layout.messages[above] / m[above]
        layout.loads[:] = assigned * own / capacity / capacity[0]
        return layout

    def _repeat(
        self,
        parents: np.ndarray,
        capacities: np.ndarray,
        coded: np.ndarray,
        stragglers: np.ndarray,
        slices: np.ndarray,
    ) -> None:
        """Set fractional repetition for parents whose children then have no unused capacity."""
        s = stragglers[parents]
        fits = (slices[parents] == 1) & (s > 0) & (self.counts[parents] % (s + 1) == 0)
        for copies in np.unique(s[fits] + 1):
            some = np.flatnonzero(fits & (s + 1 == copies))
            table = capacities[some][:, : int(self.counts[parents[some]].max())]
            table = np.where(np.isinf(table), 0.0, table)
            table = np.pad(table, ((0, 0), (0, -table.shape[1] % copies)))
            # Subtrees are in the order of their sizes, so consecutive children are
            # alike.
            classes = table.reshape(len(some), -1, copies)
            kept = classes.min(axis=2).sum(axis=1)
            chosen = parents[some[np.isclose(kept, coded[some], rtol=1e-12)]]
            self.copies[chosen] = copies
            self.needs[chosen] = self.counts[chosen] // copies
