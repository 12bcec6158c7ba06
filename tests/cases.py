"""Fewer of many cases that say much the same, unless all are asked for (``--exhaustive``)."""

import functools

import pytest

# A case that is exhaustive: ``more("killed", 4)`` of two arguments.
more = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


def every(step, cases):
    """Of tuples of arguments each ``step``-th stays, beginning with the first; the others are exhaustive."""
    return [it if i % step == 0 else more(*it) for i, it in enumerate(cases)]
