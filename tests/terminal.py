"""Run a process on a terminal that the test controls."""

import codecs
import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

# A program that makes standard input the terminal of a new session. As in a terminal's shell,
# no signal of the keyboard is ignored, although a job in the background ignores some.
_TAKE = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "[signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGQUIT)]; "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def resize(screen, rows, columns):
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


@contextlib.contextmanager
def started(command, *, rows=24, columns=80, **options):
    """Yield the process and a file descriptor. Reading it gives the process's output on
    its terminal, and writing to it types. Closing it hangs the terminal up.
    """
    keyboard, screen = os.openpty()
    resize(screen, rows, columns)
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
        with contextlib.suppress(OSError):  # the test has already closed it
            os.close(keyboard)


class Screen:
    """The screen of a terminal, which understands only the allowed sequences; any other sequence raises an error."""

    def __init__(self, rows=24, columns=80):
        self._columns = columns
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._left = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def lines(self):
        """Return the lines that are not empty."""
        rows = ["".join(row).rstrip() for row in self._cells]
        return list(filter(None, rows))

    def feed(self, data):
        text = self._left + self._decoder.decode(data)
        self._left = re.search(r"(?:\x1b(?:\[[0-9;]*)?)?\Z", text)[0]
        text = text[: len(text) - len(self._left)]
        for sequence, character in re.findall(
            r"\x1b\[([0-9;]*[A-Za-z])|(.)", text, re.DOTALL
        ):
            if sequence:
                self._moves(sequence[-1], int(sequence[:-1].rpartition(";")[2] or 0))
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._down()
            else:
                assert character.isprintable(), repr(text)
                if self._column == self._columns:
                    self._column = 0
                    self._down()
                self._cells[self._row][self._column] = character
                self._column += 1

    def _down(self):
        self._row += 1
        if self._row == len(self._cells):
            self._row -= 1
            self._cells = [*self._cells[1:], [" "] * self._columns]

    def _moves(self, which, number):
        if which == "A":
            self._row = max(0, self._row - max(1, number))
        elif which == "J" and number == 0:
            here = self._cells[self._row]
            here[self._column :] = " " * (self._columns - self._column)
            for row in self._cells[self._row + 1 :]:
                row[:] = " " * self._columns
        else:
            assert which == "m", which
