import math

import numpy as np

from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._load import checked
from jaxcoded.codes._redraw import least_amplified

MAX_ROWS = 512


def adaptive(
    n: int, stragglers: int, slices: int = 1, *, seed: int = 0
) -> GradientCode:
    """Return a code whose children send their messages in parts, one after the other, so
    that the traffic depends on the actual number of stragglers.

    Every child holds ``d = s + m`` partitions. A whole message is ``1/m`` as long as a
    gradient. If ``δ ≤ s`` children are missing, the parent decodes from the beginnings
    of the present children's messages. Each beginning is ``1/(d−δ)`` as long as a
    gradient, so the parent needs whole messages only for ``δ = s``. Shorter beginnings
    do not suffice for any ``δ`` (Ye and Abbe 2018; see `random_generator`). This is
    adaptive gradient coding as in Cao et al. 2020 (arXiv 2006.04845), with the
    construction in ``docs/theory.md``.

    Args:
        n: number of children.
        stragglers: ``s``, with ``s + m ≤ n``.
        slices: ``m ≥ 1``; a whole message is ``1/m`` as long as the gradient.
        seed: the seed of the random draws.

    Returns:
        A `GradientCode` with ``L/m`` parts and ``B`` of shape ``(n·L/m, n, L)`` with
        ``L = lcm(m, …, s+m)``: parts are ``1/L`` as long as the gradient.

    Raises:
        ValueError: ``s + m > n``; the code has more than 512 messages in total, whose
            check would take seconds; or float64 cannot decode any draw.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.adaptive(4, 1)
        >>> code.parts, code.m  # messages are halves of the gradient
        (2, 2)
        >>> code.decodable([[True, False]] * 4), code.decodable([0, 1, 2])
        (True, True)
    """
    n, s, m, d = checked(n, stragglers, slices, None)
    L = math.lcm(*range(m, d + 1))
    parts = L // m
    if n * parts > MAX_ROWS:
        raise ValueError(
            f"adaptive with n = {n}, stragglers = {s}, slices = {m} has {n * parts} messages, "
            f"{parts} from each child, more than {MAX_ROWS}: take a smaller fan-out or "
            "fewer stragglers"
        )
    # for each δ, the number of parts that the parent needs from a child
    ends = [L // (d - missing) for missing in range(s + 1)]
    held = (np.arange(n)[:, None] - np.arange(d)) % n  # children that hold a partition

    def draw(rng: np.random.Generator) -> np.ndarray:
        # rows are (part, child) here
        # If no child is missing, part p of all messages gives d of the L slices.
        decoder = np.kron(np.eye(ends[0]), rng.standard_normal((d, n)))
        decoder = decoder.reshape(L, ends[0], n)
        checks = [
            rng.standard_normal((missing * end - (missing - 1) * before, end, n))
            for missing, before, end in zip(range(1, s + 1), ends, ends[1:])
        ]
        B = np.zeros((parts, n, n, L))
        for j, children in enumerate(held):
            first = decoder[:, :, children].reshape(L, L)
            B[: ends[0], children, j] = np.linalg.inv(first).reshape(ends[0], d, L)
            for check, before, end in zip(checks, ends, ends[1:]):
                known = check[:, :before, children].reshape(len(check), -1)
                new = check[:, before:, children].reshape(len(check), -1)
                seen = B[:before, children, j].reshape(-1, L)
                B[before:end, children, j] = np.linalg.solve(
                    new, -known @ seen
                ).reshape(end - before, d, L)
        return B.transpose(1, 0, 2, 3).reshape(n * parts, n, L)

    promises = tuple((missing, end, 0) for missing, end in enumerate(ends[:-1]))
    return least_amplified(
        draw, n, s, m, "adaptive", seed, parts=parts, promises=promises
    )
