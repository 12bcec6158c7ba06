"""The rooms of the package: their imports, and modules that run without MPI."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "jaxcoded"
# Each room may import the rooms before it. All rooms may import modules outside of rooms, which import no room.
CORE = ["codes", "plan", "transport", "group", "collectives"]
ROOMS = CORE + [
    f"tools/{name}"
    for name in (
        *("terminal", "simulator", "planner", "launch", "doctor", "report"),
        "cli",
    )
]


def imports(path):
    """Return the package's modules that a file imports, at any place."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(module):
    first, *rest = module.split(".")
    if first != "jaxcoded" or not rest:
        return None
    name = "/".join(rest[: 1 + (rest[0] == "tools")])
    return name if name in ROOMS else None


@pytest.mark.parametrize("name", ROOMS)
def test_no_room_knows_one_after_it(name):
    files = list((PACKAGE / name).rglob("*.py"))
    assert files
    later = set(ROOMS[ROOMS.index(name) + 1 :])
    for path in files:
        known = {room(module) for module in imports(path)} & later
        if path == PACKAGE / "group" / "group.py":
            known -= {"tools/planner"}  # CodedGroup.auto, see the next test
        assert not known, f"{path} imports {known}"


def test_the_library_imports_no_tool():
    program = (
        "import sys, jaxcoded\n"
        "for name in jaxcoded.__all__: getattr(jaxcoded, name)\n"
        "print(*(name for name in sys.modules if name.startswith('jaxcoded.tools')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_modules_outside_of_rooms_import_none():
    for path in PACKAGE.glob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            assert {room(module) for module in imports(path)} == {None}, path


WITHOUT = """
import sys
for name in ("mpi4py", "mpi4jax", "jax"):
    sys.modules[name] = None  # importing it fails
import importlib, pkgutil
import jaxcoded
for room in ("codes", "plan", "tools.simulator"):
    package = importlib.import_module(f"jaxcoded.{room}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"jaxcoded.{room}.{module.name}")
from jaxcoded.tools.planner.search import best_plans
from jaxcoded.tools.simulator import Layout, Network, simulate
plan = jaxcoded.make_plan(7, jaxcoded.Coded(stragglers=1, fanout=2))
print(plan.describe())
print(simulate(Layout.of(plan), Network(), payload=1e6, work=0.1, rounds=3))
print(best_plans(4, payload=1e6, work=0.1))
"""


def test_plans_need_neither_mpi_nor_jax():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "7 ranks" in done.stdout


def test_names_of_jax_that_may_move_are_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "_jax_compat.py":
            moving = re.findall(
                r"\bjax\.(?:_src|core|interpreters)\b", path.read_text()
            )
            assert not moving, f"{path} uses {moving}"
