"""The algebra that all codes have in common: a tensor ``B`` and its decoder."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxcoded import _require
from jaxcoded.codes import _blocks

# If there are more answered sets than this, they are sampled instead of enumerated.
MAX_SETS = 256
DECODINGS = ("exact", "least_squares", "one_step")
# The relative tolerance of a code's amplification limit. Without this tolerance, rounding
# errors could reject a set of messages that amplifies as much as the worst set that the
# code must tolerate.
_ROUNDING = 1e-3


class Decoding(NamedTuple):
    """The coefficients with which a parent rebuilds the sum from the children that
    answered.

    Attributes:
        coefficients: float64 ``(m, n)``, zero at children that did not answer; slice
            ``u`` of the sum is ``Σ_i coefficients[u, i] · message_i``. The shape is
            ``(m, n · parts)`` if children send several messages.
        residual: ``‖A·B − I‖₂`` (Frobenius), 0 up to rounding if the set is decodable.
            With least squares it is the distance from the exact sum, in units of one
            partition gradient.
    """

    coefficients: np.ndarray
    residual: float


@dataclasses.dataclass(frozen=True, eq=False)
class GradientCode:
    """A gradient code: which gradients each child adds up, and how the parent rebuilds the sum.

    A parent needs ``Σ_j g_j`` of ``k`` partition gradients with ``q`` numbers each.
    Each ``g_j`` is cut into ``m`` slices of ``q/m`` numbers, and child ``i`` of ``n``
    sends ``f_i = Σ_j Σ_u B[i, j, u] · g_j[slice u]``. From the answered set ``F`` the
    parent computes ``A`` (``m × n``, zero off ``F``) with ``Σ_i A[u, i] · B[i, j, v] =
    [u == v]`` for every ``j``.

    ``m = 1`` is Tandon et al. 2017 (arXiv 1612.03301); ``m > 1`` is Ye and
    Abbe 2018 (arXiv 1802.03475) and Kadhe et al. 2020 (arXiv 2005.07184).

    With several *parts* a child sends several messages one after the other. The parent
    may decode from only some parts of a child: the rows of ``B`` are pairs (child,
    part). With an *approximate* code the parent continues with any ``n−s`` children and
    approximates the sum.

    Args:
        B: float array ``(n · parts, k, m)``, or two-dimensional for ``m = 1``; row
            ``i · parts + p`` is part ``p`` of child ``i``. The code keeps a read-only
            float64 copy.
        stragglers: the number ``s`` of children of which any may be missing. For an
            exact code this number is checked with all patterns of missing children, or
            with 256 sampled patterns. If it is ``None``, the largest possible ``s`` is
            computed by enumeration.
        name: the code's name in ``Plan.describe()``.
        parts: ``P``, the number of messages of each child.
        sizes: ``k`` numbers, the relative sizes of the partitions. Default: all equal.
            The code keeps them as fractions that add up to 1.
        decoding: ``"exact"``; ``"least_squares"``, the best approximation; or
            ``"one_step"``, the same coefficient for all received messages, so that the
            coefficients of the partitions are 1 on average.
        promises: for a code with several parts, other sets of messages that suffice, in
            addition to all parts of any ``n−s`` children. A triple ``(late, parts,
            first)`` is the set in which any ``late`` children have sent their first
            ``first`` parts, and all other children their first ``parts`` parts.
            Promises are checked like ``stragglers``, and `amplification` includes them.

    Raises:
        ValueError: ``B`` has a wrong shape or entries that are not finite, or ``sizes``
            are not ``k`` numbers >= 0 with a sum above 0. Or the code cannot decode
            without some ``stragglers`` children, or from some set of a promise. Or a
            promise is not ``0 ≤ late ≤ n`` and ``0 ≤ first ≤ parts ≤ P``. Or, with
            ``stragglers=None``, there are too many patterns to try, or the code is not
            exact. Or ``"one_step"`` is given with slices or with a ``B`` that sums to 0
            or less.

    Two codes are equal if all their values except the name are equal.

    Example:
        A code of Tandon et al. for three children. Any one child may be missing.

        >>> import numpy as np
        >>> from jaxcoded import GradientCode
        >>> code = GradientCode(np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]]))
        >>> code.stragglers
        1
        >>> code.decode([True, True, False]).coefficients.round(6) + 0.0
        array([[ 2., -1.,  0.]])
    """

    B: np.ndarray
    stragglers: int = None  # type: ignore[assignment]  # never None after construction
    name: str = "custom"
    parts: int = 1
    sizes: tuple[Fraction, ...] = ()
    decoding: str = "exact"
    promises: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if np.iscomplexobj(self.B):
            raise ValueError("B must be real")
        # adding 0 turns -0.0 into 0.0, so that equal codes hash equally
        B = np.array(self.B, dtype=np.float64) + 0.0
        if B.ndim == 2:
            B = B[:, :, None]
        parts = _require.integer("parts", self.parts, 1)
        object.__setattr__(self, "parts", parts)
        if B.ndim != 3 or 0 in B.shape or len(B) % parts:
            raise ValueError(
                f"B must have shape (n{f' * {parts}' * (parts > 1)}, k, m) with no "
                f"axis empty, got {np.shape(self.B)}"
            )
        if not np.isfinite(B).all():
            raise ValueError("B has entries that are not finite")
        B.setflags(write=False)
        object.__setattr__(self, "B", B)
        object.__setattr__(
            self, "_decode", functools.lru_cache(maxsize=4096)(self._decode_uncached)
        )
        sizes = [Fraction(size) for size in self.sizes] or [Fraction(1)] * self.k
        if len(sizes) != self.k or min(sizes) < 0 or sum(sizes) <= 0:
            raise ValueError(
                f"sizes must be {self.k} numbers >= 0 with a sum above 0, got "
                f"{list(map(str, self.sizes))}"
            )
        total = sum(sizes, Fraction(0))
        object.__setattr__(self, "sizes", tuple(size / total for size in sizes))
        if self.decoding not in DECODINGS:
            raise ValueError(
                f"decoding must be one of {', '.join(DECODINGS)}, got {self.decoding!r}"
            )
        if self.decoding == "one_step" and (self.m > 1 or B.sum() <= 0):
            raise ValueError(
                "one-step decoding needs one slice and a B with a positive sum, got "
                f"m = {self.m} and the sum {B.sum():.3g}; take least_squares"
            )
        promises = tuple((late, some, first) for late, some, first in self.promises)
        for late, some, first in promises:
            if not (0 <= late <= self.n and 0 <= first <= some <= parts):
                raise ValueError(
                    f"a promise is (late, parts, first) with 0 <= late <= {self.n} and "
                    f"0 <= first <= parts <= {parts}, got {(late, some, first)}"
                )
        object.__setattr__(self, "promises", promises)
        if self.stragglers is None:
            if self.approximate:
                raise ValueError("an approximate code needs stragglers=")
            object.__setattr__(self, "stragglers", self._largest_tolerance())
        stragglers = _require.integer("stragglers", self.stragglers, 0, self.n - 1)
        object.__setattr__(self, "stragglers", stragglers)
        if not self.approximate and not self._answers[1].all():
            also = f", or from every set of its promises, {list(promises)}"
            raise ValueError(
                f"this B cannot be decoded from every {self.n - self.stragglers} of its "
                f"{self.n} children{also * bool(promises)}"
            )

    @property
    def n(self) -> int:
        """The number of children."""
        return self.B.shape[0] // self.parts

    @property
    def k(self) -> int:
        """The number of partitions."""
        return self.B.shape[1]

    @property
    def m(self) -> int:
        """The number of slices: a message is ``1/m`` as long as the gradient."""
        return self.B.shape[2]

    @property
    def approximate(self) -> bool:
        """Whether the parent continues with any ``n−s`` children, exact or not."""
        return self.decoding != "exact"

    @functools.cached_property
    def support(self) -> np.ndarray:
        """Bool ``(n, k)``: child ``i`` holds partition ``j``."""
        return (self.B != 0).reshape(self.n, self.parts, self.k, self.m).any((1, 3))

    @functools.cached_property
    def loads(self) -> np.ndarray:
        """Int ``(n,)``: the number of partitions each child holds."""
        return self.support.sum(axis=1)

    @functools.cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """The part of all examples that each child holds, from the partition sizes."""
        return tuple(
            sum((self.sizes[j] for j in np.flatnonzero(row)), Fraction(0))
            for row in self.support
        )

    def decodable(self, answered: Sequence[bool] | Sequence[int] | np.ndarray) -> bool:
        """Return whether the exact sum, apart from rounding, can be rebuilt from these
        children.

        Args:
            answered: bool ``(n,)``; or the indices of the children that answered; or
                bool ``(n, parts)``, the received parts.

        Raises:
            ValueError: ``answered`` has a wrong shape, or its indices are not distinct
                children.
            TypeError: ``answered`` has neither bools nor integers.
        """
        missing = ~self._answered(answered)
        return bool(self._solve(self._missing_classes(missing)[None])[1][0])

    def sufficient(self, answered: Sequence[bool] | Sequence[int] | np.ndarray) -> bool:
        """Return whether a parent continues with the messages of these children. With
        an exact code the set must be decodable. With an approximate code, at least
        ``n−s`` children must have answered with all their parts.

        In an exact code with several parts, a set outside the code's promises suffices only if its
        amplification is certainly at most ``κ``. The test uses the bound ``‖A‖ · ‖B‖``, which never grows when
        more messages arrive.

        Args:
            answered: as for `decodable`.
        """
        if not self.approximate:
            missing = self._missing_classes(~self._answered(answered))
            return self._exact(missing) is not None
        complete = self._answered(answered).reshape(self.n, self.parts).all(axis=1)
        return int(complete.sum()) >= self.n - self.stragglers

    def decode(self, answered: Sequence[bool] | Sequence[int] | np.ndarray) -> Decoding:
        """Return the coefficients that rebuild the sum from these children.

        Among equal rows of ``B`` (copies, as in fractional repetition), the parent uses
        the first row that answered, and the other rows get 0. If the set is
        `sufficient`, the result is the exact solution of least norm. If the set is not
        sufficient, it is the least-squares solution, with its residual. One-step
        decoding gives all received messages the same coefficient.

        The coefficients of an exact code with several parts never amplify by more than
        its ``κ``. If the solution for a sufficient set would amplify more, the set is
        decoded only from the messages of a promise. If a least-squares solution would
        amplify more, the result minimizes ``‖A·B − I‖²`` plus a multiple of ``‖A‖²``
        instead.

        Args:
            answered: as for `decodable`.

        Returns:
            A `Decoding`; its coefficients are read-only.

        Raises:
            ValueError, TypeError: as `decodable`.
        """
        return self._decode(self._answered(answered).tobytes())  # type: ignore[attr-defined]

    @functools.cached_property
    def amplification(self) -> float:
        """``κ = max_F max_{u,j} Σ_i |A[u,i]| · Σ_v |B[i,j,v]|``: the factor by which
        rounding can grow, 1 at best.

        The maximum is over all answered sets ``F`` that lack at most ``stragglers``
        children, and the sets of the `promises`. If there are more than 256 of these
        sets, the maximum is over a random sample of 256.
        """
        rows = self.B if self.approximate else self._rows.reshape(-1, self.k, self.m)
        return float(np.tensordot(self._decodings, np.abs(rows).sum(2), 1).max())

    @functools.cached_property
    def absolute_amplification(self) -> float:
        """``max_F max_u Σ_i |A[u,i]|`` over the same sets as `amplification`: the factor
        by which an error grows that is as large in all messages."""
        return float(self._decodings.sum(-1).max())

    @property
    def _decodings(self) -> np.ndarray:
        """``|A|``, float64 ``(sets, m, rows)``, for the sets of `amplification`."""
        if not self.approximate:
            return np.abs(self._answers[0])
        patterns = self._patterns(np.arange(self.n), self.stragglers, MAX_SETS)
        return np.abs([self.decode(answered).coefficients for answered in ~patterns])

    @functools.cached_property
    def amplification_limit(self) -> float:
        """The largest amplification that a sufficient set may have. It is infinite for
        approximate codes and for codes with one part. For codes with one part, ``κ``
        already covers all sets for which a parent waits, unless more than ``s`` children
        are dead or erased.
        """
        if self.parts == 1 or self.approximate:
            return math.inf
        return (1 + _ROUNDING) * self.amplification

    @functools.cached_property
    def parity_checks(self) -> np.ndarray:
        """``H``: float64 ``(rows − rank, n · parts)``, read-only. Let ``M`` be the
        matrix whose rows are the children's messages. If all children computed with the
        same gradients, ``H·M = 0``, whatever the gradients are. The rows of ``H`` span
        the left null space of ``B``. If ``H·M = 0``, all sufficient sets decode to the
        same sum.

        A row of ``H`` covers only children with common partitions, so an error in the
        row comes from one of these children. The rows of ``H`` are orthonormal after
        each message is expressed in a unit: the largest power of 2 that is at most the
        largest absolute entry of the message's row of ``B``. In these units,
        singular values of ``B`` below 1e-11 of the largest one count as 0, and entries of
        ``H`` below 1e-12 become 0.

        Example:
            >>> from jaxcoded import codes
            >>> codes.fractional_repetition(4, 1).parity_checks.astype(bool).astype(int)
            array([[1, 1, 0, 0],
                   [0, 0, 1, 1]])
        """
        silent = np.flatnonzero(~self.B.any(axis=(1, 2)))
        checks = [np.eye(len(self.B))[silent]]
        members = self._copies[1]
        scaled = (self.B / self._units[:, None, None]).reshape(len(self.B), -1)
        for _, copies in self._blocks:
            for classes in copies:
                rows = np.flatnonzero(np.isin(members, classes))
                null = _blocks.left_null_space(scaled[rows])
                checks.append(np.zeros((len(null), len(self.B))))
                checks[-1][:, rows] = null
        H = np.concatenate(checks)
        H[np.abs(H) < 1e-12] = 0.0
        H /= self._units
        H.setflags(write=False)
        return H

    @functools.cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray]:
        """The first two results of `_solve` for the sets in `_hardest`."""
        return self._solve(self._missing_classes(self._hardest()))[:2]

    @property
    def _value(self) -> tuple[Any, ...]:
        fields = (self.stragglers, self.parts, self.sizes, self.decoding, self.promises)
        return *fields, self.B.shape, self.B.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GradientCode):
            return NotImplemented
        return self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientCode, tuple(
            getattr(self, field.name) for field in dataclasses.fields(self)
        )

    # Decoding. Of several equal rows (copies), one row represents all. The reduced
    # matrix M is split into blocks, which are solved one by one.

    @property
    def classes(self) -> tuple[int, ...]:
        """The class of each row of ``B``; one of the equal rows of a class suffices."""
        return tuple(self._copies[1].tolist())

    @functools.cached_property
    def _copies(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each class of equal rows, and the class of each row."""
        first, classes = _blocks.alike(self.B.reshape(len(self.B), -1))
        order = np.argsort(first)
        return first[order], np.argsort(order)[classes]

    def _missing_classes(self, missing: np.ndarray) -> np.ndarray:
        """Return which classes have only missing rows, bool ``(..., classes)``."""
        first, classes = self._copies
        order = np.argsort(classes, kind="stable")
        starts = np.searchsorted(classes[order], np.arange(len(first)))
        return np.logical_and.reduceat(missing[..., order], starts, axis=-1)

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """``M``: one row ``(k·m,)`` for each class of copies, in units of `_units`."""
        first = self._copies[0]
        return self.B[first].reshape(len(first), -1) / self._units[first, None]

    @functools.cached_property
    def _units(self) -> np.ndarray:
        """The unit of each message, a power of 2, so that no set of messages looks
        singular only because their scales differ."""
        _, exponents = np.frexp(np.abs(self.B).max(axis=(1, 2)))
        return np.ldexp(1.0, exponents - 1)

    @functools.cached_property
    def _blocks(self) -> list[tuple[_blocks.Block, np.ndarray]]:
        """The different blocks of ``M``, and the classes of each of their copies."""
        return _blocks.blocks(self._rows.reshape(-1, self.k, self.m))

    def _solve(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays for missing classes, bool ``(sets, classes)``: ``A``
        ``(sets, m, classes)``, for which sets it is exact, and a bound on its
        amplification for each set."""
        A = np.zeros((len(missing), self.m, missing.shape[1]))
        exact = np.full(len(missing), self.support.any(axis=0).all())
        bounds = np.zeros(len(missing))
        for block, rows in self._blocks:
            patterns = missing[:, rows].reshape(-1, rows.shape[1])
            first, which = _blocks.alike(patterns)
            which = which.reshape(len(missing), len(rows))
            each, decoded = block.solve(patterns[first])
            A[:, :, rows] = each[which].swapaxes(1, 2)
            exact &= decoded[which].all(axis=1)
            bounds = np.maximum(bounds, block.bound(each)[which].max(axis=1))
        return A, exact, bounds

    def _exact(self, missing: np.ndarray) -> np.ndarray | None:
        """Return an ``A`` ``(m, classes)`` that gives the exact sum within the code's
        amplification without the missing classes, or None if there is none."""
        (A,), (exact,), (bound,) = self._solve(missing[None])
        if not exact:
            return None
        if bound <= self.amplification_limit:
            return A
        enough = self._promised(missing)
        if enough is None:
            return None
        return A if (enough != missing).all() else self._solve(~enough[None])[0][0]

    def _promised(self, missing: np.ndarray) -> np.ndarray | None:
        """Return the classes that a promise needs, bool ``(classes,)``, for the first
        promise and the first children of which all these classes are present."""
        heard = ~missing[self._copies[1]].reshape(self.n, self.parts)
        came = np.logical_and.accumulate(heard, axis=1).sum(axis=1)
        for late, parts, first in self._all_promises:
            others = np.flatnonzero(came >= parts)[: self.n - late]
            if len(others) == self.n - late and came.min() >= first:
                needed = np.full(self.n, first)
                needed[others] = parts
                return ~self._missing_classes(self._beyond(needed))
        return None

    @property
    def _all_promises(self) -> tuple[tuple[int, int, int], ...]:
        return (*self.promises, (self.stragglers, self.parts, 0))

    def _beyond(self, parts: np.ndarray) -> np.ndarray:
        """Return the rows after each child's first ``parts`` parts, bool ``(..., rows)``."""
        out = np.arange(self.parts) >= parts[..., None]
        return out.reshape(*parts.shape[:-1], len(self.B))

    def _decode_uncached(self, answered: bytes) -> Decoding:
        mask = np.frombuffer(answered, bool)
        one_step = self.decoding == "one_step"
        coefficients = self._one_step(mask) if one_step else self._best(mask)
        coefficients.setflags(write=False)
        error = np.tensordot(coefficients, self.B, 1) - np.eye(self.m)[:, None]
        return Decoding(coefficients, float(np.linalg.norm(error)))

    def _best(self, mask: np.ndarray) -> np.ndarray:
        """Return the exact coefficients, or the coefficients with the least residual."""
        missing = self._missing_classes(~mask)
        reduced = self._exact(missing)
        if reduced is None:
            reduced = np.zeros((self.m, len(missing)))
            for block, copies in self._blocks:
                for rows in copies:
                    reduced[:, rows] = block.best(
                        missing[rows], self.amplification_limit
                    )
        coefficients = np.zeros((self.m, len(self.B)))
        answered = np.flatnonzero(mask)
        heard, first = np.unique(self._copies[1][answered], return_index=True)
        rows = answered[first]
        coefficients[:, rows] = reduced[:, heard] / self._units[rows]
        return coefficients

    def _one_step(self, mask: np.ndarray) -> np.ndarray:
        mass = self.B.sum() / len(self.B) * mask.sum()
        return np.where(mask, self.k / mass if mask.any() else 0.0, 0.0)[None]

    # Sets of children.

    def _answered(
        self, answered: Sequence[bool] | Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return the answered rows, bool ``(rows,)``."""
        given = np.asarray(answered)
        if given.dtype == bool:
            if given.shape == (self.n, self.parts):
                return given.reshape(-1)
            if given.shape != (self.n,):
                or_parts = f" or ({self.n}, {self.parts})" * (self.parts > 1)
                raise ValueError(
                    f"answered must have shape ({self.n},){or_parts}, got {given.shape}"
                )
            return given.repeat(self.parts)
        mask = np.zeros(self.n, bool)
        if given.size:
            if not np.issubdtype(given.dtype, np.integer) or given.ndim != 1:
                raise TypeError(
                    f"answered must be a bool array or a list of child indices, got {answered!r}"
                )
            distinct = len(set(given.tolist())) == len(given)
            if not (distinct and 0 <= given.min() and given.max() < self.n):
                raise ValueError(
                    f"answered must be a bool array or distinct children from "
                    f"0 to {self.n - 1}, got {answered!r}"
                )
            mask[given] = True
        return mask.repeat(self.parts)

    def _hardest(self) -> np.ndarray:
        """The hardest sets of missing messages that the code must tolerate, bool
        ``(sets, rows)``, or a sample of more than 256 sets."""
        promises = sorted(set(self._all_promises))
        out, most = [], MAX_SETS
        for left, (late, parts, first) in zip(range(len(promises), 0, -1), promises):
            missing = self._hardest_patterns(late, max(1, most // left))
            most -= len(missing)
            out.append(self._beyond(np.where(missing, first, parts)))
        return np.concatenate(out)

    def _hardest_patterns(self, late: int, most: int) -> np.ndarray:
        """Return the hardest patterns of at most ``late`` children, bool ``(sets, n)``.
        Blocks are decoded one by one, so patterns in one block of each kind suffice."""
        if _count(self.n, late) <= most:
            return self._patterns(np.arange(self.n), late, most)
        holds = np.zeros((self.n, len(self._copies[0])), bool)
        holds[np.arange(len(self.B)) // self.parts, self._copies[1]] = True
        kinds = {}
        for kind, (_, copies) in enumerate(self._blocks):
            for rows in copies:
                children = np.flatnonzero(holds[:, rows].any(axis=1))
                which = holds[np.ix_(children, rows)].tobytes()
                kinds[kind, len(children), which] = children
        each = max(1, most // max(1, len(kinds)))
        return np.concatenate(
            [self._patterns(children, late, each) for children in kinds.values()]
            or [np.zeros((1, self.n), bool)]
        )

    def _patterns(self, children: np.ndarray, late: int, most: int) -> np.ndarray:
        """Return all sets of at most ``late`` of these children, bool ``(sets, n)``, or
        ``most`` random sets of exactly ``late`` children if there are more sets."""
        if _count(len(children), late) <= most:
            sizes = range(late + 1)
            sets = [E for e in sizes for E in itertools.combinations(children, e)]
        else:
            rng = np.random.default_rng(0)
            sets = [rng.permutation(children)[:late].tolist() for _ in range(most)]
        return _masks(self.n, sets)

    def _largest_tolerance(self) -> int:
        for s in range(self.n):
            if math.comb(self.n, s) > 20_000:
                raise ValueError(
                    f"finding the tolerance of a code with n = {self.n} needs more "
                    "than 20,000 patterns; pass stragglers="
                )
            children = _masks(self.n, itertools.combinations(range(self.n), s))
            rows = children.repeat(self.parts, axis=1)
            if not self._solve(self._missing_classes(rows))[1].all():
                if s == 0:
                    raise ValueError(
                        "this B cannot be decoded even when every child answers"
                    )
                return s - 1
        return self.n - 1


def _count(children: int, late: int) -> int:
    """Return the number of patterns of at most ``late`` of ``children`` children."""
    return sum(math.comb(children, e) for e in range(late + 1))


def _masks(n: int, sets: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the sets as bool ``(sets, n)``."""
    each = np.eye(n, dtype=bool)
    return np.array([each[list(children)].any(axis=0) for children in sets])
