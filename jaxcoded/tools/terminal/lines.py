"""Read the output of ranks from Open MPI's mpirun, which marks each piece of output with
its rank."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from typing import IO

from jaxcoded.tools.terminal import output
from jaxcoded.tools.terminal.display import File, Source, Terminal, size

_PIECE = re.compile(
    rb'<(stdout|stderr|stddiag)( (?:jobid|nspace)="[^"<>]*")?(?: rank="([0-9]{0,9})[^"<>]*")?[^<>]*>([^<]*)</\1>\n?'
    rb"|</?[a-z]+run>\n"
)
# some versions write & as &ap;, and bytes above 127 as negative numbers
_REFERENCE = re.compile(rb"&(?:(lt)|(gt)|(am?p)|#(-?[0-9]{1,9}));")


def pieces(line: bytes) -> Iterator[tuple[Source, bytes]]:
    """Yield the output of ranks in a line of mpirun, in pieces."""
    end, mpirun = 0, Source(-1, "", False)
    for piece in _PIECE.finditer(line):
        yield mpirun, line[end : piece.start()]
        end = piece.end()
        stream, named, rank, text = piece.groups(b"")
        source = Source(int(rank or -1), stream.decode(), bool(named))
        # mpirun's own output has a meaningless rank
        yield mpirun if stream == b"stddiag" else source, _REFERENCE.sub(_byte, text)
    yield mpirun, line[end:]


def _byte(reference: re.Match[bytes]) -> bytes:
    less, greater, _, number = reference.groups()
    if number:
        return bytes([int(number) & 255])
    return b"<" if less else b">" if greater else b"&"


class HandedOn:
    """Pass the output in two pipes on to standard output and standard error, which share a display if they are the same
    file."""

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        same = os.path.sameopenfile(1, 2)
        first = _display(1, same)
        second = first if same else _display(2, same)
        self._reads = {}
        for pipe, display in ((stdout, first), (stderr, second)):
            thread = threading.Thread(target=_read, args=(pipe, display), daemon=True)
            thread.start()
            self._reads[thread] = display

    def end(self, seconds: float) -> None:
        """Wait until everything that has arrived is written, even if the reader is slow. Wait at most ``seconds``
        for further data, since mpirun's processes on other hosts may keep a pipe open."""
        for thread, display in self._reads.items():
            thread.join(seconds)
            while thread.is_alive() and display.busy():
                thread.join(seconds)
        for display in set(self._reads.values()):
            display.end()


def _read(pipe: IO[bytes], display: File) -> None:
    with pipe, contextlib.suppress(OSError):
        for line in pipe:
            for source, data in pieces(line):
                # a rank in MPI_Abort ends its message with a zero byte, and mpirun adds more zero bytes
                if data := data.replace(b"\0", b""):
                    display.add(source, data)


def _display(to: int, alone: bool) -> File:
    return Terminal(to, alone) if output.is_terminal(to) else File(to)


def variables(ranks: int) -> dict[str, str]:
    """Return environment variables with the part of the terminal's size that each of this many ranks gets. Return
    no variables without a terminal, or if COLUMNS or LINES is already set."""
    for number in (1, 2):
        if output.is_terminal(number) and not {"COLUMNS", "LINES"} & {*os.environ}:
            width, height = size(number)
            width -= len(Source(ranks - 1, "stderr", True).prefix)
            return {"COLUMNS": str(max(1, width)), "LINES": str(height)}
    return {}
