"""`jaxcoded` writes plain text to terminals, pipes and files that cannot show every
character. The library's texts are ASCII, so that any program can print them.
"""

import ast
import io
import itertools
import json
import os
import pathlib
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from commands import main
from launch import ROOT, limited

import jaxcoded
from jaxcoded.tools.cli import plan, report
from jaxcoded.tools.cli.main import COMMANDS

JOB = ["-n3", "--payload=4MB", "--compute=1"]
# the replacements of characters, independent of the library
PLAIN = {
    "→": "->",
    "…": "...",
    "–": "-",
    "−": "-",
    "─": "-",
    "×": "x",
    "÷": "/",
    "±": "+-",
    "κ": "kappa",
    "δ": "delta",
    "λ": "lambda",
    "≥": ">=",
    "·": "*",
}


@pytest.fixture(autouse=True, scope="module")
def one_ranking():
    """Rank the plans once, as planning takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        best = plan.best_plans
        rankings = []

        def once(*arguments, **options):
            if not rankings:
                rankings.append(best(*arguments, **options))
            return rankings[0]

        patch.setattr(plan, "best_plans", once)
        yield


@pytest.fixture
def printed(monkeypatch):
    """Return the bytes that a command prints if standard output has this encoding."""

    def run(arguments, encoding, status=0):
        with monkeypatch.context() as patch:
            streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
            patch.setattr("sys.stdout", streams[0])
            patch.setattr("sys.stderr", streams[1])
            ended = main(arguments)
            out, err = (
                stream.flush() or stream.buffer.getvalue() for stream in streams
            )
            assert ended == status, err
        return err if status else out

    return run


def words(text):
    """Return the words without the layout: line ends and the lengths of rules differ."""
    return sorted(text.replace("-", " ").split())


HELP = [["--help"], *([name, "--help"] for name in COMMANDS)]
RESULTS = [["plan", *JOB], ["simulate", *JOB, "--rounds=9", "--model=killed(round=3)"]]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [*HELP, *RESULTS], ids=" ".join)
def test_commands_show_plain_text(arguments, encoding, printed):
    expected = printed(arguments, "utf-8").decode()
    for character, plain in PLAIN.items():
        try:
            character.encode(encoding)
        except UnicodeEncodeError:
            expected = expected.replace(character, plain)
    got = printed(arguments, encoding).decode(encoding)
    assert words(got) == words(expected)


def test_columns_stay_aligned(printed):
    lines = printed(["plan", *JOB], "ascii").decode().splitlines()
    header, rule, *rows = itertools.takewhile(str.strip, lines[2:])
    assert set(rule) == {"-"} and any(row.startswith("->") for row in rows)
    titles = ["strategy", "code", "piece", "step", "+- error", "load", "kappa"]
    starts = list(map(header.index, titles))
    # strategies take several lines
    whole = [row for row in rows if row[starts[2] : starts[2] + 1].strip()]
    assert whole
    for row, start in itertools.product(whole, starts):
        assert row[start - 1] == " " and row[start] != " "


def test_json_is_the_same(printed):
    asked = ["plan", *JOB, "--json"]
    assert json.loads(printed(asked, "ascii")) == json.loads(printed(asked, "utf-8"))


@pytest.mark.slow
def test_on_a_terminal():
    """A terminal gets plain text, also in the progress bar."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "TERM": "xterm"}
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxcoded", "plan", *JOB],
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            text += (more := os.read(ours, 1 << 16))
        except OSError:  # how a terminal ends
            break
        if not more:
            break
    os.close(ours)
    assert job.wait(60) == 0
    assert text.isascii() and b"planning" in text and b"kappa" in text
    assert b"\\u" not in text


def test_a_file_name_that_is_no_text(printed, tmp_path):
    path = f"{tmp_path}/steps\udcff.png"
    asked = ["simulate", *JOB, "--rounds=2", f"--picture={path}"]
    assert b"/steps\xff.png" in printed(asked, "utf-8")
    assert os.path.exists(path)


@pytest.mark.parametrize(
    "error",
    [UnicodeEncodeError("ascii", "x", 0, 1, "why"), np.linalg.LinAlgError("why")],
)
def test_an_error_of_python_is_no_wrong_use(error, printed, monkeypatch):
    def fails(**_):
        raise error

    monkeypatch.setattr(report.command, "callback", fails)
    assert b"why" in printed(["report", __file__], "utf-8", status=1)


PACKAGE = pathlib.Path(jaxcoded.__file__).parent


def words_of(path):
    """Return the texts in a module, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    no_words = {
        statement.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in no_words:
            yield str(node.value)


def test_the_words_of_the_library_are_ascii():
    """A user's program may print errors, warnings and plans to any terminal or file."""
    terminals = {
        "terminal",
        "launch",
        "doctor",
        "report",
        "cli",
    }  # tools
    modules = [
        module
        for module in PACKAGE.rglob("*.py")
        if module.parent.name not in terminals
    ]
    assert len(modules) > 80
    read = {"µs"}  # text that a user may write
    texts = {module: set(words_of(module)) - read for module in modules}
    sources = [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]
    assert sources
    for path in sources:
        lines = path.read_text(encoding="utf-8").splitlines()
        code = "\n".join(line.partition("//")[0] for line in lines)
        texts[path] = re.findall(r'"(?:[^"\\\n]|\\.)*"', code)
    assert not {
        (path.name, word)
        for path in texts
        for word in texts[path]
        if not word.isascii()
    }


PROGRAM = """
import jax.numpy as jnp, jaxcoded
from mpi4py import MPI
with jaxcoded.CodedGroup(MPI.COMM_WORLD) as group:
    print(group.plan, group.plan.describe())
plan = jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3))
with jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Uncoded()) as group:
    jaxcoded.coded_allreduce(jnp.ones(3), group).block_until_ready()
    print(plan.describe(), group.telemetry().summary())
    try:
        group.batch(-1)
    except ValueError as error:
        print(error)
"""


@pytest.mark.mpi
def test_jobs(tmp_path):
    """The texts of `run`, whose ranks print library texts, `doctor` and `bench` are
    plain.
    """
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    for arguments, text in (
        (
            ["run", "-n", "2", str(path)],
            "the number of examples, must be an integer from 1 to",
        ),
        (["doctor", "-n", "2"], "exact on all ranks"),
        (["bench", "-n", "2"], "the median link has"),
    ):
        job = subprocess.run(
            [sys.executable, "-m", "jaxcoded", *arguments],
            env=limited(120) | {"PYTHONIOENCODING": "ascii"},
            cwd=ROOT,
            capture_output=True,
            timeout=600,
            check=False,
        )
        assert job.returncode == 0, job.stderr.decode()
        out = job.stdout.decode("ascii")
        assert text in " ".join(out.split()) and "\\u" not in out
