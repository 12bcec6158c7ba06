import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._load import check_size


def progressive(n: int, stragglers: int) -> GradientCode:
    """Return a code in which every child sends the sums of its ``s+1`` partitions one
    after the other, so that the finished part of a slow child's work counts.

    Child ``i`` holds partitions ``i, i+1, …, i+s`` (mod n) and sends them in this
    order. The parent needs the sum of each partition from any one child. Any ``s``
    children may be missing, or more than ``s`` if they have done part of their work.
    Every child sends ``s+1`` messages, whereas with a code it would send one message.
    Rounding errors do not grow, since the coefficients are 0 and 1. This method is
    known as multi-message communication without a code.

    Args:
        n: number of children.
        stragglers: ``s`` in ``0 … n−1``.

    Returns:
        A `GradientCode` with ``s+1`` parts and ``B`` 0/1 of shape ``(n·(s+1), n, 1)``.

    Raises:
        ValueError: ``s`` is not in ``0 … n−1``.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.progressive(4, 2)
        >>> code.decodable([0, 2]), code.decodable([[True, False, False]] * 4)
        (True, True)
    """
    n = _require.integer("n", n, 1)
    s = _require.integer("stragglers", stragglers, 0, n - 1)
    check_size(n, s + 1, n)
    held = (np.arange(n)[:, None] + np.arange(s + 1)) % n
    B = np.eye(n)[held.reshape(-1)]
    return GradientCode(B, s, "progressive", parts=s + 1)
