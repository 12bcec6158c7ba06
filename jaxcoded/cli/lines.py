"""What ranks print, on its way through Open MPI's mpirun, which says whose it is: whole lines."""

import contextlib
import os
import re
import select
import threading
from typing import IO

_WHOSE = rb"\[[0-9]{1,9}\]<std(?:out|err)>: "
# where a rank calls MPI_Abort it prints the zero byte at the end of its own words
_NOTHING = re.compile(_WHOSE + rb"\0+(?=\[|\Z)")
# what a rank has not ended by a newline is followed by another's; but a rank may print what a job of its own does
_GLUED = re.compile(rb"(?!\A)(?<!>: )(?=" + _WHOSE + rb")")


def whole(line: bytes) -> bytes:
    """What mpirun has made of a line, as a line of each rank.

    Example:
        >>> from jaxcoded.cli.lines import whole
        >>> whole(b"[2]<stdout>: half of [0]<stdout>: a line")
        b'[2]<stdout>: half of \\n[0]<stdout>: a line\\n'
    """
    line = _NOTHING.sub(b"", line).replace(b"\0", b"")
    line = _GLUED.sub(b"\n", line)
    return line + b"\n" if line and not line.endswith(b"\n") else line


class HandedOn:
    """The lines that come are written to a file descriptor, while somebody reads it.

    Args:
        pipe: from which they come.
        to: where they are written.
    """

    def __init__(self, pipe: IO[bytes], to: int) -> None:
        self._pipe, self._to = pipe, to
        self._writes = False
        self._thread = threading.Thread(target=self._hand_on, daemon=True)
        self._thread.start()

    def _hand_on(self) -> None:
        with self._pipe, contextlib.suppress(OSError):
            for line in self._pipe:
                left = whole(line)
                self._writes = True
                while left:
                    select.select([], [self._to], [])  # others may have it not block
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(self._to, left) :]
                self._writes = False

    def end(self, seconds: float) -> None:
        """Wait until all is written, however long whoever reads it takes; but no longer than this for more, as
        what mpirun has started on other hosts may keep the pipe open."""
        self._thread.join(seconds)
        while self._thread.is_alive() and self._writes:
            self._thread.join(seconds)
