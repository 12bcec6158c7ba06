"""Warnings that point to the line of the user's program that calls this library."""

import sys
import warnings


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the innermost line outside this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals["__name__"].startswith("jaxcoded."):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)
