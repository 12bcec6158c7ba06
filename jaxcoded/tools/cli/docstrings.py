"""Read docstrings from the sources, since ``python -OO`` does not keep docstrings in
memory."""

import ast
import inspect
import pathlib
import textwrap


def of_module(path: str | pathlib.Path) -> str:
    """Return the docstring of the module in a file, which is not imported."""
    source = pathlib.Path(path).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def of(what: type | object) -> str:
    """Return the docstring of a function or a class."""
    source = textwrap.dedent(inspect.getsource(what))  # type: ignore[arg-type]
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    return ast.get_docstring(definition) or ""
