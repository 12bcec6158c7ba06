import dataclasses

from jaxcoded.codes._gradient_code import GradientCode


def approximate(
    code: GradientCode, stragglers: int, decoding: str = "least_squares"
) -> GradientCode:
    """Return ``code`` with a larger ``s`` than it tolerates: the parent continues
    with any ``n−s`` children and approximates the sum.

    If the children that answered are decodable, least squares still gives the exact
    sum. With fractional repetition this is the code that Charles, Papailiopoulos and
    Ellenberg 2017 (arXiv 1711.06771) decode optimally. If ``r`` random children of
    ``n`` answer, and every partition is on ``d`` children, the squared residual is ``n
    · C(n−d, r) / C(n, r)`` on average.

    Args:
        code: any code.
        stragglers: the number of children that may be missing, in ``0 … n−1``.
        decoding: as in `GradientCode`.

    Returns:
        A `GradientCode` with the ``B``, parts and sizes of ``code``.

    Raises:
        ValueError: ``stragglers`` is out of range, or ``decoding`` is ``"one_step"``
            for a code with slices or with a ``B`` that sums to 0 or less.

    Example:
        Group 1 of 2 does not answer; its two partitions are lost.

        >>> from jaxcoded import codes
        >>> code = codes.approximate(codes.fractional_repetition(4, 1), 2)
        >>> decoding = code.decode([True, True, False, False])
        >>> decoding.coefficients, round(decoding.residual**2, 9)
        (array([[1., 0., 0., 0.]]), 2.0)
    """
    return dataclasses.replace(code, stragglers=stragglers, decoding=decoding)
