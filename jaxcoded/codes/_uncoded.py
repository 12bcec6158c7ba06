import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def uncoded(n: int) -> GradientCode:
    """Return a code without redundancy: child ``i`` holds only partition ``i``, and all
    ``n`` children must answer.

    Args:
        n: number of children, at least 1.

    Returns:
        A `GradientCode` with ``B`` the identity, ``(n, n, 1)``, and ``stragglers = 0``.

    Example:
        >>> from jaxcoded import codes
        >>> codes.uncoded(3).loads.tolist()
        [1, 1, 1]
    """
    n = _require.integer("n", n, 1)
    return GradientCode(np.eye(n), 0, "uncoded")
