import codecs
import re

TOKEN = re.compile(
    r"(?P<text>[^\x1b\r\n\b]+)"
    r"|(?P<control>[\r\n\b])"
    r"|\x1b\[(?P<number>[0-9]{0,9})[0-?]*[ -/]*(?P<command>[@-~])"
    r"|(?P<string>\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))"  # a control string, such as a link
    r"|\x1b[ -/]*[0-~]"
)
# a token that has not arrived completely
_CUT = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z")
_LONGEST = 4096  # the most characters of an incomplete control sequence
_MOST_ROWS = 100
_HIDE_CURSOR = "\x1b[?25l"
_REDRAWN = 10  # rows that a program is likely to redraw if it hides the cursor
RESET = "\x1b[0m"


class Page:
    """Rows of text in which a cursor moves. After a carriage return a program rewrites its row, and it can also
    move up and rewrite rows above.

    Text after a carriage return replaces the whole row, since progress bars write the whole row. With ``foresees``,
    expect more bars below a bar, and keep the rows above changeable for longer."""

    def __init__(self, foresees: bool = False) -> None:
        self._foresees = foresees
        # rows that may still change: the last row, and rows that the cursor may still reach
        self.rows = [""]
        self._rewritten = False
        self._at = 0  # the cursor's row
        self._over = False  # whether text replaces the cursor's row
        self._returned = False  # whether a carriage return is the reason for `_over`
        self._reach = 0  # how far above the last row the cursor may go
        self._style = ""  # how the text looks
        self._cut = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def write(self, data: bytes) -> list[str]:
        """Process data that a program has written, and return the rows that cannot
        change any more."""
        text = self._cut + self._decoder.decode(data)
        cut = _CUT.search(text)
        self._cut = cut[0] if cut and len(cut[0]) < _LONGEST else ""
        for token in TOKEN.finditer(text, 0, len(text) - len(self._cut)):
            if token["text"] or token["string"]:
                self._put(token[0])
            elif token["control"]:
                self._control(token[0])
            elif token["command"]:
                self._command(token[0], token["number"], token["command"])
        ended = max(0, min(self._at, len(self.rows) - 1 - self._reach))
        out, self.rows = self.rows[:ended], self.rows[ended:]
        self._at -= ended
        return out

    def state(self) -> list[str]:
        """Return the rows from the cursor's row on, if some row was rewritten."""
        return self.rows[self._at :] if self._rewritten else []

    def end(self) -> list[str]:
        """Return the remaining rows."""
        self.rows[self._at] += RESET * bool(self._style)
        out, self.rows = self.rows, [""]
        while out and not out[-1].strip():
            out.pop()
        return out

    def _put(self, text: str) -> None:
        if self._returned:
            self._rewritten = True
            self._reach = max(self._reach, int(self._foresees))
        if self._over:
            self.rows[self._at] = self._style
        self._over = self._returned = False
        self.rows[self._at] += text

    def _control(self, which: str) -> None:
        row = self.rows[self._at]
        if which == "\r":
            self._over = self._returned = True
        elif which == "\n":
            # otherwise rows of other ranks, which follow, would have this style, too
            self.rows[self._at] += RESET * bool(self._style and row)
            self._go(1)
        elif not self._over and "\x1b" not in row:
            self.rows[self._at] = row[:-1]

    def _command(self, words: str, number: str, which: str) -> None:
        count = min(max(1, int(number or 1)), _MOST_ROWS)
        if which == "m":
            style = "" if number in ("", "0") else self._style + words
            self._style = style if len(style) < _LONGEST else words
            if not self._over:
                self.rows[self._at] += words
        elif which == "K" and (self._over or number in ("1", "2")):
            self.rows[self._at], self._over = "", True
        elif which == "J" and number in ("", "0"):
            del self.rows[self._at + 1 :]
            if self._over:
                self.rows[self._at] = ""
        elif which in "AF":
            self._go(-count)
        elif which in "BE":
            self._go(count)
        elif words == _HIDE_CURSOR and self._foresees:
            self._reach = max(self._reach, _REDRAWN)
        elif which == "G" and count == 1:
            self._control("\r")

    def _go(self, rows: int) -> None:
        """Move the cursor this many rows down (negative: up), to the beginning of the
        row."""
        self._at += rows
        self._over, self._returned = True, False
        self.rows += [""] * (self._at + 1 - len(self.rows))
        if rows < 0:
            self._rewritten = True
            above = len(self.rows) - 1 - self._at
            self._reach = min(max(self._reach, above), _MOST_ROWS)
            self._at = max(0, self._at)
