"""The ranks' output reaches a terminal at once, and files as whole lines."""

import contextlib
import os
import select
import subprocess
import sys
import time
from itertools import chain

import pytest
import terminal
from launch import ROOT, limited, slowness
from test_run import open_mpi

from jaxcoded.tools.terminal import display, lines
from jaxcoded.tools.terminal.page import Page

RED, RESET = "\x1b[31m", "\x1b[0m"
RANK0 = display.Source(0, "stdout", True)


@pytest.mark.parametrize(
    ("written", "ended", "others"),
    [
        ("a\nb\n\nc", ["a", "b", ""], ["c"]),
        ("dots: .|.|.", [], ["dots: ..."]),
        ("10%\r20%\r", [], ["20%"]),
        ("\r 10%|\r 20%|\n", [], [" 20%"]),
        ("\r 10%|\r 20%|\nnext\n", [" 20%"], ["next"]),
        ("\r 10%|\r      \r|next\n", [], ["next"]),
        ("a longer one\rshort", [], ["short"]),
        ("Windows\r\nlines\r|\n", ["Windows", "lines"], []),
        ("-\b\\\b|\b/", [], ["/"]),
        ("old\r\x1b[Knew", [], ["new"]),
        ("old\x1b[2K\rnew", [], ["new"]),
        ("hidden\x1b[?25l cursor\x1b(B", [], ["hidden cursor"]),
        # output of tqdm that draws two bars, one of which ends
        (
            "\ra 0%|\n|\rb 0%|\x1b[A|\ra 1%|\n|\rb 1%|\x1b[A|\n|\r    |\r|\x1b[A",
            [],
            ["a 1%"],
        ),
        # output of rich that draws two bars
        ("\x1b[?25la 0%\nb 0%|\r\x1b[2K\x1b[1A\x1b[2Ka 1%\nb 1%", [], ["a 1%", "b 1%"]),
        ("\x1b[?25lx\ny\n\x1b[2Az\n\n", [], ["z", "y"]),
        ("\x1b[9Ax\ny\n", [], ["x", "y"]),
        # colours do not reach other lines
        (f"{RED}a\nb{RESET}\n", [f"{RED}a{RESET}", f"{RED}b{RESET}"], []),
        (f"{RED}a", [], [f"{RED}a{RESET}"]),
        ("\x1b|[|3|1|mred", [], [f"{RED}red{RESET}"]),
        ("\x1b]8;;http://a\x1b\\|link\n", ["\x1b]8;;http://a\x1b\\link"], []),
        ("\x1b", [], []),
        ("\x1b]0;" + 9000 * "x" + "\n", ["0;" + 9000 * "x"], []),
    ],
)
def test_rows_of_a_page(written, ended, others):
    """The rows of a page do not depend on how the output is cut into pieces."""
    assert drawn([word.encode() for word in written.split("|")]) == (ended, others)
    whole = written.replace("|", "").encode()
    for size in (1, 2, len(whole)):
        cut = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert [*chain(*drawn(cut))] == ended + others


def drawn(pieces):
    page = Page(foresees=True)
    return [row for piece in pieces for row in page.write(piece)], page.end()


@pytest.mark.parametrize(
    ("written", "ended", "state"),
    [
        ("a\n\r 10%\r 20%", ["a"], [" 20%"]),
        ("\r 100%\n", [" 100%"], [""]),
        ("a\nb", ["a"], []),
        ("\ra 0%\n\rb 0%\x1b[A\ra 1%", [], ["a 1%", "b 0%"]),
    ],
)
def test_no_line_of_a_file_waits_for_bars_that_are_not_there(written, ended, state):
    page = Page()
    assert page.write(written.encode()) == ended
    assert page.state() == state


def test_bytes_stay_as_they_are():
    text = "é😀".encode() + b"\xff\xfe\n"
    for size in (1, 2, 3, 100):
        cut = [text[start : start + size] for start in range(0, len(text), size)]
        (row,), _ = drawn(cut)
        assert row.encode("utf-8", "surrogateescape") == text[:-1]


MPIRUN = display.Source(-1, "", False)


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        (
            b'<stdout jobid="1" rank="12">a &lt;b&gt; &amp; &ap; &#-61;&#169;&#010;\0\0</stdout>\n',
            [(("12", "stdout", True), "a <b> & & é\n".encode() + b"\0\0")],
        ),
        (b'<stderr nspace="x" rank="0">\0</stderr>\n', [((0, "stderr", True), b"\0")]),
        # from a rank that another rank has started
        (b'<stdout rank="0">a</stdout>\n', [((0, "stdout", False), b"a")]),
        (b'<stddiag rank="0">lost&#010;</stddiag>\n', [(MPIRUN, b"lost\n")]),
        (b"<prterun>\n", []),
        (b"</prterun>\n", []),
        (b"if a < b:\n", [(MPIRUN, b"if a < b:\n")]),
        (
            b'half<stderr jobid="1" rank="3">x</stderr>\n',
            [(MPIRUN, b"half"), ((3, "stderr", True), b"x")],
        ),
    ],
)
def test_pieces_of_mpirun(line, pieces):
    found = [(source, data) for source, data in lines.pieces(line) if data]
    assert found == [((int(piece[0]), *piece[1:]), data) for piece, data in pieces]


@contextlib.contextmanager
def shown(rows, columns, **options):
    """Yield a terminal in this process, and a function that reads its screen when it
    shows something.
    """
    keyboard, there = os.openpty()
    terminal.resize(there, rows, columns)
    screen = terminal.Screen(rows, columns)
    on_it = display.Terminal(there, **options)

    def until(true):
        wait(keyboard, screen, true)
        return screen.lines()

    try:
        yield on_it, until
    finally:
        on_it.end()
        os.close(keyboard)
        os.close(there)


def wait(keyboard, screen, true):
    """Follow a terminal until ``true`` holds for its screen."""
    end = time.monotonic() + 60 * slowness()
    while not true(screen.lines()):
        assert time.monotonic() < end, screen.lines()
        if select.select([keyboard], [], [], 0.1)[0]:
            screen.feed(os.read(keyboard, 1 << 16))


@pytest.mark.parametrize(("rows", "columns"), [(6, 20), (50, 200)])
def test_rows_that_do_not_fit_are_cut(rows, columns):
    with shown(rows, columns) as (screen, until):
        for rank in range(9):
            source = display.Source(rank, "stderr", True)
            screen.add(source, f"\r\x1b[1m\u4e00\t{rank}% {'=' * 50}".encode())
        if columns > 100:
            bars = [
                f"[{number}]<stderr>: \u4e00 {number}% {'=' * 50}"
                for number in range(9)
            ]
        else:  # one column stays free, and the first character takes two columns
            bars = [f"[{number}]<stderr>: \u4e00 {number}%" for number in range(4)]
            bars.append("... and 5 lines mor")
        assert until(lambda value: value == bars)
        screen.add(RANK0, b"a line\n")
        assert until(lambda value: value == ["[0]<stdout>: a line", *bars][-rows:])


def test_where_other_output_goes_elsewhere_one_row_is_redrawn():
    with shown(6, 40, alone=False) as (screen, until):
        for rank in range(3):
            screen.add(display.Source(rank, "stderr", True), b"\r10%")
        screen.add(display.Source(1, "stderr", True), b"\r20%")
        assert until(lambda rows: "20%" in "".join(rows)) == ["[1]<stderr>: 20%"]


def test_states_of_bars_are_written_to_files_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(display.File, "_every", 0.01)
    path = tmp_path / "log"
    with path.open("wb") as file:
        to = display.File(file.fileno())
        for state in range(3):
            to.add(RANK0, b"\r%d%%" % state)
            end = time.monotonic() + 60 * slowness()
            while f"{state}%" not in path.read_text():
                assert time.monotonic() < end
                time.sleep(0.01)
        to.add(display.Source(1, "stdout", True), b"no line yet")
        to.end()
    states = [f"[0]<stdout>: {each}%" for each in (0, 1, 2, 2)]
    assert path.read_text().splitlines() == [*states, "[1]<stdout>: no line yet"]


BARS = """
from mpi4py import MPI
import os, pathlib, sys, time

comm, there = MPI.COMM_WORLD, pathlib.Path(sys.argv[1])
rank = comm.rank

def until(name):
    while not (there / name).exists():
        time.sleep(0.02)
    comm.Barrier()

def show(text, file=sys.stderr):
    print(text, end="", file=file, flush=True)

for percent in range(10, 40, 10):
    show(f"\\rrank {rank}: {percent}%")
if rank == 0:
    show("name? ", sys.stdout)
until("1")
if rank == 1:
    print("a whole line", flush=True)
show(f"\\rrank {rank}: 50%")
until("2")
show(f"\\rrank {rank}: 100%\\n")
if rank == 0:
    show(f"Ada, {os.environ.get('COLUMNS')}\\n", sys.stdout)
comm.Barrier()
"""


def started(tmp_path, *options):
    program = tmp_path / "program.py"
    program.write_text(BARS)
    limit = limited(60)
    words = ["-n", 2, "--timeout", limit["JAXCODED_MPIRUN_TIMEOUT"], *options]
    command = [sys.executable, "-m", "jaxcoded", "run", *words, program, tmp_path]
    return list(map(str, command)), limit


@pytest.mark.mpi
def test_bars_of_ranks_on_a_terminal(tmp_path, monkeypatch):
    if not open_mpi():
        pytest.skip("MPICH does not say where what a rank has written ends")
    for name in ("COLUMNS", "LINES", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    command, environment = started(tmp_path)
    environment = {**environment, "TERM": "xterm"}
    screen = terminal.Screen(12, 60)
    with terminal.started(command, rows=12, columns=60, cwd=ROOT, env=environment) as (
        job,
        keyboard,
    ):

        def until(percent, *others):
            bars = [
                f"[{number}]<stderr>: rank {number}: {percent}%" for number in range(2)
            ]
            # in the order of the ranks
            wanted = [*others[:1], bars[0], *others[1:], bars[1]]
            wait(keyboard, screen, lambda rows: sorted(rows) == sorted(wanted))
            return screen.lines()

        until(30, "[0]<stdout>: name?")
        (tmp_path / "1").touch()
        found = until(50, "[1]<stdout>: a whole line", "[0]<stdout>: name?")
        assert found[0] == "[1]<stdout>: a whole line"
        (tmp_path / "2").touch()
        until(100, "[1]<stdout>: a whole line", f"[0]<stdout>: name? Ada, {60 - 13}")
        assert job.wait(60 * slowness()) == 0


@pytest.mark.mpi
def test_bars_of_ranks_in_a_file(tmp_path):
    if not open_mpi():
        pytest.skip("MPICH does not say where what a rank has written ends")
    command, environment = started(tmp_path)
    for name in "12":
        (tmp_path / name).touch()
    job = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert sorted(job.stderr.splitlines()) == [
        f"[{number}]<stderr>: rank {number}: 100%" for number in range(2)
    ]
    columns = os.environ.get("COLUMNS")
    assert sorted(job.stdout.splitlines()) == [
        f"[0]<stdout>: name? Ada, {columns}",
        "[1]<stdout>: a whole line",
    ]
