"""The functions and tests of the claims in docs/trust.md exist, and the reference
covers everything public.
"""

import ast
import pathlib
import pkgutil
import pydoc
import re

import jaxcoded
from jaxcoded import codes

ROOT = pathlib.Path(__file__).parents[1]
TRUST = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
PAGE = TRUST[TRUST.index("## Claims and their tests") :]


def test_the_functions_are_there():
    names = set(re.findall(r"`jaxcoded\.([\w.]+)`", PAGE))
    assert len(names) > 15
    for name in names:
        pkgutil.resolve_name(f"jaxcoded.{name}")  # imports the module if needed


def test_the_tests_are_there():
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 30
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {test for path, test in named if path == file} <= there


def test_every_claim_names_a_test_or_says_that_it_has_none():
    lines = [line for line in PAGE.splitlines() if "| `jaxcoded." in line]
    assert len(lines) > 25
    for line in lines:
        assert ".py::test_" in line or "not a test" in line, line


def test_every_line_has_a_figure_or_a_dash():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4 and all(cells), row


def test_everything_public_is_in_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"^::: jaxcoded\.([\w.]+)$", text, re.MULTILINE))
    named |= {name.partition(".")[0] for name in named}  # modules of named functions
    assert set(jaxcoded.__all__) - {"__version__"} <= named
    assert {f"codes.{name}" for name in codes.NAMES} <= named


def test_pydoc_prints_what_the_reference_names():
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
        for name in names:
            first = (pydoc.locate(name).__doc__ or "").partition("\n")[0]
            assert first and first in pydoc.render_doc(name), name
        shown = re.findall(r"`python -m pydoc ([\w.]+)`", text)
        assert bool(shown) == bool(names) and set(shown) <= set(names), page.name
