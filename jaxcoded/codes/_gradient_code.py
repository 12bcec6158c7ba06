"""The one algebra behind every scheme: a tensor ``B`` and its decoder."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcoded import _require

# A decoding counts as exact when no entry of A·B − I misses by more than this. Exact
# float64 solves of the codes that we accept (amplification · eps ≤ 1e-3, mostly far
# below) come out near amplification · 1e-16, and sets that cannot be decoded miss by
# about 1/√k or more.
_EXACT = 1e-6
# Singular values below this fraction of the largest one are zero.
_RANK = 1e-11
# Answered sets beyond this number are sampled instead of enumerated.
MAX_SETS = 256


class Decoding(NamedTuple):
    """How a parent rebuilds the sum from the children that answered.

    Attributes:
        coefficients: float64 ``(m, n)``, zero at children that did not answer; slice
            ``u`` of the sum is ``Σ_i coefficients[u, i] · message_i``.
        residual: ``‖A·B − I‖₂`` (Frobenius), 0 up to rounding where the set is
            decodable. In the least-squares case it is the distance from the exact sum,
            in units of one partition gradient.
    """

    coefficients: np.ndarray
    residual: float


@dataclasses.dataclass(frozen=True, eq=False)
class GradientCode:
    """A gradient code: which child adds up what, and how the parent gets the sum back.

    A parent needs ``Σ_j g_j`` of ``k`` partition gradients with ``q`` numbers each.
    Each ``g_j`` is cut into ``m`` slices of ``q/m`` numbers, and child ``i`` of ``n``
    sends ``f_i = Σ_j Σ_u B[i, j, u] · g_j[slice u]``. From the answered set ``F`` the
    parent finds ``A`` (``m × n``, zero off ``F``) with ``Σ_i A[u, i] · B[i, j, v] = [u
    == v]`` for every ``j``.

    ``m = 1`` is Tandon et al. 2017 (arXiv 1612.03301); ``m > 1`` is Ye and
    Abbe 2018 (arXiv 1802.03475) and Kadhe et al. 2020 (arXiv 2005.07184).

    Args:
        B: float array ``(n, k, m)``, or ``(n, k)`` for ``m = 1``. Kept as a read-only
            float64 copy.
        stragglers: the number ``s`` of children that may be missing, whichever they
            are. Checked, on all patterns or on 256 sampled ones. ``None`` finds the
            largest such number by enumeration.
        name: how the code is called in ``Plan.describe()``.

    Raises:
        ValueError: ``B`` has a wrong shape or entries that are not finite, some pattern
            of ``stragglers`` missing children cannot be decoded, or ``stragglers=None``
            and there are too many patterns to try.

    Equality and hash are by value (``B`` and ``stragglers``).

    Example:
        A code of Tandon et al. for three children, any one of which may be missing.

        >>> import numpy as np
        >>> from jaxcoded import GradientCode
        >>> code = GradientCode(np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]]))
        >>> code.stragglers
        1
        >>> code.decode([True, True, False]).coefficients.round(6) + 0.0
        array([[ 2., -1.,  0.]])
    """

    B: np.ndarray
    stragglers: int = None  # type: ignore[assignment]  # an int once constructed
    name: str = "custom"

    def __post_init__(self) -> None:
        if np.iscomplexobj(self.B):
            raise ValueError("B must be real")
        # adding 0 turns -0.0 into 0.0, so that equal codes hash equally
        B = np.array(self.B, dtype=np.float64) + 0.0
        if B.ndim == 2:
            B = B[:, :, None]
        if B.ndim != 3 or 0 in B.shape:
            raise ValueError(
                f"B must have shape (n, k, m) with no axis empty, got {np.shape(self.B)}"
            )
        if not np.isfinite(B).all():
            raise ValueError("B has entries that are not finite")
        B.setflags(write=False)
        object.__setattr__(self, "B", B)
        object.__setattr__(
            self, "_decode", functools.lru_cache(maxsize=4096)(self._decode_uncached)
        )
        if self.stragglers is None:
            object.__setattr__(self, "stragglers", self._largest_tolerance())
            return
        stragglers = _require.integer("stragglers", self.stragglers, 0, self.n - 1)
        object.__setattr__(self, "stragglers", stragglers)
        if not self._answers[1].all():
            raise ValueError(
                f"this B cannot be decoded from every {self.n - self.stragglers} of its {self.n} children"
            )

    @property
    def n(self) -> int:
        """Number of children."""
        return self.B.shape[0]

    @property
    def k(self) -> int:
        """Number of partitions."""
        return self.B.shape[1]

    @property
    def m(self) -> int:
        """Number of slices: a message is ``1/m`` as long as the gradient."""
        return self.B.shape[2]

    @functools.cached_property
    def support(self) -> np.ndarray:
        """Bool ``(n, k)``: child ``i`` holds partition ``j``."""
        return (self.B != 0).any(axis=2)

    @functools.cached_property
    def loads(self) -> np.ndarray:
        """Int ``(n,)``: the number of partitions each child holds."""
        return self.support.sum(axis=1)

    def decodable(self, answered: Sequence[bool] | Sequence[int] | np.ndarray) -> bool:
        """Whether the exact sum can be rebuilt from these children.

        Args:
            answered: bool ``(n,)``, or the indices of the children that answered.

        Raises:
            ValueError: a wrong shape, or indices that are not distinct children.
            TypeError: neither bools nor integers.
        """
        missing = ~self._answered(answered)
        return bool(self._solve(self._missing_replicas(missing)[None])[1][0])

    def decode(self, answered: Sequence[bool] | Sequence[int] | np.ndarray) -> Decoding:
        """The coefficients that rebuild the sum from these children.

        Of children with the same row of ``B`` (replicas, as in fractional repetition)
        the first that answered is used and the others get 0. Where the set is decodable
        the solution of least norm is returned; otherwise the least-squares one, with
        its residual.

        Args:
            answered: bool ``(n,)``, or the indices of the children that answered.

        Returns:
            A `Decoding`; its coefficients are read-only.

        Raises:
            ValueError, TypeError: as `decodable`.
        """
        return self._decode(self._answered(answered).tobytes())  # type: ignore[attr-defined]

    @functools.cached_property
    def amplification(self) -> float:
        """``κ = max_F max_{u,j} Σ_i |A[u,i]| · Σ_v |B[i,j,v]|``: how much rounding can
        grow, 1 at best.

        Over all answered sets with at most ``stragglers`` missing, or 256 sampled ones
        where there are more.
        """
        magnitude = np.abs(self._rows).reshape(-1, self.k, self.m).sum(axis=2)
        return float((np.abs(self._answers[0]) @ magnitude).max())

    @functools.cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray]:
        """`_solve` for the straggler patterns that the code must answer."""
        return self._solve(self._missing_sets())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GradientCode):
            return NotImplemented
        return self.stragglers == other.stragglers and np.array_equal(self.B, other.B)

    def __hash__(self) -> int:
        return hash((self.stragglers, self.B.shape, self.B.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientCode, (self.B, self.stragglers, self.name)

    # Decoding. Replicas (equal rows) collapse to one; of the reduced matrix M every
    # exact solution is A = A0 + Y·N with the left null space N, so leaving out the set
    # E asks only for Y·N_E = −A0_E: a system with as many unknowns as the code has
    # surplus children, whatever n is.

    @property
    def classes(self) -> tuple[int, ...]:
        """The class of each child; children of one class have the same row of ``B``, so
        that one of them will do."""
        return tuple(self._replicas[1].tolist())

    @functools.cached_property
    def _replicas(self) -> tuple[np.ndarray, np.ndarray]:
        """First child of each class of equal rows, and the class of each child."""
        rows = self.B.reshape(self.n, -1)
        _, first, classes = np.unique(
            rows, axis=0, return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return first[order], np.argsort(order)[classes.reshape(-1)]

    def _missing_replicas(self, missing: np.ndarray) -> np.ndarray:
        """Bool ``(..., n)`` to bool ``(..., classes)``: the classes of which no child
        answered."""
        first, classes = self._replicas
        out = np.ones((*missing.shape[:-1], len(first)), bool)
        for child, replica in enumerate(classes):
            out[..., replica] &= missing[..., child]
        return out

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """``M``: one row ``(k·m,)`` for each class of replicas, in units of `_units`."""
        first = self._replicas[0]
        return self.B[first].reshape(len(first), -1) / self._units[first, None]

    @functools.cached_property
    def _units(self) -> np.ndarray:
        """The size of each child's message, a power of 2: how large a child's messages
        are must not matter for what is singular."""
        _, exponents = np.frexp(np.abs(self.B).max(axis=(1, 2)))
        return np.ldexp(1.0, exponents - 1)

    @functools.cached_property
    def _target(self) -> np.ndarray:
        """What ``A·M`` must be."""
        return np.tile(np.eye(self.m), (1, self.k))

    @functools.cached_property
    def _solution(self) -> tuple[np.ndarray, np.ndarray]:
        """``A0`` (m, classes), and ``N`` (surplus, classes) with orthonormal rows."""
        M = self._rows
        # the rows of `right` beyond the rank are not needed, and k·m may be large
        left, values, right = np.linalg.svd(M, full_matrices=M.shape[0] > M.shape[1])
        rank = int((values > _RANK * values[0]).sum())
        A0 = ((self._target @ right[:rank].T) / values[:rank]) @ left[:, :rank].T
        # so that repetition codes decode by 0 and 1 exactly
        if np.array_equal(np.rint(A0) @ M, self._target):
            A0 = np.rint(A0)
        return A0, left[:, rank:].T

    def _solve(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bool ``(sets, classes)`` of missing classes to ``A`` ``(sets, m, classes)``
        and bool ``(sets,)``: exact."""
        A0, N = self._solution
        left_out = missing[:, None, :]
        Y = np.where(left_out, -A0, 0.0) @ _pseudoinverse(np.where(left_out, N, 0.0))
        A = np.where(left_out, 0.0, A0 + Y @ N)
        error = np.abs(A @ self._rows - self._target).max(axis=(1, 2))
        return A, error <= _EXACT

    def _decode_uncached(self, answered: bytes) -> Decoding:
        mask = np.frombuffer(answered, bool)
        missing = self._missing_replicas(~mask)
        (reduced,), (exact,) = self._solve(missing[None])
        if not exact:
            reduced = np.zeros((self.m, len(missing)))
            if not missing.all():
                heard = self._rows[~missing]
                reduced[:, ~missing] = np.linalg.lstsq(heard.T, self._target.T)[0].T
        residual = float(np.linalg.norm(reduced @ self._rows - self._target))
        coefficients = np.zeros((self.m, self.n))
        for replica in np.flatnonzero(~missing):
            child = np.flatnonzero(mask & (self._replicas[1] == replica))[0]
            coefficients[:, child] = reduced[:, replica] / self._units[child]
        coefficients.setflags(write=False)
        return Decoding(coefficients, residual)

    # Sets of children.

    def _answered(
        self, answered: Sequence[bool] | Sequence[int] | np.ndarray
    ) -> np.ndarray:
        given = np.asarray(answered)
        if given.dtype == bool:
            if given.shape != (self.n,):
                raise ValueError(
                    f"answered must have shape ({self.n},), got {given.shape}"
                )
            return given
        mask = np.zeros(self.n, bool)
        if given.size:
            if not np.issubdtype(given.dtype, np.integer) or given.ndim != 1:
                raise TypeError(
                    f"answered must be a bool array or a list of child indices, got {answered!r}"
                )
            if (
                given.min() < 0
                or given.max() >= self.n
                or len(set(given.tolist())) < len(given)
            ):
                raise ValueError(
                    f"answered must be a bool array or distinct children of "
                    f"0 … {self.n - 1}, got {answered!r}"
                )
            mask[given] = True
        return mask

    def _missing_sets(self) -> np.ndarray:
        """Bool ``(sets, classes)``: the straggler patterns that the code must answer,
        sampled beyond 256."""
        n, s = self.n, self.stragglers
        if sum(math.comb(n, e) for e in range(s + 1)) <= MAX_SETS:
            return self._missing_patterns(
                E for e in range(s + 1) for E in itertools.combinations(range(n), e)
            )
        rng = np.random.default_rng(0)
        return self._missing_patterns(
            rng.permutation(n)[:s].tolist() for _ in range(MAX_SETS)
        )

    def _missing_patterns(self, patterns: Iterable[Sequence[int]]) -> np.ndarray:
        """Sets of missing children to distinct sets of missing classes."""
        rows = []
        for pattern in patterns:
            rows.append(np.zeros(self.n, bool))
            rows[-1][list(pattern)] = True
        return np.unique(self._missing_replicas(np.array(rows)), axis=0)

    def _largest_tolerance(self) -> int:
        for s in range(self.n):
            if math.comb(self.n, s) > 20_000:
                raise ValueError(
                    f"finding the tolerance of a code with n = {self.n} needs more "
                    "than 20,000 patterns; pass stragglers="
                )
            patterns = itertools.combinations(range(self.n), s)
            if not self._solve(self._missing_patterns(patterns))[1].all():
                if s == 0:
                    raise ValueError(
                        "this B cannot be decoded even when every child answers"
                    )
                return s - 1
        return self.n - 1


def _pseudoinverse(N: np.ndarray) -> np.ndarray:
    """Pseudo-inverses of matrices whose rows are parts of orthonormal ones: singular
    values are small against 1, not against the largest one, which may be rounding."""
    left, values, right = np.linalg.svd(N, full_matrices=False)
    inverse = np.where(values > _RANK, 1 / np.maximum(values, _RANK), 0.0)
    return (right.swapaxes(-1, -2) * inverse[..., None, :]) @ left.swapaxes(-1, -2)
