"""Write the output of ranks to a file or a terminal."""

import contextlib
import os
import select
import threading
import time
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from jaxcoded.tools.terminal.page import RESET, TOKEN, Page

_MOST = 1000  # lines that wait to be written
_HIDDEN = str.maketrans({number: " " for number in (*range(27), *range(28, 32), 127)})


class Source(NamedTuple):
    """A stream of a rank, or of mpirun."""

    rank: int  # the rank, or -1 for mpirun
    stream: str  # "stdout" or "stderr"
    named: bool  # whether each line of the output begins with the rank

    @property
    def prefix(self) -> str:
        return f"[{self.rank}]<{self.stream}>: " if self.named else ""


class File:
    """Write whole lines to a file descriptor, and every 30 s the state of progress bars."""

    _every = 30.0  # seconds between two states
    _pause = 0.0  # seconds for which output is collected before it is written
    _foresees = False  # the argument ``foresees`` of `Page`

    def __init__(self, to: int) -> None:
        self._to = to
        self._pages: dict[Source, Page] = {}
        self._latest: Source | None = None
        self._lines: list[str] = []
        self._states: dict[Source, list[str]] = {}
        self._next_states = time.monotonic() + self._every
        self._changed = threading.Condition()
        self._fresh = self._writing = self._ended = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, source: Source, data: bytes) -> None:
        """Add data that a source has written. Wait if the reader of the output is behind. Raise an OSError if
        the output has no reader any more."""
        with self._changed:
            page = self._pages.setdefault(source, Page(self._foresees))
            self._latest = source
            self._lines += [source.prefix + row for row in page.write(data)]
            self._fresh = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or len(self._lines) < _MOST)
            if self._error:
                raise self._error

    def busy(self) -> bool:
        """Return whether some output is not yet written."""
        return self._error is None and (self._fresh or self._writing)

    def end(self) -> None:
        """Write the last lines, which may be incomplete, and wait until all output is
        written."""
        with self._changed:
            for source, page in sorted(self._pages.items()):
                self._lines += [source.prefix + row for row in page.end()]
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh or self._ended, self._every)
            time.sleep(self._pause)
            try:
                with self._changed:
                    ended, self._fresh, self._writing = self._ended, False, True
                    text, self._lines = self._drawn(self._lines), []
                    self._changed.notify_all()
                self._write(text.encode("utf-8", "surrogateescape"))
            except OSError as error:
                ended, self._error = True, error
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _drawn(self, lines: list[str]) -> str:
        """Return the text to write when these lines have arrived."""
        if time.monotonic() > self._next_states:
            self._next_states = time.monotonic() + self._every
            for source, page in self._pages.items():
                if (state := page.state()) != self._states.get(source, []):
                    self._states[source] = state
                    shown = filter(str.strip, state)
                    lines = [*lines, *(source.prefix + row for row in shown)]
        return _text(lines)

    def _write(self, left: bytes) -> None:
        while left:
            # another process may have made the file descriptor non-blocking
            select.select([], [self._to], [])
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._to, left) :]


class Terminal(File):
    """A terminal, on which rows that may still change are redrawn, below the lines that
    cannot change any more.

    The cursor stays visible behind the last row, where the user's input appears.

    If only one of the two streams goes directly to the terminal (``alone=False``), another program such as `tee` may
    write the other stream to the terminal, and move its cursor. So only the last row of the latest source is
    redrawn."""

    _pause = 0.03
    _foresees = True

    def __init__(self, to: int, alone: bool = True) -> None:
        self._alone = alone
        self._shown: list[str] = []
        super().__init__(to)

    def _drawn(self, lines: list[str]) -> str:
        rows = self._rows()
        if not lines and rows == self._shown:
            return ""
        up = len(self._shown) - 1
        erase = f"\r\x1b[{up}A\x1b[J" if up > 0 else "\r\x1b[J" if up == 0 else ""
        self._shown = rows
        return erase + _text(lines) + "\n".join(rows)

    def _rows(self) -> list[str]:
        width, height = size(self._to)
        rows = [
            cropped(source.prefix + row, width - 1)
            for source, page in sorted(self._pages.items())
            for row in page.rows
            if row.strip() and (self._alone or source == self._latest)
        ]
        if not self._alone:
            return rows[-1:]
        if len(rows) < height or height < 3:
            return rows[: max(1, height - 1)]
        left = len(rows) - (height - 2)
        return [*rows[: height - 2], cropped(f"... and {left} lines more", width - 1)]


def size(terminal: int) -> tuple[int, int]:
    """Return a terminal's numbers of columns and rows, or usual numbers if these are
    unknown."""
    columns, rows = os.get_terminal_size(terminal)
    return columns or 80, rows or 24


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def cropped(row: str, width: int) -> str:
    """Return the part of a row that fits into the width. It keeps colours, but no
    cursor movements."""
    out, left = "", width
    for token in TOKEN.finditer(row):
        if token["text"]:
            text = token[0].translate(_HIDDEN)
            size = min(left, cell_len(text))
            out, left = out + set_cell_size(text, size), left - size
        elif token["command"] == "m":
            out += token[0]
    return out + RESET * ("\x1b" in out)
