"""Help, programs and jobs also work with ``python -OO``, which keeps no docstrings and runs no asserts."""

import re
import subprocess
import sys

import pytest
from launch import ROOT, limited

from jaxcoded.tools.cli.main import COMMANDS
from jaxcoded.tools.cli.main import main as group

HELP = """
from jaxcoded.tools.cli.main import COMMANDS, main
assert False, "python -OO runs no asserts"
for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
    main.main(words, "jaxcoded", standalone_mode=False)
"""
SUM = """
import jax, jax.numpy as jnp, jaxcoded
from mpi4py import MPI
if jaxcoded.CodedGroup.__doc__ is not None:
    raise SystemExit("there are docstrings")
for strategy in (jaxcoded.Coded(), jaxcoded.Shared()):
    with jaxcoded.CodedGroup(MPI.COMM_WORLD, strategy) as group:
        batch = group.batch(jnp.arange(8.0))
        step = jaxcoded.coded_value_and_grad(lambda w, x: w * x, group, mean=False)
        value, grad = jax.jit(step)(jnp.float32(2), batch)
        if (float(value), float(grad)) != (56.0, 28.0):
            raise SystemExit(f"{value} and {grad}")
"""


def python(*arguments, **settings):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **settings,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_is_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        group.main(words, "jaxcoded", standalone_mode=False)
    assert python("-OO", "-c", HELP) == capsys.readouterr().out


def test_programs_ask_whether_they_have_a_docstring():
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in ("examples", "benchmarks", "scripts")
        for path in (ROOT / folder).glob("*.py")
    }
    assert any("__doc__" in text for text in texts.values())
    assert not [
        path.name
        for path, text in texts.items()
        if re.search(r"(?<!__doc__ and )__doc__\.", text)
    ]


@pytest.mark.mpi
def test_a_job(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SUM)
    words = ["-OO", "-m", "jaxcoded", "run", "-n", "3", "--plain", str(path)]
    python(*words, env=limited(120) | {"PYTHONOPTIMIZE": "2"}, cwd=ROOT)
