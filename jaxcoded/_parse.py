"""Calls written as texts, such as ``"bernoulli(load=4)"``."""

import ast
import math
import re
from collections.abc import Collection
from typing import Any


def parsed(
    what: str, text: str, names: Collection[str], besides: str = ""
) -> tuple[str, dict[str, Any]]:
    """The name in a text, and its keyword arguments.

    Args:
        what: the text is of, for the messages.
        text: a name, or a call of it with keyword arguments that are Python literals.
        names: that there are.
        besides: what else one may write, for the messages.

    Raises:
        ValueError: it has none of the names, or is not in this form.
    """
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a text, got {text!r}")  # noqa: TRY004
    wanted = f"{what} must be {besides}one of {', '.join(names)}"
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, AttributeError, MemoryError, RecursionError):
        raise ValueError(f"{wanted}; got {text!r}") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in names:
        raise ValueError(f"{wanted}; got {text!r}")
    if call.args:
        raise ValueError(
            f"{what}={text!r}: arguments need their names, as in {call.func.id}(name=value)"
        )
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg in arguments:
            raise ValueError(f"{what}={text!r} gives {keyword.arg} twice")
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                f"{what}={text!r}: {keyword.arg} is not a Python literal"
            ) from None
    return call.func.id, arguments


def count(what: str, text: str) -> float:
    """How many a text such as ``"25M"``, ``"7B"`` (billions) or ``"1e6"`` names.

    Raises:
        ValueError: it names none.

    Example:
        >>> from jaxcoded import _parse
        >>> _parse.count("parameters", "25M")
        25000000.0
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMBT]?)\s*", text)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found:
        number *= 1000.0 ** " KMBT".index(found[2].upper() or " ")
    if not 1 <= number < math.inf:
        raise ValueError(f"{what} must be a count such as 25M, 7B or 1e6, got {text!r}")
    return number


def number_of_bytes(what: str, text: str) -> float:
    """Bytes that a text such as ``"4e6"``, ``"4MB"`` or ``"4 MiB"`` names: units with an
    ``i`` are powers of 1024, others of 1000.

    Raises:
        ValueError: it names none.

    Example:
        >>> from jaxcoded import _parse
        >>> _parse.number_of_bytes("payload", "4 MiB")
        4194304.0
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?)(i?)B?\s*", text)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found:
        number *= (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if not 0 < number < math.inf:
        raise ValueError(
            f"{what} must be a number of bytes such as 4e6, 4MB or 4MiB, got {text!r}"
        )
    return number


def number_of_seconds(what: str, text: str) -> float:
    """Seconds that a text such as ``"1.2"``, ``"1.2 s"`` or ``"500ms"`` names.

    Raises:
        ValueError: it names none.

    Example:
        >>> from jaxcoded import _parse
        >>> _parse.number_of_seconds("compute", "500ms")
        0.5
    """
    units = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6}
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(|s|ms|us|µs)\s*", text)
    try:
        number = float(found[1]) / units[found[2]] if found else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            f"{what} must be a number of seconds such as 1.2, 1.2s or 500ms, got {text!r}"
        )
    return number
