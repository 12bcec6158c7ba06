"""Select some of many similar cases, unless ``--exhaustive`` asks for all."""

import functools

import pytest

# An exhaustive case with two arguments: ``more("killed", 4)``.
more = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


def every(step, cases):
    """Return the cases: every ``step``-th case, beginning with the first, always runs; the others run with
    ``--exhaustive``.
    """
    return [case if i % step == 0 else more(*case) for i, case in enumerate(cases)]
