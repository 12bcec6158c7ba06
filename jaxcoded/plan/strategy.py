from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxcoded import _parse, _require
from jaxcoded.plan.placement import NOTHING, Placement

if TYPE_CHECKING:
    from jaxcoded.plan.parent_code import Coding
    from jaxcoded.plan.plan import Plan
    from jaxcoded.plan.tree import Tree

Assigned = tuple[np.ndarray, np.ndarray]  # indices of examples, and their weights
_KINDS: dict[str, type[Strategy]] = {}


class Strategy(abc.ABC):
    """The way to divide the work of a step: `Shared`, `Coded` or `Uncoded`.

    A strategy does not depend on the number of ranks; `make_plan` and `CodedGroup` make
    a `Plan` from it. Its `repr` names the fields that differ from their defaults, and is
    valid Python.

    Attributes:
        by_blocks: whether ranks compute each other's blocks, which are assigned during
            the round. This needs the engine.
        by_host: whether the tree follows hosts.
        speeds: relative speed of each rank, in multiples of 1/1000; the fastest rank
            has speed 1. ``None``: all ranks are equally fast.
        root_computes: whether the root holds data.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.Coded(stragglers=2, fanout=4), jaxcoded.Shared(blocks=6)
        (Coded(stragglers=2, fanout=4), Shared(blocks=6))
        >>> jaxcoded.Strategy.parse("Coded(stragglers=2)") == jaxcoded.Coded(stragglers=2)
        True
    """

    by_blocks: ClassVar[bool] = False
    by_host: bool = False
    speeds: tuple[Fraction, ...] | None = None
    root_computes: bool = True

    def __init_subclass__(cls, *, named: bool = True) -> None:
        if named:
            _KINDS[cls.__name__] = cls

    # The functions that define a plan: its tree, codes and blocks, and the examples of
    # each rank. Each raises a ValueError with the remedy if the strategy does not fit.

    @property
    def root(self) -> int:
        """The rank without a parent."""
        return 0

    @abc.abstractmethod
    def parents_of(self, size: int, hosts: Sequence[str] | None) -> tuple[int, ...]:
        """Return the parent of each of ``size`` ranks, ``-1`` at the root."""

    @abc.abstractmethod
    def check(self, tree: Tree) -> None:
        """Raise a ValueError unless the strategy fits a tree."""

    @abc.abstractmethod
    def coding(self, tree: Tree, rank: int, capacities: tuple[Fraction, ...]) -> Coding:
        """Return the coding of a parent whose children have these capacities."""

    def placement(self, size: int) -> Placement:
        """Return the placement of a batch's blocks. Strategies with codes have none."""
        del size
        return NOTHING

    @abc.abstractmethod
    def describe(self, plan: Plan) -> str:
        """Return the plan as text."""

    @abc.abstractmethod
    def loads(self, plan: Plan, batch_size: int) -> np.ndarray:
        """Return the number of distinct examples that each rank computes, int64 ``(size,)``.

        If the partitions of each child are cyclically consecutive, no rank's number exceeds ``⌈load · batch_size⌉`` by
        more than the depth of the tree. With block designs, expanders and random approximate codes, a rank's number
        exceeds it by less than one example for each partition that the rank holds.
        """

    @abc.abstractmethod
    def shares(self, plan: Plan, rank: int, batch_size: int) -> Assigned:
        """Return the examples of one rank, int64 ``(load,)``, and their coefficients in its message, float64 ``(load,
        P, M)`` with ``P = plan.parts_above[rank]`` and ``M = plan.slices_above[rank]``. For every example ``e``, this
        rank adds ``Σ_u coefficients[e, p, u] · gradient_e[slice u of M]`` to part ``p``.
        """

    @abc.abstractmethod
    def assignment(self, plan: Plan, rank: int, batch_size: int) -> Assigned:
        """Return the examples that one rank reads, int64 ``(length,)``, and their coding weights. All ranks'
        examples are padded to one length, or with unequal speeds to a separate length for each rank. Padding repeats
        one of the rank's own examples (example 0 on a rank without data) with weight 0.

        With shared work, weights are 1 for the examples of the rank's own blocks, which come first, and 0 for examples
        that it holds for other ranks. Without slices and parts, the weights are factors of the examples' losses.
        Otherwise they are ``(chunks, length // chunks, P · M)``: the coefficients of the ``M`` slices of each
        example's gradient in the ``P`` parts of the message. These coefficients are equal within a chunk, except for
        padding. The number of chunks is a multiple of ``P``. Part ``p`` is complete after the first ``(p + 1) / P``
        of the chunks.
        """

    @abc.abstractmethod
    def bounds(self, plan: Plan) -> tuple[Fraction, ...]:
        """Return the positions that cut a batch of length 1 into its atoms."""

    @abc.abstractmethod
    def cuts(self, plan: Plan, batch_size: int) -> list[np.ndarray]:
        """Return the positions at which a batch of examples is cut into its atoms, in
        increasing order. Each array has the positions of one run of atoms that are
        assigned together, and begins with the last position of the previous array.
        """

    # Which features the groups of a strategy support.

    def require_blocks(self, what: str) -> None:
        """Raise a ValueError unless ranks share blocks, as the feature ``what`` needs."""
        if not self.by_blocks:
            raise ValueError(
                f"{what} needs a group that shares its work, but this group has {self!r}: make the group "
                "with CodedGroup(comm, Shared(replicas=2))"
            )

    def refuse(self, given: str) -> None:
        """Raise a ValueError if calls cannot take ``given``: "erasures" or "residual"."""

    @abc.abstractmethod
    def why_not_split(self, plan: Plan) -> str:
        """Return why devices cannot split a rank's examples, or an empty text."""

    @abc.abstractmethod
    def why_not_compared(self, plan: Plan, wait: bool | str) -> str:
        """Return why a group cannot have a `Check` with this ``wait``, or an empty text."""

    def gaps(self, plan: Plan) -> str:
        """Return which mistakes a ``check`` cannot detect, or an empty text."""
        del plan
        return ""

    # Replacements.

    @abc.abstractmethod
    def with_speeds(self, speeds: Sequence[Any]) -> Strategy:
        """Return this strategy with these speeds of the ranks. Raise a ValueError if
        the strategy does not accept speeds."""

    def for_others(self, speeds: Sequence[Fraction]) -> Strategy:
        """Return this strategy for other ranks, which have these speeds. Raise a
        ValueError if the strategy fits only its own ranks."""
        return self.with_speeds(speeds) if speeds or self.speeds else self

    # Texts.

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as values that JSON has, too."""
        strategy: Any = self  # every strategy is a dataclass
        return {
            each.name: _plain(value)
            for each in dataclasses.fields(strategy)
            if (value := getattr(self, each.name)) != each.default
        }

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.fields.items())
        return f"{type(self).__name__}({arguments})"

    def to_json(self) -> str:
        """Return the strategy as JSON text for `from_json`."""
        fields = {"strategy": type(self).__name__} | self.fields
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Strategy:
        """Return the strategy from a text of `to_json`. Raise a ValueError for any other."""
        fields = _parse.document(text)
        name = fields.pop("strategy", None) if isinstance(fields, dict) else None
        if name not in list(_KINDS):
            raise ValueError(
                f"a strategy must be a JSON object whose field 'strategy' is one of "
                f"{', '.join(_KINDS)}, got {_require.shown(text)}"
            )
        return _made("strategy", name, f"{name}(...)", fields)

    @staticmethod
    def parse(text: str, what: str = "strategy") -> Strategy:
        """Return the strategy that a text names, such as ``"Shared"`` or
        ``"Coded(stragglers=1, fanout=3)"``, in the form of a strategy's `repr`.
        Arguments must be literals. Raise a ValueError if the text does not name a
        strategy, or names an impossible strategy. The error's message calls the text
        ``what``.
        """
        name, given = _parse.parsed(what, text, _KINDS)
        return _made(what, name, text, given)


def check_strategy(value: Any) -> Strategy:
    """Return ``value``. Raise a TypeError with the remedy if it is not a strategy."""
    if isinstance(value, Strategy):
        return value
    meant = f": take jaxcoded.Strategy.parse({value!r})" * isinstance(value, str)
    if isinstance(value, type) and issubclass(value, Strategy):
        meant = f": take jaxcoded.{value.__name__}()"
    raise TypeError(
        "strategy must be jaxcoded.Shared(replicas=1), jaxcoded.Coded(stragglers=1), "
        f"jaxcoded.Uncoded() or the like, got {_require.kind(value)}{meant}"
    )


def _made(what: str, name: str, text: str, given: Mapping[str, Any]) -> Strategy:
    _parse.check_arguments(what, text, _KINDS[name], given)
    try:
        return _KINDS[name](**given)
    except (TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"{what}={_require.shown(text)}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value
