from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._grouped import trigonometric
from jaxcoded.codes._linear import of_groups


def reed_solomon(n: int, stragglers: int, slices: int = 1) -> GradientCode:
    """Return a code of groups of ``d = s+m`` children that send values of a polynomial
    of degree ``m−1``, whose coefficients are the slices of the group's sum.

    Any ``s`` children of each group may be missing. This is a Reed–Solomon code, which
    is maximum distance separable, in the framework of Kadhe, Koyluoglu and Ramchandran
    2020 (arXiv 2005.07184); see `linear`. Over the reals, the growth of rounding errors
    depends on the nodes, the points at which the polynomial is evaluated. Here the
    nodes are equally spaced on the unit circle, and the polynomials are real and
    trigonometric. The code needs no draws, and has a smaller amplification than
    `gaussian_mds` for nearly all ``s`` and ``m``. With nodes on a line, even at
    Chebyshev points, the amplification would be many times larger.

    Args:
        n: number of children and of partitions, a multiple of ``s+m``.
        stragglers: ``s ≥ 0``.
        slices: ``m ≥ 1``; messages are ``1/m`` as long as the gradient.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, m)``.

    Raises:
        ValueError: ``s+m`` does not divide ``n``, an argument is out of range, a group
            has more than 200,000 sets of ``s`` children, or float64 cannot decode the
            code.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.reed_solomon(8, 2, 2)
        >>> code.stragglers, code.loads.tolist()
        (2, [4, 4, 4, 4, 4, 4, 4, 4])
        >>> code.decodable([0, 1, 6, 7]), code.decodable([0, 1, 2, 7])
        (True, False)
    """
    s = _require.integer("stragglers", stragglers, 0)
    m = _require.integer("slices", slices, 1)
    return of_groups(n, trigonometric(s + m, m).T, s, "reed_solomon")
