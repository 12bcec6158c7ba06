import numpy as np

from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._load import check_size, checked
from jaxcoded.codes._redraw import least_amplified


def random_generator(
    n: int,
    stragglers: int,
    slices: int = 1,
    *,
    load: int | None = None,
    support: np.ndarray | None = None,
    loads: list[int] | np.ndarray | None = None,
    seed: int = 0,
) -> GradientCode:
    """Return a random code on any support: unequal loads and any number of slices.

    The function draws a random ``W`` of shape ``(s+m, n)``. The first ``s`` rows of
    ``W`` are the parity checks of ``B``. The last ``m`` rows are the decoder for the
    case that all children answer. So for every partition ``j``, ``B`` solves ``W · B[:,
    j, :] = [0; I]``, in which only the holders of ``j`` have unknowns. Any ``s`` columns
    of the checks are invertible with probability 1, so any ``n−s`` children suffice.

    These are the random codes of Ye and Abbe 2018 (arXiv 1802.03475) in terms of their
    dual (``s+m`` unknowns instead of ``n−s``). They work with any support, like the
    heterogeneity-aware codes of Wang et al. 2019. ``W`` is redrawn at most 64 times, to
    get a small amplification.

    Args:
        n: number of children.
        stragglers: ``s``, with ``s + slices ≤ n``.
        slices: ``m ≥ 1``; messages are ``1/m`` as long as the gradient.
        load: ``d`` in ``s+m … n``, the same for all children. Default: ``s+m``, the
            least possible.
        support: bool ``(n, k)``, whether child ``i`` holds partition ``j``; every
            partition needs at least ``s + m`` holders. Default: ``k = n`` partitions
            dealt round-robin, ``load`` to each child.
        loads: instead of ``support``, the number ``ℓ_i`` of partitions of each child,
            with ``Σ ℓ_i = (s+m)·k`` and ``ℓ_i ≤ k``. The ``k`` partitions are dealt
            round-robin.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, k, m)``.

    Raises:
        ValueError: ``s + m > n``, a load is out of range, a partition has too few
            holders, loads do not add up, or float64 cannot decode any draw
            (amplification · eps > 1e-3).

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.random_generator(4, 1, 2)
        >>> code.B.shape, code.loads.tolist()
        ((4, 4, 2), [3, 3, 3, 3])
        >>> codes.random_generator(3, 1, loads=[1, 2, 3]).support.astype(int).tolist()
        [[1, 0, 0], [0, 1, 1], [1, 1, 1]]
    """
    n, s, m, d = checked(n, stragglers, slices, load)
    if sum(given is not None for given in (load, support, loads)) > 1:
        raise ValueError("give load, support or loads, not several of them")
    if loads is not None:
        support = _deal(np.asarray(loads), n, s + m)
    elif support is None:
        support = _deal(np.full(n, d), n, d)
    support = np.asarray(support, bool)
    if support.ndim != 2 or len(support) != n or support.shape[1] == 0:
        raise ValueError(
            f"support must have shape ({n}, k) with k >= 1, got {support.shape}"
        )
    holders = support.sum(axis=0)
    if holders.min() < s + m:
        raise ValueError(
            f"partition {int(holders.argmin())} has {int(holders.min())} holders; "
            f"it needs s + m = {s + m}, so that any {s} of them may be missing"
        )
    wanted = np.vstack([np.zeros((s, m)), np.eye(m)])

    def draw(rng: np.random.Generator) -> np.ndarray:
        W = rng.standard_normal((s + m, n))
        B = np.linalg.pinv(np.where(support.T[:, None, :], W, 0.0)) @ wanted
        return np.where(support[:, :, None], B.transpose(1, 0, 2), 0.0)

    return least_amplified(draw, n, s, m, "random_generator", seed)


def _deal(loads: np.ndarray, n: int, holders: int) -> np.ndarray:
    """Return which partitions each child holds, bool ``(n, k)``, dealt cyclically."""
    integers = np.issubdtype(loads.dtype, np.integer)
    if loads.shape != (n,) or not integers or loads.min() < 0:
        raise ValueError(f"loads must be {n} integers >= 0, got {loads.tolist()}")
    k, rest = divmod(int(loads.sum()), holders)
    if rest or k == 0 or loads.max() > k:
        raise ValueError(
            f"loads {loads.tolist()} must add up to a multiple k*(s + m) of s + m = {holders}, and no load may be above k"
        )
    check_size(n, k)
    support = np.zeros((n, k), bool)
    ends = np.cumsum(loads)
    for child, (end, load) in enumerate(zip(ends, loads)):
        support[child, np.arange(end - load, end) % k] = True
    return support
