"""Without mpi4jax rounds are still ordered, differentiated and batched."""

import pathlib
import subprocess
import sys

BLOCKED = """
import runpy, sys
sys.modules["mpi4jax"] = None  # importing it fails
"""
SMOKE = pathlib.Path(__file__).parent / "jax_smoke.py"
OTHER = """
import jaxcoded
from mpi4py import MPI
try:
    jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="mpi4jax")
except ValueError as error:
    print(error)
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_does_not_need_it():
    words = run(f"runpy.run_path({str(SMOKE)!r}, run_name='__main__')")
    assert words.endswith("engine: passed\n")


def test_errors_name_the_missing_transport():
    words = run(OTHER)
    assert words.startswith('transport="mpi4jax" cannot be used: mpi4jax is not inst')
    assert "pip install mpi4jax" in words
