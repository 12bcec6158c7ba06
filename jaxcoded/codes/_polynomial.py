import numpy as np

from jaxcoded._warn import warn
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._load import checked
from jaxcoded.codes._redraw import accepted, usual_amplification


def polynomial(
    n: int, stragglers: int, slices: int = 1, *, load: int | None = None
) -> GradientCode:
    """Return a code of Ye and Abbe 2018 (arXiv 1802.03475, Vandermonde construction):
    child ``i`` holds partitions ``i, i+1, …, i+d−1`` (mod n), for any ``n`` and ``d ≥
    s+m``.

    For partition ``j``, the polynomial ``p`` has its roots at the points of the ``n−d``
    children that do not hold the partition. The numbers ``c`` in ``p^(u) = x·p^(u−1) −
    c·p`` make the top ``m`` coefficients of ``p^(1) … p^(m)`` an identity
    matrix. ``B[i, j, u]`` is the value of ``p^(u)`` at point ``i``. The points are the
    paper's points, ±(1 + i/2), and 0 for odd ``n``. Here their signs alternate.

    Any ``d−m`` children may be missing, but a plan relies only on ``s``. With ``d >
    s+m``, ``n−s`` answers are more than necessary, which lowers the amplification. The
    construction needs no randomness and no search, but is numerically **unstable**. The
    paper decodes by inverting a Vandermonde matrix, which loses all digits beyond n ≈ 20.
    The least-norm decoder of `GradientCode` is better for small ``s`` and ``m``. But the
    amplification still grows by powers of ``n`` and exponentially with ``s+m``. So use
    `random_generator` except for small codes. A warning appears if the amplification is
    more than ten times as large as the amplification of random codes.

    Args:
        n: number of children and of partitions.
        stragglers: ``s``, with ``s + slices ≤ n``.
        slices: ``m ≥ 1``; messages are ``1/m`` as long as the gradient.
        load: ``d`` in ``s+m … n``. Default: ``s+m``.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, m)`` and loads ``d``.

    Raises:
        ValueError: an argument is out of range; or float64 cannot decode the code from
            some ``n−s`` children, or only with amplification · eps > 1e-3. The
            constructor always tries the hardest sets, which lack ``s`` neighbouring
            points.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.polynomial(5, 1, 2)
        >>> code.B.shape, code.loads.tolist(), code.decodable([0, 1, 3, 4])
        ((5, 5, 2), [3, 3, 3, 3, 3], True)
    """
    n, s, m, d = checked(n, stragglers, slices, load)
    points = (1 + np.arange(n) // 2 / 2) * (-1.0) ** np.arange(n)
    if n % 2:
        points = np.concatenate([[0.0], points[:-1]])
    # the n − d children after child j do not hold partition j; child j and the d − 1
    # children before it do
    roots = points[(np.arange(1, n - d + 1) + np.arange(n)[:, None]) % n]
    B = np.empty((n, n, m))
    # an overflow raises an error below
    with np.errstate(over="ignore", invalid="ignore"):
        first = value = np.prod(points[:, None, None] - roots, axis=2)
        # coefficients, highest power first
        p = np.array([np.atleast_1d(np.poly(each)) for each in roots])
        q = np.zeros((n, n - d + m + 1))
        q[:, : n - d + 1] = p
        for u in range(m):
            B[:, :, u] = value
            c = q[:, u + 1]
            value = points[:, None] * value - c * first
            q[:, u + 1 : u + 1 + n - d + 1] -= c[:, None] * p
    remedy = (
        "use random_generator (the same loads, and stable), fewer slices, or fewer "
        "stragglers"
    )
    neighbours = np.argsort(points)[(np.arange(s) + np.arange(n)[:, None]) % n]
    code = accepted(B, s, "polynomial", remedy, neighbours)
    if code.amplification > 10 * usual_amplification(n, s, m):
        warn(
            f"polynomial with n = {n}, stragglers = {s}, slices = {m}: the amplification "
            f"{code.amplification:.1e} is far above the amplification of random codes; use "
            "random_generator"
        )
    return code
