"""Logarithmic and linear axes, grids and legends."""

import csv
import dataclasses
import math
import pathlib

from .canvas import Picture

FIGURES = pathlib.Path(__file__).parents[2] / "benchmarks" / "figures"

Row = dict[str, str]


def figures(name: str, **wanted: str) -> list[Row]:
    """Return the stored rows of a benchmark with these values."""
    with (FIGURES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if wanted.items() <= row.items()]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A logarithmic scale from numbers to places."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, number: float) -> float:
        part = math.log(number / self.low) / math.log(self.high / self.low)
        return self.begin + (self.end - self.begin) * part


class Linear(Scale):
    """A linear scale."""

    def __call__(self, number: float) -> float:
        part = (number - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * part


def upright(
    picture: Picture, x: Scale, y: Scale, ticks: dict[float, str], named: bool
) -> None:
    """Draw horizontal lines of a grid, with numbers on their left."""
    for number, says in ticks.items():
        at = y(number)
        picture.path(f"M{x.begin:g} {at:.1f}H{x.end:g}", "grid")
        if named:
            picture.words(x.begin - 7, at + 4, says, "small", "end")


def along(picture: Picture, x: Scale, y: Scale, ticks: dict[float, str]) -> None:
    """Draw vertical lines of a grid, with numbers below, and a frame."""
    low, high = max(y.begin, y.end), min(y.begin, y.end)
    for number, says in ticks.items():
        at = x(number)
        picture.path(f"M{at:.1f} {high:g}V{low:g}", "grid")
        picture.words(at, low + 16, says, "small", "middle")
    picture.box(x.begin, high, x.end - x.begin, low - high, "frame", 0)


def legend(
    picture: Picture,
    x: float,
    y: float,
    entries: list[tuple[str, str, str]],
    widths: list[float],
) -> None:
    """Draw shapes in their colours and their names, next to each other."""
    for (shape, colour, says), width in zip(entries, widths):
        picture.mark(x, y, shape, colour)
        picture.words(x + 13, y + 4.5, says, "small")
        x += width
