"""Print results on a terminal, or as plain text of a fixed width."""

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from jaxcoded.tools.terminal import plain

_WIDTH = 120  # columns of text if standard output is not a terminal
_GAP = 2  # spaces between columns
# Open MPI sets this variable for its ranks. To a rank its output looks like a terminal,
# but it is not.
_OPEN_MPI = "OMPI_COMM_WORLD_RANK"


json_option = click.option("--json", is_flag=True, help="Print JSON instead of text.")


def say(words: str = "") -> None:
    """Print a statement. On a terminal it is wrapped, elsewhere it is one line."""
    console = _console()
    console.print(Text(plain.words(words)), soft_wrap=not console.is_terminal)


def code(line: str) -> None:
    """Print a line that the user may copy. It is never wrapped."""
    _console().print(Text(line, "bold"), soft_wrap=True)


def waiting(what: str) -> Status:
    """On a terminal, show what the command waits for."""
    return Console(stderr=True).status(what, spinner="line")


def as_json(value: Any) -> None:
    """Print JSON."""
    print(json.dumps(value, indent=2))


def finite(value: float) -> float | None:
    """Return the number, or None for JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps: Collection[str] = (),  # columns whose texts may take several lines
    # the columns that a narrow terminal omits, the first one first
    extra: Sequence[str] = (),
    best: int | None = None,  # the row to highlight
) -> None:
    """Print a table of rows below a header."""
    columns = {
        name: [plain.words(text) for text in texts]
        for name, *texts in zip(header, *rows)
    }
    widths = {}
    for name, texts in columns.items():
        if name in wraps:  # texts are never broken within a word
            texts = " ".join(texts).split()
        widths[name] = max(map(len, [plain.words(name), *texts]))
    for name in extra:
        if sum(widths[each] + _GAP for each in columns) - _GAP > _console().width:
            del columns[name]
    out = Table(
        *(
            Column(plain.words(name), no_wrap=name not in wraps, min_width=widths[name])
            for name in columns
        ),
        box=box.Box(plain.words(str(box.SIMPLE_HEAD)), ascii=True),
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    for number, row in enumerate(zip(*columns.values())):
        style = "bold green" if number == best else None
        out.add_row(*map(Text, row), style=style)
    show(out)


def show(what: RenderableType) -> None:
    """Print any object that rich can show."""
    console = _console()
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as capture:
        console.print(what)
    # remove the spaces with which rich fills lines
    print(*map(str.rstrip, capture.get().splitlines()), sep="\n")


def is_terminal(number: int) -> bool:
    """Return whether a file descriptor is a terminal with a movable cursor."""
    plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return os.isatty(number) and not plain and _OPEN_MPI not in os.environ


def _console() -> Console:
    # Do not cache the console: standard output may change between calls.
    terminal = sys.stdout.isatty() and _OPEN_MPI not in os.environ
    return Console(
        force_terminal=None if terminal else False,
        width=None if terminal else _WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
