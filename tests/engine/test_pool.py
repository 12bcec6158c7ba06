"""Test memory that is used again: pool.cpp alone."""

import os
import pathlib
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "jaxcoded" / "transport" / "cpp"


@pytest.mark.slow
def test_programs_that_repeat_themselves_need_no_new_memory(tmp_path):
    """The lengths may alternate, and the pool keeps no more memory than was in use at
    one time.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = [HERE / "pool.cpp", SOURCES / "pool.cpp", SOURCES / "reserve.cpp"]
    options = ["-std=c++20", "-O1", "-pthread", f"-I{SOURCES}"]
    program = tmp_path / "pool"
    subprocess.run(
        [compiler, *options, *sources, "-o", program], check=True, timeout=100
    )
    done = subprocess.run(
        [program, "1000"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
