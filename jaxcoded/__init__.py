"""Coded collective operations for JAX over MPI: an all-reduce whose sum is exact
even when some ranks are missing.
"""

import ast as _ast
import importlib as _importlib
import pathlib as _pathlib
from typing import Any as _Any

from jaxcoded import _own_process  # noqa: F401  # records the beginning of the process

# The stub `__init__.pyi` lists the public names, for type checkers and at run time. The
# names are imported on first use (Scientific Python's SPEC 1), so that planning and
# simulation run without an MPI.
_stub = _pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_modules = {
    alias.name: node.module
    for node in _ast.parse(_stub).body
    if isinstance(node, _ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_modules)


def __getattr__(name: str) -> _Any:
    if name not in _modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_modules[name])
    if name in vars(module):
        value = vars(module)[name]
    else:  # the name is a submodule
        value = _importlib.import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
