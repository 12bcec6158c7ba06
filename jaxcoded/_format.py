"""Format numbers and tables as text."""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def unit(largest: float) -> tuple[float, str]:
    """Return the unit in which to write this number of seconds: the unit's length in
    seconds, and its name."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if largest >= size:
            return size, name
    return 1e-6, "us"


def seconds(value: float, endless: str = "unknown") -> str:
    """Return seconds as text with three digits and a unit, or ``endless`` if not
    finite."""
    if not math.isfinite(value):
        return endless
    if abs(value) < 1e-9:
        return "0 s"
    size, name = unit(abs(value))
    return f"{value / size:.3g} {name}"


def size(count: float) -> str:
    """Return a number of bytes as text with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks as text, such as ``"ranks 0-2, 5"``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    only = len(spans) == 1 and len(spans[0]) == 1
    return f"rank{'s' * (not only)} {text}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the columns of all rows aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def fraction(value: Fraction) -> str:
    """Return a fraction as text if this text is short, otherwise a decimal number with
    four decimals."""
    text = str(value)
    return text if len(text) <= 7 else f"{float(value):.4f}"


def s(count: int) -> str:
    """Return the plural ending of a noun."""
    return "s" * (count != 1)
