import math
from collections.abc import Callable, Iterable

import numpy as np

from jaxcoded._warn import warn
from jaxcoded.codes._gradient_code import MAX_SETS, GradientCode

MAX_DRAWS = 64
# While no draw can be decoded, at least this many draws are made, however long that
# takes. Which draws can be decoded depends on the processor's rounding.
_DRAWS_FOR_ONE = 8
# About a second of work, in the units in which `draws` estimates the work of a draw.
_WORK_OF_A_SECOND = 60_000_000
# A sum does not count as exact if its rounding error is more than this fraction of the
# sum.
MAX_ROUNDING = 1e-3


def usual_amplification(n: int, stragglers: int, slices: int) -> float:
    """Return an empirical bound that the best of 64 draws rarely exceeds: ``n · m · √((s+1)
    · C(n, s))``, fitted to cyclic repetition and random generators with n = 2 … 64; see
    ``docs/codes.md``."""
    return n * slices * math.sqrt((stragglers + 1) * math.comb(n, stragglers))


def draws(n: int, stragglers: int, parts: int = 1) -> int:
    """Return how often to draw: 64 times, or as often as possible in about a second.

    Each draw needs a singular value decomposition of ``B``. For every straggler pattern
    it also needs the decomposition of a matrix with the same number of columns, and
    ``s`` rows for each part.
    """
    patterns = min(MAX_SETS, sum(math.comb(n, e) for e in range(stragglers + 1)))
    rows = n * parts
    work = patterns * (stragglers * parts) ** 2 * rows + rows**3 // 6
    least = 4 if parts == 1 else 1
    return min(MAX_DRAWS, max(least, _WORK_OF_A_SECOND // max(1, work)))


def too_large(amplification: float) -> bool:
    """Return whether rounding in float64 leaves fewer than three digits of the sums."""
    return amplification * float(np.finfo(np.float64).eps) > MAX_ROUNDING


def accepted(
    B: np.ndarray,
    stragglers: int,
    name: str,
    remedy: str,
    patterns: Iterable[np.ndarray] = (),
) -> GradientCode:
    """Return the code with this ``B``. Raise a ValueError if float64 cannot decode it
    from some set of ``n−s`` children, or amplification · eps(float64) > 1e-3. The sets
    of missing children in ``patterns`` are tried, too."""
    start = (
        f"{name} with n = {B.shape[0]}, stragglers = {stragglers}, slices = "
        f"{B.shape[2]} cannot be decoded in float64: "
    )
    try:
        code = GradientCode(B, stragglers, name)
    except (ValueError, np.linalg.LinAlgError) as error:
        raise ValueError(f"{start}{error}; {remedy}") from None
    amplification = code.amplification
    magnitude = np.abs(B).sum(axis=2)
    for missing in patterns:
        answered = np.setdiff1d(np.arange(code.n), missing)
        if not code.decodable(answered):
            raise ValueError(
                f"{start}the children {np.sort(missing)} cannot be missing; {remedy}"
            )
        A = np.abs(code.decode(answered).coefficients)
        amplification = max(amplification, float((A @ magnitude).max()))
    if too_large(amplification):
        raise ValueError(f"{start}the amplification is {amplification:.1e}; {remedy}")
    code.__dict__["amplification"] = amplification  # replaces the cached value
    return code


def least_amplified(
    draw: Callable[[np.random.Generator], np.ndarray],
    n: int,
    stragglers: int,
    slices: int,
    name: str,
    seed: int,
    *,
    parts: int = 1,
    promises: tuple[tuple[int, int, int], ...] = (),
) -> GradientCode:
    """Return the code with the smallest amplification of at most 64 draws of ``B``.
    Raise a ValueError if float64 can decode no draw with amplification · eps(float64) ≤
    1e-3. A warning appears if the amplification is much larger than usual.
    """
    rng = np.random.default_rng([seed, n, stragglers, slices])
    usual = usual_amplification(n, stragglers, slices)
    best: GradientCode | None = None
    most = draws(n, stragglers, parts)
    drawn = 0
    while drawn < most or (best is None and drawn < _DRAWS_FOR_ONE):
        drawn += 1
        try:
            code = GradientCode(draw(rng), stragglers, name, parts, promises=promises)
        except (ValueError, np.linalg.LinAlgError):
            continue  # the draw is too close to singular to be decoded
        if best is None or code.amplification < best.amplification:
            best = code
        if best.amplification <= 1 + 1e-9:
            break  # no better draw exists
    if best is None or too_large(best.amplification):
        reached = (
            "no draw could be decoded"
            if best is None
            else f"the best amplification is {best.amplification:.1e}"
        )
        raise ValueError(
            f"{name} with n = {n}, stragglers = {stragglers}, slices = {slices} cannot "
            f"be decoded in float64: {reached} after {drawn} draws; take "
            "fewer stragglers, fewer slices, a smaller fan-out or fractional repetition"
        )
    if parts == 1 and best.amplification > 10 * usual:
        warn(
            f"{name} with n = {n}, stragglers = {stragglers}, slices = {slices}: the "
            f"amplification {best.amplification:.1e} is far above the usual "
            f"{usual:.1e}; another seed or support may do better"
        )
    return best
