"""Warnings point to the user's line, however deep in the library they arise."""

import inspect
import types

import pytest

from jaxcoded._warn import warn


def in_library(function):
    """Return a function as if it stood in the library."""
    names = {"__name__": "jaxcoded.somewhere", "warn": warn}
    return types.FunctionType(function.__code__, names)


def test_a_warning_points_to_the_line_outside_the_library():
    inner = in_library(lambda: warn("words", RuntimeWarning))
    outer = in_library(lambda call: call())
    before = inspect.currentframe().f_lineno
    with pytest.warns(RuntimeWarning, match="words") as caught:
        outer(inner)
    assert (caught[0].filename, caught[0].lineno) == (__file__, before + 2)
