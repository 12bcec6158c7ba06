import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode

_DRAWS = 64
_ROUNDS = 20  # how often all edges are switched before the first draw
# Equal eigenvalues may differ by this much because of rounding, which differs between
# machines.
_TIE = 1e-9


def expander(
    n: int,
    stragglers: int,
    degree: int,
    *,
    seed: int = 0,
    decoding: str = "least_squares",
) -> GradientCode:
    """Return an expander code: child ``i`` holds the neighbours of vertex ``i`` in a
    random ``d``-regular graph ``G``, and ``B = A(G)/d``. The code is approximate, for
    any ``s < n``.

    Let ``λ`` be the second largest absolute eigenvalue of ``G``. Whichever ``s``
    children are missing, the residual is at most ``(λ/d) · √(n·s/(n−s))``. This bound
    holds even for one-step decoding, which gives all answers the coefficient
    ``n/(n−s)``: Raviv, Tandon, Dimakis and Tamo 2018 (arXiv 1707.03858). The code draws
    64 graphs by switching pairs of edges of a circulant graph, and takes the graph with
    the smallest ``λ``.

    Args:
        n: number of children and of partitions.
        stragglers: ``s`` in ``0 … n−1``.
        degree: ``d`` in ``1 … n−1``, the load of every child and the number of holders
            of every partition; ``n·d`` must be even.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.
        decoding: ``"least_squares"``, or ``"one_step"``; see `GradientCode`.

    Returns:
        A `GradientCode` with symmetric ``B`` of shape ``(n, n, 1)``. The entries of ``B``
        are 0 and ``1/d``.

    Raises:
        ValueError: an argument is out of range, or ``n·d`` is odd.

    Example:
        >>> import numpy as np
        >>> from jaxcoded import codes
        >>> code = codes.expander(64, 8, 6, decoding="one_step")
        >>> second = np.sort(np.abs(np.linalg.eigvalsh(code.B[:, :, 0])))[-2]
        >>> bound = second * np.sqrt(64 * 8 / (64 - 8))
        >>> bool(code.decode(np.arange(64) >= 8).residual <= bound)
        True
    """
    n = _require.integer("n", n, 2)
    degree = _require.integer("degree", degree, 1, n - 1)
    if n * degree % 2:
        raise ValueError(
            f"there is no graph with {n} vertices of degree {degree}, as their product "
            f"is odd; take degree {degree - 1} or {degree + 1}, or another n"
        )
    rng = np.random.default_rng([seed, n, degree])
    edges = _circulant(n, degree)
    for _ in range(_ROUNDS):
        edges = _switched(edges, n, rng)
    best, least = np.empty((n, n)), np.inf
    for _ in range(_DRAWS):
        edges = _switched(_switched(edges, n, rng), n, rng)
        adjacency = np.zeros((n, n))
        adjacency[edges, edges[:, ::-1]] = 1
        second = _second_eigenvalue(adjacency)
        if second < least - _TIE:
            best, least = adjacency, second
    return GradientCode(best / degree, stragglers, "expander", decoding=decoding)


def _second_eigenvalue(adjacency: np.ndarray) -> float:
    """Return the second largest absolute eigenvalue."""
    return float(np.sort(np.abs(np.linalg.eigvalsh(adjacency)))[-2])


def _circulant(n: int, degree: int) -> np.ndarray:
    """Return edges, int ``(n·degree/2, 2)``, from every vertex to the next vertices and,
    for an odd degree, to the opposite vertex."""
    vertices = np.arange(n)
    edges = [
        np.stack([vertices, (vertices + step) % n], axis=1)
        for step in range(1, degree // 2 + 1)
    ]
    if degree % 2:
        edges.append(np.stack([vertices[: n // 2], vertices[n // 2 :]], axis=1))
    return np.concatenate(edges)


def _switched(edges: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Switch random edges, ``ab, cd`` to ``ad, cb``, without loops and double edges."""
    edges = rng.permuted(rng.permutation(edges), axis=1)
    half = len(edges) // 2
    new = edges.copy()
    new[:half, 1] = edges[half : 2 * half, 1]
    new[half : 2 * half, 1] = edges[:half, 1]
    new, kept = new[: 2 * half], edges[2 * half :]
    numbers = np.sort(new) @ [n, 1]
    _, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    good = (new[:, 0] != new[:, 1]) & (counts[which] == 1)
    good &= ~np.isin(numbers, np.sort(edges) @ [n, 1])
    pair = np.tile(good[:half] & good[half:], 2)[:, None]
    return np.concatenate([np.where(pair, new, edges[: 2 * half]), kept])
