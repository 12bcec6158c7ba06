"""Test shared memory between processes without groups: page.cpp alone."""

import os
import pathlib
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "jaxcoded" / "transport" / "cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    out = tmp_path_factory.mktemp("page") / "page"
    names = ["page", "pool", "sealed", "shared_memory"]
    sources = [HERE / "page.cpp", *(SOURCES / f"{name}.cpp" for name in names)]
    options = ["-std=c++20", "-O2", "-pthread", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, *sources, "-o", out], check=True, timeout=100)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "withdrawn",
        "number",
        "descriptor",
        "ptracer",
        "memory",
        "without",
        "killed",
        "reused",
        "unnoted",
    ],
)
def test_page(program, what):
    # not with a sanitizer, which needs more address space than a case here allows
    plain = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(
        [program, what],
        env=plain,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
