"""Parse texts: calls such as ``"bernoulli(load=4)"``, numbers with units, and JSON."""

import ast
import contextlib
import difflib
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Any, TypeVar

from jaxcoded._require import shown

T = TypeVar("T")
LONGEST = 4096  # most characters of a call


def parsed(
    what: str, text: str, names: Collection[str], besides: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the name in a text, one of ``names``, and its keyword arguments, which are
    Python literals. Raise a ValueError if the text has another name or form.

    The error's message contains ``what``, which says what the text describes, and
    ``besides``, further names that the caller accepts.
    """
    check_text(what, text)
    others = ", ".join(map(repr, besides)) + " or " if besides else ""
    wanted = f"{what} must be {others}one of {', '.join(names)}"
    try:
        with warnings.catch_warnings():  # Python may warn about unusual syntax
            warnings.simplefilter("ignore")
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, AttributeError, MemoryError, RecursionError):
        open_ones = text.count("(") - text.count(")")
        why = ": a closing parenthesis is missing" * (open_ones > 0)
        why += ": there is one closing parenthesis too many" * (open_ones < 0)
        raise ValueError(f"{wanted}; got {text!r}{why}") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in names:
        raise ValueError(f"{wanted}; got {text!r}{_meant(name, (*besides, *names))}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(
            f"{what}={text!r}: arguments need their names, as in {name}(name=value)"
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
    return name, arguments


def check_arguments(
    what: str,
    text: str,
    function: Callable[..., Any],
    given: Collection[str],
    besides: Collection[str] = (),
) -> None:
    """Raise a ValueError unless a function accepts the arguments that a text gives."""
    name = text.partition("(")[0].strip()
    parameters = inspect.signature(function).parameters
    if unknown := sorted(set(given) - parameters.keys()):
        meant = _meant(unknown[0], parameters)
        raise ValueError(
            f"{what}={text!r}: {name} has no argument {unknown[0]!r}{meant or ';'} "
            f"{'It' if meant else 'it'} has {', '.join(parameters) or 'none'}"
        )
    for each, parameter in parameters.items():
        if parameter.default is parameter.empty and each not in {*given, *besides}:
            raise ValueError(
                f"{what}={text!r}: {name} needs {each!r}, as in '{name}({each}=...)'"
            )


def _meant(name: str, names: Collection[str]) -> str:
    """Return a question that suggests similar names, or an empty text if no names are
    similar."""
    begun = [each for each in names if len(name) > 2 and each.startswith(name)]
    close = begun or difflib.get_close_matches(name, names, n=2, cutoff=0.7)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else ""


def check_text(what: str, text: Any) -> None:
    """Raise a ValueError unless the value is a text of at most `LONGEST` characters."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a text, got {shown(text)}")  # noqa: TRY004
    if len(text) > LONGEST:
        raise ValueError(
            f"{what} must be a text of at most {LONGEST} characters, got {len(text)}: "
            f"{shown(text)}"
        )


def document(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise a ValueError if the text is not JSON, names a field twice, is nested too
    deeply, or contains NaN or Infinity, which JSON does not have."""
    if not isinstance(text, str | bytes):
        raise ValueError(f"it is not a text, but {shown(text)}")  # noqa: TRY004
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"the field {shown(name)} is given twice")
        out[name] = value
    return out


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def of_kind(what: str, value: Any, kind: type[T] | UnionType) -> T:
    """Return ``value``, a JSON value. Raise a ValueError if it does not have the type
    ``kind``."""
    if not isinstance(value, kind):
        wanted = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"{what} must be of type {wanted}, got {shown(value)}")  # noqa: TRY004
    return value


def fields(
    what: str, value: Any, kinds: Mapping[str, type | UnionType]
) -> dict[str, Any]:
    """Return ``value``, a JSON object. Raise a ValueError unless it has exactly the
    fields in ``kinds``, with these types.

    Example:
        >>> from jaxcoded import _parse
        >>> _parse.fields("a verdict", {"same": 1}, {"same": bool})
        Traceback (most recent call last):
        ...
        ValueError: same of a verdict must be of type bool, got 1
    """
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        got = sorted(value) if isinstance(value, dict) else value
        raise ValueError(
            f"{what} must have the fields {sorted(kinds)}, got {shown(got)}"
        )
    for name, kind in kinds.items():
        of_kind(f"{name} of {what}", value[name], kind)
    return value


def count(what: str, text: str) -> float:
    """Return the number in a text such as ``"25M"`` or ``"7B"``. Raise a ValueError if
    the text has another form."""
    units = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    return _quantity(what, text, "a count such as 25M, 7B or 1e6", units, least=1.0)


def number_of_bytes(what: str, text: str) -> float:
    """Return the number of bytes in a text such as ``"4e6"``, ``"4MB"`` or ``"4 MiB"``.

    Units with an ``i`` are powers of 1024, other units are powers of 1000. Raise a
    ValueError if the text has another form.
    """
    units = {"": 1.0, "B": 1.0}
    for power, letter in enumerate("kMGT", start=1):
        for name in {letter, letter.upper()}:
            for end in ("", "B"):
                units[f"{name}{end}"] = 1000.0**power
                units[f"{name}i{end}"] = 1024.0**power
    wanted = "a number of bytes such as 4e6, 40kB, 4MB or 4MiB"
    return _quantity(what, text, wanted, units)


def number_of_seconds(what: str, text: str) -> float:
    """Return the number of seconds in a text such as ``"500ms"``. Raise a ValueError if
    the text has another form."""
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
    wanted = "a number of seconds such as 1.2, 1.2s or 500ms"
    return _quantity(what, text, wanted, units)


def _quantity(
    what: str, text: Any, wanted: str, units: Mapping[str, float], least: float = 0.0
) -> float:
    """Return the product of a text's number, which must be > 0, and the text's unit."""
    number = math.nan
    if isinstance(text, str) and len(text) <= LONGEST:
        digits, unit = re.fullmatch(
            r"([0-9.]*(?:e[+-]?[0-9]+)?)(.*)", text.strip(), re.DOTALL
        ).groups()  # type: ignore[union-attr]  # the pattern matches any text
        with contextlib.suppress(ValueError, KeyError):
            number = float(digits) * units[unit.lstrip()]
    if not (0 < number < math.inf and number >= least):
        raise ValueError(f"{what} must be {wanted}, got {shown(text)}")
    return number
