"""A plan: a tree, one gradient code per parent, and what follows from them for every
rank."""

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxcoded import _parse, _require
from jaxcoded.codes import GradientCode
from jaxcoded.codes._named import needed, parsed
from jaxcoded.plan.describe import describe
from jaxcoded.plan.parent_code import AUTO, Coding, coding_of
from jaxcoded.plan.placement import Placement, is_shared, placement
from jaxcoded.plan.tree import (
    NO_PARENT,
    Tree,
    balanced_parents,
    default_fanout,
    parents_by_host,
)

_FORMAT = "jaxcoded.Plan/1"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rank holds which part of a batch, what it sends to its parent, and how
    parents rebuild the sums.

    Made by `make_plan`; this constructor takes what a plan is defined by, everything
    else is derived from it. Equality and hash are by value. CodedReduce, Reisizadeh et
    al. 2021 (arXiv 1902.01981), generalised to any tree, to slices and to
    unequal subtrees (``docs/theory.md``).

    Attributes:
        parents: parent of each rank, ``-1`` at the root.
        stragglers: ``s`` asked for at every parent. A parent with too few children
            has less, see `codings`.
        slices: ``m`` asked for at every parent.
        code: the code asked for at every parent, ``"auto"`` or one of
            `codes.named`; or a tuple of such texts, one for each rank. Those of leaves
            are not used. Or ``"shared(…)"``, see `make_plan`.
        root_computes: whether the root holds data.
        seed: of random codes.
        speeds: relative speed of each rank, the fastest 1; empty where all are equal.
            Kept as fractions of 1000.

    Raises:
        ValueError: no such plan exists. The message names the value and the remedy.
        TypeError: ``root_computes`` is not a bool.

    Example:
        >>> import jaxcoded
        >>> plan = jaxcoded.make_plan(13, fanout=3)
        >>> plan.load
        Fraction(4, 15)
        >>> jaxcoded.Plan.from_json(plan.to_json()) == plan
        True
    """

    parents: tuple[int, ...]
    stragglers: int
    slices: int
    code: str | tuple[str, ...]
    root_computes: bool
    seed: int
    speeds: tuple[Fraction, ...] = ()

    def __post_init__(self) -> None:
        tree = Tree(tuple(self.parents))
        object.__setattr__(self, "parents", tree.parents)
        for name, least in (("stragglers", 0), ("slices", 1), ("seed", 0)):
            value = _require.integer(name, getattr(self, name), least)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "code", _checked_code(self.code, tree))
        idle = tree.root if tree.size > 1 and self.root_computes is False else None
        speeds = _checked_speeds(self.speeds, tree.size, idle)
        object.__setattr__(self, "speeds", speeds)
        if not isinstance(self.root_computes, bool):
            raise TypeError(
                f"root_computes must be True or False, got {self.root_computes!r}"
            )
        if is_shared(self.code):
            self._check_shared(tree)
        most = max(map(len, tree.children))
        needed = _needed(self.code, self.stragglers, self.slices)
        if tree.size > 1 and needed > most:
            raise ValueError(
                f"stragglers={self.stragglers} and slices={self.slices} need a parent "
                f"with at least {needed} children, but no parent "
                f"has more than {most} (size={tree.size}): take fewer stragglers or "
                "slices, a larger fan-out or more ranks"
            )
        # builds every code now, so that an impossible one is an error here
        self.codings  # noqa: B018

    def _check_shared(self, tree: Tree) -> None:
        """Raise where work cannot be shared."""
        text = self.code
        if tree.depth > 1:
            raise ValueError(
                f"code={text!r} needs all workers right below the root, but this tree has "
                f"{tree.depth} layers below it: leave out fanout and parents, or take a code"
            )
        if self.slices > 1:
            raise ValueError(
                f"code={text!r} has no slices, got slices={self.slices}: leave it out"
            )
        if len(self.speeds):
            raise ValueError(
                f"code={text!r} finds out by itself how fast ranks are: leave speeds out"
            )
        placed = self.placement
        assert placed is not None
        # 1 is what it is where nobody says anything
        if tree.size > 1 and self.stragglers not in (1, placed.replicas):
            raise ValueError(
                f"stragglers={self.stragglers} contradicts code={text!r}: as many ranks as it "
                f"has replicas, {placed.replicas}, may be missing; give "
                f"replicas={self.stragglers}, or leave stragglers out"
            )
        object.__setattr__(self, "stragglers", placed.replicas)

    @functools.cached_property
    def placement(self) -> Placement | None:
        """Where the blocks of the batch lie if their work is shared, otherwise ``None``."""
        if not isinstance(self.code, str) or not is_shared(self.code):
            return None
        idle = self.root if not self.root_computes and self.size > 1 else None
        return placement(
            self.code, tuple(rank for rank in range(self.size) if rank != idle)
        )

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
        """The children of a rank in the order of the rows of its code; empty for a
        leaf."""
        coding = self.codings[rank]
        rows = () if coding is None else coding.rows
        return tuple(self.tree.children[rank][row] for row in rows)

    def speed(self, rank: int) -> Fraction:
        """How much of its own data a rank can hold, relative to the fastest one: 0 for
        a root without data. A rank alone computes."""
        if rank == self.root and not self.root_computes and self.size > 1:
            return Fraction(0)
        return self.speeds[rank] if self.speeds else Fraction(1)

    def code_parameters(self, rank: int) -> tuple[int, int]:
        """``s`` and ``m`` of a parent's code: what was asked for, or what its number of
        children allows."""
        if is_shared(self.code):
            return 0, 1  # its sums are those of all ranks
        children = len(self.tree.children[rank])
        slices = min(self.slices, children)
        lost = children - _needed(self.code_of(rank), 0, slices)
        return min(self.stragglers, lost), slices

    def code_of(self, rank: int) -> str:
        """The code asked for at a parent."""
        return self.code if isinstance(self.code, str) else self.code[rank]

    # Codes and capacities.

    @functools.cached_property
    def codings(self) -> tuple[Coding | None, ...]:
        """The coding of every rank, ``None`` at leaves."""
        return self._coded[0]

    @functools.cached_property
    def capacities(self) -> tuple[Fraction, ...]:
        """The size of the largest set that each rank's subtree can be assigned, in units
        of the fastest rank's load."""
        return self._coded[1]

    @functools.cached_property
    def _coded(self) -> tuple[tuple[Coding | None, ...], tuple[Fraction, ...]]:
        codings: list[Coding | None] = [None] * self.size
        capacities = list(map(self.speed, range(self.size)))
        for rank in reversed(self.tree.order):
            children = self.tree.children[rank]
            if not children:
                continue
            try:
                coding = coding_of(
                    tuple(capacities[c] for c in children),
                    *self.code_parameters(rank),
                    self.code_of(rank),
                    self.seed,
                )
            except ValueError as error:
                raise ValueError(
                    f"rank {rank} with its {len(children)} children: {error}"
                ) from None
            codings[rank] = coding
            capacities[rank] += coding.capacity
        return tuple(codings), tuple(capacities)

    @functools.cached_property
    def assigned(self) -> tuple[Fraction, ...]:
        """The size of the set that each rank's subtree is assigned, in units of the
        fastest rank's load: at most its capacity."""
        assigned = [Fraction(0)] * self.size
        assigned[self.root] = self.capacities[self.root]
        for rank in self.tree.order:
            coding = self.codings[rank]
            if coding is None:
                continue
            coded = assigned[rank] * coding.capacity / self.capacities[rank]
            for child, share in zip(self.coded_children(rank), coding.code.shares):
                assigned[child] = coded * share
        return tuple(assigned)

    @functools.cached_property
    def slices_above(self) -> tuple[int, ...]:
        """The number ``M`` of slices in each rank's message: the product of the slices
        of its ancestors' codes.

        A rank sends ``1/M`` of a gradient.
        """
        return self._product_above(lambda code: code.m)

    @functools.cached_property
    def parts_above(self) -> tuple[int, ...]:
        """The number ``P`` of vectors in each rank's message: the product of the parts
        of its ancestors' codes."""
        return self._product_above(lambda code: code.parts)

    @functools.cached_property
    def encoded(self) -> bool:
        """Whether messages are more than one weighted gradient each: shorter vectors
        (slices), or several (parts)."""
        return max(self.slices_above) > 1 or max(self.parts_above) > 1

    @property
    def approximate(self) -> bool:
        """Whether a parent may go on with an approximation of its sum."""
        return any(it is not None and it.code.approximate for it in self.codings)

    @property
    def padding_multiple(self) -> int:
        """Gradients are padded to a multiple of this many elements, so that every
        layer's slices divide them."""
        return math.lcm(*self.slices_above)

    def result_length(self, rank: int, length: int) -> int:
        """The length of a sum to which this rank contributes so many numbers."""
        return length // self.parts_above[rank] * self.slices_above[rank]

    def coefficients(
        self, rank: int, erased: Sequence[bool] | np.ndarray | None = None
    ) -> np.ndarray:
        """How a rank combines its children's messages: float64 ``(m, n · parts)`` over
        `coded_children` and the parts of each, ``(1, 0)`` at a leaf.

        Args:
            rank: whose coefficients.
            erased: bool ``(size,)``, the ranks whose messages are left out. Default
                none. Children that lack too many of theirs are left out, too; see
                `missing`. Where those that are left do not suffice, the least-squares
                coefficients; see `unrecoverable`.
        """
        coding = self.codings[rank]
        if coding is None:
            return np.zeros((1, 0))
        missing = np.zeros(self.size, bool) if erased is None else self.missing(erased)
        answered = ~missing[list(self.coded_children(rank))]
        return coding.code.decode(answered).coefficients

    def missing(self, erased: Sequence[bool] | np.ndarray) -> np.ndarray:
        """The ranks whose messages are missing without the erased ones: bool ``(size,)``.
        They are the erased ones, and every parent that lacks too many children, as it
        has no sum to send.

        Args:
            erased: bool ``(size,)``.

        Raises:
            ValueError: it has another shape.
        """
        missing = np.array(erased, bool)
        if missing.shape != (self.size,):
            raise ValueError(
                f"erasures must have shape ({self.size},), one for each rank, "
                f"got {missing.shape}"
            )
        for rank in reversed(self.tree.order):
            coding = self.codings[rank]
            if coding is not None and not missing[rank]:
                answered = ~missing[list(self.coded_children(rank))]
                missing[rank] = not coding.code.sufficient(answered)
        return missing

    def unrecoverable(self, erased: Sequence[bool] | np.ndarray) -> list[int]:
        """The parents that cannot rebuild their sums without the erased ranks, so that the
        root has none, the root first; empty if the plan can do without these ranks.

        Args:
            erased: bool ``(size,)``.

        Raises:
            ValueError: it has another shape.
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
        """Why the plan cannot do without the erased ranks, in words; empty if it can.

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
        """The number of children of ``rank`` that may be missing, whichever they are; 0
        for a leaf."""
        coding = self.codings[rank]
        return 0 if coding is None else coding.code.stragglers

    @property
    def load(self) -> Fraction:
        """``r``: the largest part of the batch that a rank computes.

        ``1 / c(root)`` where all ranks are equally fast, so ``1 / Σ_l (n/(s+m))^l`` on
        an (n, L)-regular tree (CodedReduce, for ``m = 1``).
        """
        if not self.speeds:
            return 1 / self.capacities[self.root]
        return max(self.load_of(rank) for rank in range(self.size))

    def load_of(self, rank: int) -> Fraction:
        """The part of the batch that a rank computes, before rounding to examples."""
        own = self.assigned[rank] * self.own_share(rank)
        return own / self.capacities[self.root]

    def own_share(self, rank: int) -> Fraction:
        """The part of what a rank's subtree is assigned that the rank computes itself;
        it codes the rest over its children."""
        return self.speed(rank) / self.capacities[rank]

    @functools.cached_property
    def checked(self) -> tuple[int, ...]:
        """The parents that can tell whether what their children send fits together,
        once all have answered: their code has redundancy, and the codes below are
        exact."""
        blurred = [False] * self.size  # what a rank sends may be approximate
        found = []
        for rank in reversed(self.tree.order):
            coding = self.codings[rank]
            if coding is None:
                continue
            below = any(blurred[child] for child in self.tree.children[rank])
            blurred[rank] = below or coding.code.approximate
            if not below and len(coding.code.parity_checks):
                found.append(rank)
        return tuple(sorted(found))

    @functools.cached_property
    def amplification(self) -> float:
        """How much rounding can grow on the way to the root: the largest product of the
        codes' ``κ`` down a path."""
        return float(max(self._product_above(lambda code: code.amplification)))

    def _product_above(self, number: Callable[[GradientCode], Any]) -> tuple[Any, ...]:
        """For each rank, the product of a number of the codes of its ancestors."""
        product = [1] * self.size
        for rank in self.tree.order:
            coding = self.codings[rank]
            if coding is not None:
                for child in self.tree.children[rank]:
                    product[child] = product[rank] * number(coding.code)
        return tuple(product)

    # Text.

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` makes an equal plan of it."""
        fields = dataclasses.asdict(self) | {
            "speeds": list(map(str, self.speeds)),
            "format": _FORMAT,
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Inverse of `to_json`.

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
        expected = [field.name for field in dataclasses.fields(cls)]
        _parse.fields("a plan", fields, dict.fromkeys(expected, object))
        for name, fits, wanted in (
            ("parents", _is_list_of(int), "a list of integers"),
            ("code", _is_code, "a text or a list of texts"),
            ("root_computes", lambda it: isinstance(it, bool), "true or false"),
            ("speeds", _are_speeds, 'a list of texts such as "7/20"'),
        ):
            if not fits(fields[name]):
                raise ValueError(
                    f"{name} must be {wanted}, got {_require.shown(fields[name])}"
                )
        code = fields["code"]
        return cls(
            **fields
            | {
                "parents": tuple(fields["parents"]),
                "code": code if isinstance(code, str) else tuple(code),
                "speeds": tuple(map(Fraction, fields["speeds"])),
            }
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the plan and of the values of its codes, equal wherever
        the plan means the same.

        Codes enter with 6 digits. Their last bits differ between linear algebra
        libraries; another draw differs more.
        """
        digest = hashlib.sha256(self.to_json().encode())
        for coding in dict.fromkeys(
            coding for coding in self.codings if coding is not None
        ):
            digest.update((np.round(coding.code.B, 6) + 0.0).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """The plan in words and a table: loads, unused capacity, message sizes,
        tolerance and κ of each layer."""
        return describe(self)


def make_plan(
    size: int,
    *,
    fanout: int | None = None,
    stragglers: int = 1,
    slices: int = 1,
    code: str | Mapping[int, str] | Sequence[str] = AUTO,
    root_computes: bool | None = None,
    seed: int = 0,
    speeds: Sequence[float | Fraction] | None = None,
    parents: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
) -> Plan:
    """Plan a coded tree reduction over ``size`` ranks.

    Args:
        size: number of ranks, the root included. One rank alone computes, uncoded. Two
            ranks need ``stragglers=0``.
        fanout: the largest number ``n`` of children of a parent; ``size = 1 + n + … +
            n^L`` gives the paper's regular tree. Default: the smallest one that reaches
            ``size`` at the smallest depth, with at most 8 children (or ``2 (s + m)``)
            to a parent.
        stragglers: ``s``, the number of children of every parent that may be missing.
            Where ``size`` and ``fanout`` leave a parent too few children for it, this
            parent tolerates as many as it can, and `Plan.describe` says so.
        slices: ``m``; every layer's messages are ``1/m`` as long as those above, at a
            load as if ``s + m − 1`` could be missing.
        code: ``"auto"`` (fractional repetition wherever it fits) or the text of a code
            such as ``"cyclic_repetition"`` or ``"bernoulli(load=4)"``, see
            `codes.named`, for every parent. Or one for each layer of parents, the
            root's first; or a mapping of ranks to codes, ``"auto"`` elsewhere. A
            parent with a tolerance of 0 and one slice is uncoded if the text of its
            code has no arguments. ``"shared(replicas=2, blocks=12)"`` is no code: every
            rank owns so many blocks of the batch, and so many others hold each of them
            and compute it if the owner is late (``docs/sharing.md``); then ``stragglers``
            and ``fanout`` are left out.
        root_computes: whether rank 0 holds data too. With a code no other rank can
            replace its work. Default: only where the work is shared.
        seed: of random codes; equal seeds give equal plans.
        speeds: relative speed of each rank; only ratios count, rounded to 1/1000 of
            the fastest. Every rank's load is in proportion, but no rank is assigned more
            than its parent's whole set: `Plan.describe` says where that is so. Default: all
            equal.
        parents: instead of ``fanout``, the parent of each rank, ``-1`` at the root.
        hosts: instead of ``fanout``, the name of each rank's host, for a tree that follows
            hosts: one rank of each is the root's child, and the others there its children.
            With all ranks on one host, the tree is what it would be without.

    Returns:
        A `Plan`.

    Raises:
        ValueError: the request is impossible. The message names the value and the
            remedy.
        TypeError: ``root_computes`` is not a bool.

    Example:
        >>> import jaxcoded
        >>> print(jaxcoded.make_plan(4, stragglers=1).describe())  # doctest: +ELLIPSIS
        4 ranks: root 0 (without data) and 3 workers in 1 layer; any 1 of...
    """
    size = _require.integer("size", size, 1)
    shared = is_shared(code)
    if root_computes is None:
        root_computes = shared
    if hosts is not None:
        if fanout is not None or parents is not None:
            raise ValueError(
                f"give hosts or {'parents' if fanout is None else 'fanout'}, not both"
            )
        if len(hosts) != size:
            raise ValueError(f"hosts has {len(hosts)} entries for size={size} ranks")
        if shared:
            raise ValueError(
                f"code={code!r} shares the work, so that all ranks are the root's children: "
                "leave out hosts"
            )
        if len(set(hosts)) > 1:
            parents = parents_by_host(hosts)
    if shared and fanout is None and parents is None:
        fanout = max(size - 1, 1)
    if parents is not None:
        if fanout is not None:
            raise ValueError("give fanout or parents, not both")
        if len(parents) != size:
            raise ValueError(
                f"parents has {len(parents)} entries for size={size} ranks"
            )
    elif size == 1:
        parents = (NO_PARENT,)
    else:
        stragglers = _require.integer("stragglers", stragglers, 0)
        slices = _require.integer("slices", slices, 1)
        needed = _needed(code, stragglers, slices)
        if size < needed + 1:
            raise ValueError(
                f"size={size} ranks are too few: stragglers={stragglers} and "
                f"slices={slices} need at least {needed + 1} ranks, a parent and "
                f"{needed} children; take more ranks, or "
                f"stragglers={max(0, stragglers - needed - 1 + size)}"
                + (" and slices=1" if size - 1 < slices else "")
            )
        if fanout is None:
            fanout = default_fanout(size, needed)
        if _require.integer("fanout", fanout, 1) < needed:
            raise ValueError(
                f"fanout={fanout} is too small: losing s={stragglers} of n children "
                f"with m={slices} slices needs n >= s + m = {needed}; take a larger "
                "fan-out, or fewer stragglers or slices"
            )
        parents = balanced_parents(size, min(int(fanout), size - 1), needed)
    return Plan(
        tuple(parents),
        stragglers,
        slices,
        _code_of_ranks(code, tuple(parents)),
        root_computes,
        seed,
        () if speeds is None else tuple(speeds),  # type: ignore[arg-type]  # the plan makes them fractions
    )


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    """Whether something is a list of such values; a bool is no int."""
    return lambda it: isinstance(it, list) and all(type(each) is kind for each in it)


def _is_code(it: Any) -> bool:
    return isinstance(it, str) or _is_list_of(str)(it)


def _are_speeds(it: Any) -> bool:
    """Fractions of 1000, as a plan keeps them."""
    return _is_list_of(str)(it) and all(
        re.fullmatch(r"[0-9]{1,4}(/[1-9][0-9]{0,3})?", each, re.ASCII) for each in it
    )


def _code_of_ranks(
    code: str | Mapping[int, str] | Sequence[str], parents: tuple[int, ...]
) -> str | tuple[str, ...]:
    """A code for all, layers or single ranks as one for all or one for each rank."""
    if isinstance(code, str):
        return code
    tree = Tree(parents)
    if isinstance(code, Mapping):
        unknown = sorted(set(code) - set(range(tree.size)))
        if unknown:
            raise ValueError(
                f"code names rank {unknown[0]}, but there are {tree.size} ranks"
            )
        return tuple(code.get(rank, AUTO) for rank in range(tree.size))
    if len(code) != tree.depth:
        raise ValueError(
            f"code has {len(code)} entries for {tree.depth} layers of parents"
        )
    return tuple(code[layer] if layer < tree.depth else AUTO for layer in tree.layers)


def _checked_code(code: str | Sequence[str], tree: Tree) -> str | tuple[str, ...]:
    texts = [code] if isinstance(code, str) else list(code)
    for text in texts:
        if text != AUTO and not (text is code and is_shared(text)):
            parsed(text)
    if isinstance(code, str):
        return code
    if len(texts) != tree.size:
        raise ValueError(f"code has {len(texts)} entries for {tree.size} ranks")
    inner = [text if kids else AUTO for text, kids in zip(texts, tree.children)]
    used = {text for text, kids in zip(texts, tree.children) if kids}
    return used.pop() if len(used) == 1 else tuple(inner)


def _checked_speeds(
    speeds: Sequence[Any], size: int, idle: int | None
) -> tuple[Fraction, ...]:
    """Relative to the fastest; empty where all are equal. That of a rank that computes
    nothing does not count."""
    if not len(speeds):
        return ()
    if len(speeds) != size:
        raise ValueError(f"speeds has {len(speeds)} entries for {size} ranks")
    for rank, speed in enumerate(speeds):
        if not _is_speed(speed):
            raise ValueError(
                f"speeds must be positive and finite, got {_require.shown(speed)} for rank "
                f"{rank}"
            )
    speeds = [
        Fraction(s if isinstance(s, int | Fraction) else float(s)) for s in speeds
    ]
    if idle is not None:
        speeds[idle] = max(speed for rank, speed in enumerate(speeds) if rank != idle)
    fastest = max(speeds)
    out = tuple(Fraction(round(speed / fastest * 1000), 1000) for speed in speeds)
    if min(out) == 0:
        slowest = speeds[out.index(min(out))]
        raise ValueError(
            "speeds must be at least 1/1000 of the fastest, got "
            f"{float(slowest):g} beside {float(fastest):g}"
        )
    return out if len(set(out)) > 1 else ()


def _is_speed(it: Any) -> bool:
    try:
        return 0 < float(it) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False


def _needed(
    code: str | Mapping[int, str] | Sequence[str], stragglers: int, slices: int
) -> int:
    """The number of children that a parent needs, with the least of these codes."""
    if not isinstance(code, str | Mapping | Sequence):
        raise TypeError(
            "code must be a text, a mapping of ranks to texts, or one text for each "
            f"layer, got {code!r}"
        )
    if is_shared(code):
        return 1
    texts = (
        [code]
        if isinstance(code, str)
        else list(code.values() if isinstance(code, Mapping) else code)
    )
    return min(
        (needed(text, stragglers, slices) for text in texts if text != AUTO),
        default=stragglers + slices,
    )
