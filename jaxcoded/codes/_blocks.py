"""Split codes into blocks without common partitions, and solve each block
separately."""

import functools

import numpy as np

# A decoding counts as exact if no entry of A·B − I is larger than this. For accepted
# codes, amplification · eps is at most 1e-3, and mostly much smaller. For exact
# solutions in float64 the entries are then near amplification · 1e-16. For sets that
# cannot be decoded, they are about 1/√k or larger.
_EXACT = 1e-6
# Singular values below this fraction of the largest singular value count as zero.
_RANK = 1e-11
# Numbers this close to integers are rounded to integers, if the result is exact.
_WHOLE = 1e-9
# How often the solver halves the damping.
_HALVINGS = 40


class Block:
    """Rows of ``M`` that have no partition in common with other rows, and their
    decoder, with ``m`` slices.

    Every exact solution of ``A·M = T`` is ``A = A0 + Y·N`` with the left null space
    ``N``. So to leave out a set ``E`` of rows, it suffices to solve ``Y·N_E = −A0_E``.
    This system has as many unknowns as the block has surplus rows.

    ``M`` is float64 ``(r, c·m)``: the rows, restricted to the partitions that they
    hold. One partition may represent several equal partitions.
    """

    def __init__(self, M: np.ndarray, m: int) -> None:
        self.M = M
        self.target = np.tile(np.eye(m), (1, M.shape[1] // m))
        self.magnitude = np.abs(M).reshape(len(M), -1, m).sum(axis=2)
        self.weight = float(np.linalg.norm(self.magnitude, axis=0).max())

    @functools.cached_property
    def solution(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``A0`` (m, r), and ``N`` (surplus, r) with orthonormal rows."""
        M = self.M
        left, values, right, rank = _decomposed(M)
        A0 = ((self.target @ right[:rank].T) / values[:rank]) @ left[:, :rank].T
        # Round, so that repetition codes decode with coefficients of exactly 0 and 1.
        whole = np.rint(A0)
        near = np.abs(A0 - whole).max(initial=0) < _WHOLE
        if near and np.array_equal(whole @ M, self.target):
            A0 = whole
        return A0, left[:, rank:].T

    def solve(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``A`` ``(sets, m, r)`` for missing rows, bool ``(sets, r)``, and for
        which sets it is exact."""
        A0, N = self.solution
        counts = missing.sum(axis=1)
        if not counts.any():
            A = np.repeat(A0[None], len(missing), axis=0)
        else:
            # Take only the columns of E. For sets smaller than the largest set, pad
            # with columns of zeros.
            places = np.arange(counts.max()) < counts[:, None]
            columns = np.zeros(places.shape, np.intp)
            columns[places] = np.nonzero(missing)[1]
            N_E, A0_E = (
                np.where(places[:, None], each[:, columns].swapaxes(0, 1), 0.0)
                for each in (N, A0)
            )
            Y = -A0_E @ _pseudoinverse(N_E)
            A = np.where(missing[:, None], 0.0, A0 + Y @ N)
        error = np.abs(np.tensordot(A, self.M, 1) - self.target).max(axis=(1, 2))
        return A, error <= _EXACT

    def amplification(self, A: np.ndarray) -> float:
        """Return ``max_{u,j} Σ_i |A[u,i]| · Σ_v |M[i,j,v]|`` of ``A`` ``(m, r)``."""
        return float((np.abs(A) @ self.magnitude).max())

    def bound(self, A: np.ndarray) -> np.ndarray:
        """Return an upper bound on the amplification of ``A`` ``(..., m, r)``
        (Cauchy-Schwarz).

        For solutions of least norm this bound never grows when more rows become
        present, although the amplification itself may grow.
        """
        return self.weight * np.linalg.norm(A, axis=-1).max(axis=-1)

    def best(self, missing: np.ndarray, limit: float) -> np.ndarray:
        """Return the ``A`` ``(m, r)`` with the least residual for missing rows, bool
        ``(r,)``. If it amplifies by more than the limit, return an ``A`` with a similar
        residual that amplifies by at most the limit.
        """
        (A,), (exact,) = self.solve(missing[None])
        if not exact:
            A = self._damped(missing, 0.0)
        if self.amplification(A) <= limit:
            return A
        # This damping δ suffices, since each ‖A[u]‖ is at most ‖T[u]‖ / 2δ.
        damping = self.weight * np.linalg.norm(self.target, axis=1).max() / (2 * limit)
        A = self._damped(missing, damping)
        for _ in range(_HALVINGS):
            damping /= 2
            less = self._damped(missing, damping)
            if self.amplification(less) > limit:
                break
            A = less
        return A

    def _damped(self, missing: np.ndarray, damping: float) -> np.ndarray:
        """Return the ``A``, 0 at missing rows, that minimizes ``‖A·M − T‖² + δ²‖A‖²``."""
        A = np.zeros((len(self.target), len(self.M)))
        equations, target = self.M[~missing].T, self.target.T
        if damping:
            heard = equations.shape[1]
            equations = np.concatenate([equations, damping * np.eye(heard)])
            target = np.concatenate([target, np.zeros((heard, len(A)))])
        if equations.size:
            A[:, ~missing] = np.linalg.lstsq(equations, target)[0].T
        return A


def left_null_space(M: np.ndarray) -> np.ndarray:
    """Return ``N`` with orthonormal rows and ``N·M = 0``, for a nonzero matrix."""
    left, _, _, rank = _decomposed(M)
    return left[:, rank:].T


def _decomposed(M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return the singular value decomposition with a square ``left``, and the rank."""
    # Do not compute the rows of `right` beyond the rank: they are not needed, and there
    # may be many columns.
    left, values, right = np.linalg.svd(M, full_matrices=M.shape[0] > M.shape[1])
    return left, values, right, int((values > _RANK * values[0]).sum())


def blocks(M: np.ndarray) -> list[tuple[Block, np.ndarray]]:
    """Return the different blocks of ``M`` ``(rows, k, m)``. Each block comes with the
    rows of all its copies in ``M``, int ``(copies, r)``.

    Rows of zeros belong to no block.
    """
    copies: dict[tuple[tuple[int, ...], bytes], tuple[Block, list[np.ndarray]]] = {}
    for rows, columns in _components((M != 0).any(axis=2)):
        each = _without_copies(M[np.ix_(rows, columns)]).reshape(len(rows), -1)
        block = copies.setdefault(
            (each.shape, each.tobytes()), (Block(each, M.shape[2]), [])
        )
        block[1].append(rows)
    return [(block, np.array(rows)) for block, rows in copies.values()]


def _without_copies(M: np.ndarray) -> np.ndarray:
    """Return ``M`` ``(r, c, m)`` with one partition of each class of equal partitions if
    all classes have the same size, which changes no solution. Otherwise return ``M``."""
    first, which = alike(M.swapaxes(0, 1).reshape(M.shape[1], -1))
    counts = np.bincount(which)
    return M[:, np.sort(first)] if (counts == counts[0]).all() else M


def alike(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each class of equal rows, and the class of each row."""
    width = rows.itemsize * rows.shape[1]
    _, first, classes = np.unique(
        np.ascontiguousarray(rows).view(f"V{width}")[:, 0],
        return_index=True,
        return_inverse=True,
    )
    return first, classes.reshape(-1)


def _components(support: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows and columns of each connected component of a bool matrix."""
    components = []
    left = support.any(axis=1)
    while left.any():
        rows, columns = np.zeros_like(left), np.zeros(support.shape[1], bool)
        frontier = np.arange(len(support)) == left.argmax()
        while frontier.any():
            rows |= frontier
            reached = support[frontier].any(axis=0) & ~columns
            columns |= reached
            frontier = support[:, reached].any(axis=1) & ~rows
        left &= ~rows
        components.append((np.flatnonzero(rows), np.flatnonzero(columns)))
    return components


def _pseudoinverse(N: np.ndarray) -> np.ndarray:
    """Return pseudo-inverses of matrices whose rows are parts of orthonormal rows. Their
    singular values are compared with 1: even the largest may be a rounding error."""
    left, values, right = np.linalg.svd(N, full_matrices=False)
    inverse = np.where(values > _RANK, 1 / np.maximum(values, _RANK), 0.0)
    return (right.swapaxes(-1, -2) * inverse[..., None, :]) @ left.swapaxes(-1, -2)
