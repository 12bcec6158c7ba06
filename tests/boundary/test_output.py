"""Fuzz the output of ranks, and how mpirun passes it on."""

import re

from documents import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

from jaxcoded.tools.terminal import display, lines
from jaxcoded.tools.terminal.page import Page

# pieces of output that move a cursor, or look like mpirun's own messages
PARTS = st.binary(max_size=8) | st.sampled_from(
    [
        *(
            b"\x1b",
            b"\x1b[",
            b"\x1b]",
            b"9" * 5000,
            b"2",
            b";",
            b"A",
            b"B",
            b"K",
            b"J",
            b"m",
        ),
        *(
            b"\r",
            b"\n",
            b"\b",
            b"\x1b[3A",
            b"\x1b[?25l",
            b"\x1b[1;31m",
            b"\xe4\xb8",
            b"&#",
            b"&lt;",
        ),
        *(
            b'<stdout rank="',
            b'jobid="1" ',
            b'">',
            b"</stdout>",
            b"</prterun>\n",
            b"<",
            b"-1;",
        ),
    ]
)
written = st.lists(PARTS, max_size=20)


@fuzzed
@given(written)
def test_any_output_of_ranks(parts):
    page, rows = Page(), []
    for part in parts:
        rows += page.write(part)
        for row in page.rows:
            assert "\n" not in row and "\r" not in row
            shown = display.cropped(row, 9)
            plain = re.sub(r"\x1b\[[0-9;:<=>?]*[ -/]*m", "", shown)
            assert display.cell_len(plain) <= 9
            assert "\x1b" not in plain
    assert all("\n" not in row for row in [*rows, *page.end()])


@fuzzed
@given(written)
def test_any_output_passed_on_by_mpirun(parts):
    for line in b"".join(parts).splitlines(keepends=True):
        found = [*lines.pieces(line)]
        assert all(-1 <= source.rank < 10**9 for source, _ in found)
        if b"</" not in line:
            assert b"".join(data for _, data in found) == line


def marked(rank, stream, data):
    """Mark a rank's output as Open MPI 5 does."""
    out = b""
    for byte in data:
        named = {38: b"&ap;", 60: b"&lt;", 62: b"&gt;"}.get(byte)
        signed = byte - 256 * (byte > 127)
        plain = 32 <= byte < 127
        out += named or (bytes([byte]) if plain else b"&#%03d;" % signed)
    return b'<%s jobid="1" rank="%d">%s\0\0</%s>\n' % (stream, rank, out, stream)


@fuzzed
@given(st.integers(0, 10**6), st.sampled_from([b"stdout", b"stderr"]), st.binary())
@example(3, b"stdout", b"<stdout>&#010;")
def test_what_ranks_print_comes_out_of_it(rank, stream, data):
    source = display.Source(rank, stream.decode(), True)
    found = [piece for piece in lines.pieces(marked(rank, stream, data)) if piece[1]]
    assert found == [(source, data + b"\0\0")]
