import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._redraw import least_amplified


def cyclic_repetition(n: int, stragglers: int, *, seed: int = 0) -> GradientCode:
    """Return a cyclic repetition code (CRC): child ``i`` holds partitions ``i, i+1, …,
    i+s`` (mod n), for any ``n`` and ``s < n``.

    Any ``n−s`` children suffice to decode. The rows of ``B`` lie in the null space of a
    random ``s × n`` matrix. The entries of each row of this matrix sum to 0, so the
    null space contains the all-ones vector. This is the cyclic repetition scheme of
    Tandon et al. 2017 (arXiv 1612.03301). The matrix is redrawn at most 64 times, to
    get a small amplification.

    Args:
        n: number of children.
        stragglers: ``s`` in ``0 … n−1``.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, 1)`` and loads ``s+1``.

    Raises:
        ValueError: ``s`` is not in ``0 … n−1``, or float64 cannot decode any draw
            (amplification · eps > 1e-3).

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.cyclic_repetition(5, 2)
        >>> code.loads.tolist(), code.decodable([True, False, True, True, False])
        ([3, 3, 3, 3, 3], True)
    """
    n = _require.integer("n", n, 1)
    stragglers = _require.integer("stragglers", stragglers, 0, n - 1)
    # the support of row i, without its leading 1
    columns = (np.arange(n)[:, None] + np.arange(1, stragglers + 1)) % n

    def draw(rng: np.random.Generator) -> np.ndarray:
        H = rng.standard_normal((stragglers, n))
        H[:, -1] = -H[:, :-1].sum(axis=1)
        B = np.eye(n)
        if stragglers:
            systems = H[:, columns].transpose(1, 0, 2)
            rest = np.linalg.solve(systems, -H.T[:, :, None])
            np.put_along_axis(B, columns, rest[:, :, 0], axis=1)
        return B

    return least_amplified(draw, n, stragglers, 1, "cyclic_repetition", seed)
