"""The coding of one parent: its code, the sizes of the partitions, and the capacity."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxcoded import codes
from jaxcoded.codes import GradientCode
from jaxcoded.codes._load import check_size
from jaxcoded.codes._named import parsed

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Coding:
    code: GradientCode  # a `GradientCode` over the children
    # for each row of the code, the child's number: its position among the parent's children in
    # rank order
    rows: tuple[int, ...]
    # ``Q``, the size of the largest set that the children can be assigned, in units of one rank's load
    capacity: Fraction

    @property
    def copies(self) -> int:
        """The number of children that send the same message, of which one suffices."""
        code = self.code
        alike = np.bincount(code.classes)
        # With an approximate code a parent waits for any n − s children, whether or not
        # they send copies.
        copied = not code.approximate and len(alike) < code.n
        return int(alike[0]) if copied and len(set(alike.tolist())) == 1 else 1

    @property
    def needs(self) -> int:
        """The number of messages that suffice, with copies counted once; ``n − s`` for
        codes with which it also matters which messages have arrived."""
        code, copies = self.code, self.copies
        return code.n // copies if copies > 1 else code.n - code.stragglers

    def cuts(self, size: Fraction, *, whole: bool) -> list[Fraction]:
        """Return the positions, from 0 to ``size``, at which a set of this size is cut
        into the ``k`` partitions. With ``whole``, the set consists of examples, which
        cannot be cut. The size of a cyclic run of partitions then differs from its
        exact size by less than 1.
        """
        sums = itertools.accumulate(self.code.sizes, initial=Fraction(0))
        ends = [end * size for end in sums]
        return [Fraction(math.floor(end)) for end in ends] if whole else ends


def largest_coded_set(capacities: Sequence[Fraction], holders: int) -> Fraction:
    """Return the largest ``Q`` with ``Σ_i min(c_i, Q) = holders · Q``: the size of the
    largest set whose examples can each be on ``holders`` distinct children."""
    row = np.array([capacities], object)
    return largest_coded_sets(row, np.array([len(capacities)]), np.array([holders]))[0]


def largest_coded_sets(
    capacities: np.ndarray, counts: np.ndarray, holders: np.ndarray
) -> np.ndarray:
    """Return the `largest_coded_set` of many parents, ``(parents,)``.

    For some ``j``, replace the ``j`` largest capacities by ``Q``, and add up all
    capacities. The smallest of these sums, over all ``j``, is the sum of ``min(c, Q)``. So
    ``Q`` is the smallest of ``(sum of all but the j largest) / (holders − j)`` over ``j <
    holders``. ``counts`` are the numbers of children. ``capacities`` have the shape
    ``(parents, most children)``; rows with fewer children end with infinities.
    """
    ordered = np.sort(capacities, axis=1)
    ordered[ordered == np.inf] = 0
    total = np.cumsum(ordered, axis=1)
    rows = np.arange(len(counts))
    holders = np.minimum(holders, counts)
    best = total[rows, counts - 1] / holders
    for j in range(1, int(holders.max())):
        some = rows[j < holders]
        rest = total[some, counts[some] - j - 1] / (holders[some] - j)
        best[some] = np.minimum(best[some], rest)
    return best


def uncoded(capacities: tuple[Fraction, ...], name: str = "uncoded") -> Coding:
    """Return the coding of children that each hold one partition."""
    n = len(capacities)
    code = dataclasses.replace(codes.uncoded(n), name=name, sizes=capacities)
    return Coding(code, tuple(range(n)), sum(capacities, Fraction(0)))


@functools.lru_cache(maxsize=1024)
def coding_of(
    capacities: tuple[Fraction, ...], stragglers: int, slices: int, kind: str, seed: int
) -> Coding:
    """Return the coding of a parent whose children have these capacities, in rank order
    and in units of one rank's load. Raise a ValueError if there is no such code.

    ``kind`` is the text of a code (see `codes.named`) or ``"auto"``. ``"auto"`` selects
    fractional repetition if this wastes no capacity. If it would waste capacity,
    ``"auto"`` selects cyclic repetition for children of equal capacity, and a random
    generator for other children. Parents with equal children have equal codes, since
    ``seed`` is the only other input.
    """
    n = len(capacities)
    check_size(n, n, slices)
    plain = kind == AUTO or not parsed(kind)[1]
    if stragglers == 0 and slices == 1 and plain:
        return uncoded(capacities)
    largest = largest_coded_set(capacities, stragglers + slices)
    if kind == AUTO and slices == 1 and n % (stragglers + 1) == 0:
        repetition = _fractional_repetition(capacities, stragglers)
        if repetition.capacity == largest:
            return repetition
    if kind == "fractional_repetition" and slices == 1:
        return _fractional_repetition(capacities, stragglers)
    if kind == AUTO:
        cyclic = slices == 1 and len(set(capacities)) == 1
        kind = "cyclic_repetition" if cyclic else "random_generator"
    if kind == "random_generator":
        support, sizes = _wrap_around([min(c, largest) / largest for c in capacities])
        code = codes.random_generator(n, stragglers, slices, support=support, seed=seed)
        code = dataclasses.replace(code, sizes=sizes)
        return Coding(code, tuple(range(n)), largest)
    code = codes.named(kind, n, stragglers, slices, seed=seed)
    # children with larger capacities get the rows with more partitions
    children = sorted(range(n), key=lambda child: -capacities[child])
    by_load = sorted(range(n), key=lambda row: -code.shares[row])
    rows = tuple(child for _, child in sorted(zip(by_load, children)))
    capacity = min(
        capacities[child] / share for child, share in zip(rows, code.shares) if share
    )
    return Coding(code, rows, capacity)


def _fractional_repetition(capacities: Sequence[Fraction], stragglers: int) -> Coding:
    """Return the coding with groups of children of similar capacity. Each group is
    assigned as much as its child with the least capacity can hold."""
    n, copies = len(capacities), stragglers + 1
    code = codes.fractional_repetition(n, stragglers)
    rows = tuple(sorted(range(n), key=lambda child: -capacities[child]))
    weakest = [capacities[rows[first + copies - 1]] for first in range(0, n, copies)]
    sizes = tuple(c for c in weakest for _ in range(copies))
    code = dataclasses.replace(code, sizes=sizes)
    return Coding(code, rows, sum(weakest, Fraction(0)))


def _wrap_around(shares: Sequence[Fraction]) -> tuple[np.ndarray, tuple[Fraction, ...]]:
    """Lay shares (each ≤ 1, adding up to an integer h) end to end on a circle of length
    1. Return the bool support ``(n, k)`` and the ``k`` sizes of the partitions.

    The shares of exactly ``h`` distinct children cover each point of the circle
    (McNaughton's rule). The partitions are the arcs between the ends of shares. There
    are at most ``n`` of them."""
    ends = list(itertools.accumulate(shares, initial=Fraction(0)))
    cuts = sorted({end % 1 for end in ends} | {Fraction(1)})
    support = np.zeros((len(shares), len(cuts) - 1), bool)
    for child, (start, end) in enumerate(itertools.pairwise(ends)):
        for j, cut in enumerate(cuts[:-1]):
            # Move the cut around the circle to its first place at or after the start of
            # the share.
            turns = -((cut - start) // 1)
            support[child, j] = start <= cut + turns < end
    return support, tuple(end - start for start, end in itertools.pairwise(cuts))
