"""What ranks print, on its way through Open MPI's mpirun, which says whose it is: whole lines."""

import contextlib
import os
import re
import select
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


def hand_on(pipe: IO[bytes], to: int) -> None:
    """Write the lines that come to a file descriptor, while somebody reads it."""
    with pipe, contextlib.suppress(OSError):
        for line in pipe:
            left = whole(line)
            while left:
                select.select([], [to], [])  # others may have it not block
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(to, left) :]
