import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from jaxcoded import _require
from jaxcoded.codes._named import parsed
from jaxcoded.plan.code_tree import CodeTree
from jaxcoded.plan.parent_code import AUTO
from jaxcoded.plan.tree import Tree


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Coded(CodeTree):
    """A tree of ranks with a gradient code at each parent. A parent of ``n`` children
    rebuilds their sum from the messages of any ``n − stragglers`` children.

    This generalises CodedReduce (Reisizadeh et al. 2021, arXiv 1902.01981) and gradient
    coding (Tandon et al. 2017) to any tree, to slices and to unequal ranks
    (``docs/theory.md``).

    Attributes:
        stragglers: ``s``, the number of children of every parent that may be missing. A
            parent with too few children tolerates as many missing children as it can;
            `Plan.describe` names such parents.
        fanout: the largest number ``n`` of children of a parent; ``size = 1 + n + … +
            n^L`` gives the regular tree of CodedReduce. Default: the smallest fan-out
            with which a tree of the smallest depth has ``size`` ranks. No parent then
            has more than 8 or ``2 (s + m)`` children, whichever is larger.
        code: the code of every parent: ``"auto"`` (fractional repetition if it fits) or
            the text of a code such as ``"cyclic_repetition"`` or ``"bernoulli(load=4)"``,
            see `codes.named`. Or a list with one code for each layer of parents, the
            root's first; or a mapping of ranks to codes, with ``"auto"`` for the other
            ranks. If the text of a parent's code has no arguments, and the parent has
            tolerance 0 and one slice, the parent is uncoded.
        slices: ``m``, the number of slices; every layer's messages are ``1/m`` as long
            as the messages of the layer above. The load is the same as without slices
            for ``s + m − 1`` stragglers.
        root_computes: whether the root also holds data. No other rank can replace the
            root's work.
        speeds: relative speed of each rank; only ratios count, rounded to 1/1000 of the
            fastest. Every rank's load is proportional to its speed. But no rank is
            assigned more than the whole set of its parent's children; `Plan.describe`
            names ranks whose load is limited in this way. Default: all ranks are
            equally fast.
        by_host: whether the tree follows hosts; give this instead of ``fanout``. One
            rank of each host is then the root's child, and the host's other ranks are
            the children of this rank. If all ranks are on one host, this has no effect.
        seed: the seed of random codes; equal seeds give equal plans.
        parents: the parent of each rank, ``-1`` at the root; give this instead of
            ``fanout``.

    Raises:
        ValueError: an argument is invalid. The message names the value and the remedy.
        TypeError: ``root_computes`` or ``by_host`` is not a bool, or ``code`` is not a
            text.

    Example:
        >>> import jaxcoded
        >>> print(jaxcoded.make_plan(4, jaxcoded.Coded(stragglers=1)).describe())  # doctest: +ELLIPSIS
        4 ranks: root 0 (without data) and 3 workers in 1 layer; any 1 of...
    """

    stragglers: int = 1
    fanout: int | None = None
    code: Any = AUTO
    slices: int = 1
    root_computes: bool = False
    speeds: tuple[Fraction, ...] | None = None
    by_host: bool = False
    seed: int = 0
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("stragglers", 0), ("slices", 1), ("seed", 0)):
            value = _require.integer(name, getattr(self, name), least)
            object.__setattr__(self, name, value)
        _require.boolean("by_host", self.by_host)
        object.__setattr__(self, "code", _checked_code(self.code))
        if self.parents is not None:
            try:
                parents = Tree(tuple(self.parents)).parents
            except TypeError:
                raise ValueError(
                    f"parents must be the parent of each rank, got {_require.shown(self.parents)}"
                ) from None
            object.__setattr__(self, "parents", parents)
        trees = {"fanout": self.fanout, "parents": self.parents}
        given = [name for name, value in trees.items() if value is not None]
        given += ["by_host"] * self.by_host
        if len(given) > 1:
            raise ValueError(f"give {' or '.join(given)}, not both")
        super().__post_init__()

    @property
    def fields(self) -> dict[str, Any]:
        code = {"code": dict(self.code)} if self._names_ranks else {}
        return super().fields | code


def _checked_code(code: Any) -> str | tuple[Any, ...]:
    """Return a text, one text for each layer, or pairs of a rank and a text."""
    if isinstance(code, Mapping):
        # in JSON all keys are texts
        ranks = {int(k) if str(k).isdecimal() else k: text for k, text in code.items()}
        pairs = [(_require.integer("code", rank, 0), ranks[rank]) for rank in ranks]
        texts: tuple[Any, ...] = tuple(text for _, text in pairs)
        made: str | tuple[Any, ...] = tuple(sorted(pairs))
    elif isinstance(code, Sequence) and not isinstance(code, str):
        made = texts = tuple(code)
        if texts and all(isinstance(each, tuple) for each in texts):
            return _checked_code(dict(texts))  # `dataclasses.replace` passes pairs
    else:
        made, texts = code, (code,)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            "code must be a text, a mapping of ranks to texts, or one text for each "
            f"layer, got {_require.shown(code)}"
        )
    for text in texts:
        if text != AUTO:
            parsed(text)
    return made
