"""Replace characters that the encoding of a terminal, a pipe or a file lacks.

The library's own texts are ASCII, because a user's program may print them anywhere. The command line also uses
other characters, if standard output can encode them.
"""

import codecs
import io
import sys

# Replacements of the characters that the command line, its help and rich's tables may show.
_PLAIN = {
    **dict.fromkeys("–−─━╸╺", "-"),
    "→": "->",
    "…": "...",
    "×": "x",
    "÷": "/",
    "±": "+-",
    "·": "*",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "√": "sqrt",
    "µ": "u",
    "α": "alpha",
    "δ": "delta",
    "ε": "epsilon",
    "κ": "kappa",
    "λ": "lambda",
    # a character in the output of another program that cannot be decoded
    "\N{REPLACEMENT CHARACTER}": "?",
}
_ERRORS = "jaxcoded-plain"


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace one character. This is an error handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    # a byte of a file name, which is written unchanged
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    other = character.encode("ascii", "backslashreplace").decode()
    return _PLAIN.get(character, other), error.start + 1


codecs.register_error(_ERRORS, _replaced)


def use() -> None:
    """Let standard output and standard error replace characters that they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def words(text: str) -> str:
    """Return the text as standard output will show it, to compute a layout."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, _ERRORS).decode(encoding, "surrogateescape")
