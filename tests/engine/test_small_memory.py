"""Small allocations of the engine fail, one at a time."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from test_node_memory import measurable

HERE = pathlib.Path(__file__).parent


def test_a_failed_allocation_leaves_no_damage(tmp_path):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    if not measurable():
        pytest.skip("a sanitizer has memory of its own")
    library = tmp_path / "libmalloc.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", HERE / "malloc.c", "-o", library, "-ldl"],
        check=True,
        timeout=100,
    )
    done = subprocess.run(
        [sys.executable, HERE / "small_memory.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compared, shared, offered, alerted = map(int, done.stdout.split())
    assert compared > 20 and shared > 2 and offered > 0 and alerted > 2
