"""A process with a terminal of its own, which is this test."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios

# what makes standard input the terminal of a process that has begun a session
_TAKE = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@contextlib.contextmanager
def started(command, *, rows=24, columns=80, **options):
    """Yield the process and a file descriptor: reading it gives what the process writes to its terminal, and what is
    written to it is typed. Closing the descriptor hangs the terminal up."""
    keyboard, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    streams = {"stdin": screen, "stdout": screen, "stderr": screen} | options
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE, *command], start_new_session=True, **streams
    )
    os.close(screen)
    try:
        yield process, keyboard
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(keyboard)
