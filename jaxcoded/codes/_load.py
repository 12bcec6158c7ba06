import math

from jaxcoded import _require

# The largest number of values in a code: 1 GiB of float64.
MOST_NUMBERS = 1 << 27


def check_size(*shape: int) -> None:
    """Raise a ValueError unless a code may have a tensor of this shape."""
    if math.prod(shape) > MOST_NUMBERS:
        raise ValueError(
            f"a code of shape {_require.shown(shape)} has more than {MOST_NUMBERS} numbers: "
            "take a smaller fan-out, or fewer slices or parts"
        )


def checked(
    n: int, stragglers: int, slices: int, load: int | None
) -> tuple[int, int, int, int]:
    """Return the checked ``n``, ``s``, ``m`` and load ``d``, by default the least possible
    load ``s+m``. Raise a ValueError if a value is out of range, or ``d < s+m``."""
    n = _require.integer("n", n, 1)
    s = _require.integer("stragglers", stragglers, 0)
    m = _require.integer("slices", slices, 1)
    if s + m > n:
        raise ValueError(
            f"stragglers + slices = {s} + {m} children are needed, but n = {n}"
        )
    d = s + m if load is None else _require.integer("load", load, s + m, n)
    return n, s, m, d
