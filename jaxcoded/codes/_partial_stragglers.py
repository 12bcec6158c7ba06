from fractions import Fraction

import numpy as np

from jaxcoded import _require
from jaxcoded.codes._cyclic_repetition import cyclic_repetition
from jaxcoded.codes._fractional_repetition import fractional_repetition
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._load import check_size


def partial_stragglers(
    n: int, late: int, *, slowdown: float, seed: int = 0
) -> GradientCode:
    """Return a code with two messages per child: first the gradient of a partition that
    no other child holds, then a coded sum. It is for stragglers that are slow, not
    dead.

    The parent needs the first message of all ``n`` children and the second message of
    any ``n−s`` children. There are ``n`` naive and ``n`` coded partitions. Only child
    ``i`` holds naive partition ``i``. Each child also holds ``s+1`` coded partitions. A
    naive partition is ``n1 = (s+1)/(α−1)`` times as large as a coded partition. So when
    the other children have finished both parts, a child that is ``α`` times slower has
    just finished its first part. The load is ``α(s+1)/(n(s+α))`` of the examples, which
    is ``α/(s+α)`` of the load of a full code. This is from Tandon et al. 2017 (arXiv
    1612.03301, section 4).

    Args:
        n: number of children.
        late: ``s`` in ``0 … n−1``, the number of children whose second messages may be
            missing. The first message of every child is required.
        slowdown: ``α > 1``, the largest slowdown of a straggler.
        seed: the seed of the random draws of the coded part (`cyclic_repetition`;
            `fractional_repetition` if ``s+1`` divides ``n``).

    Returns:
        A `GradientCode` with two parts, ``B`` of shape ``(2n, 2n, 1)`` and
        ``stragglers = 0``. Its amplification also covers sets that lack late children's
        second parts.

    Raises:
        ValueError: ``α ≤ 1``, ``s`` is out of range, or `cyclic_repetition` raises a
            ValueError.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.partial_stragglers(3, 1, slowdown=5)
        >>> code.shares[0]  # α(s+1)/(n(s+α)) = 5·2 / (3·6)
        Fraction(5, 9)
        >>> code.decodable([[True, True], [True, False], [True, True]])
        True
        >>> round(code.amplification, 2), code.promises
        (3.03, ((1, 2, 1),))
    """
    n = _require.integer("n", n, 1)
    s = _require.integer("late", late, 0, n - 1)
    if not (_require.is_positive(slowdown) and slowdown > 1):
        raise ValueError(
            "slowdown, how many times slower a straggler is, must be a number > 1, got "
            f"{_require.shown(slowdown)}"
        )
    alpha = Fraction(slowdown)
    check_size(2 * n, 2 * n)
    coded = (
        cyclic_repetition(n, s, seed=seed)
        if n % (s + 1)
        else fractional_repetition(n, s)
    )
    B = np.zeros((n, 2, 2 * n))
    B[:, 0, :n] = np.eye(n)
    B[:, 1, n:] = coded.B[:, :, 0]
    sizes = [Fraction(s + 1) / (alpha - 1)] * n + [Fraction(1)] * n
    return GradientCode(
        B.reshape(2 * n, 2 * n),
        0,
        "partial_stragglers",
        parts=2,
        sizes=tuple(sizes),
        promises=((s, 2, 1),),
    )
