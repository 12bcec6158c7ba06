"""Test memory reserved for turns: reserve.cpp alone."""

import os
import pathlib
import shutil
import subprocess

import pytest
from test_node_memory import measurable

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "jaxcoded" / "transport" / "cpp"


def test_memory_reserved_by_any_thread(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    if not measurable():
        pytest.skip("a sanitizer has memory of its own")
    program = tmp_path / "reserve"
    sources = [HERE / "reserve.cpp", SOURCES / "reserve.cpp"]
    options = ["-std=c++20", "-O1", "-pthread", f"-I{SOURCES}"]
    subprocess.run(
        [compiler, *options, *sources, "-o", program], check=True, timeout=100
    )
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
