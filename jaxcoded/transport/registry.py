"""The open groups of this process, by index: a compiled round holds the index of its group and nothing else."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from jaxcoded.errors import GroupClosed

if TYPE_CHECKING:
    from jaxcoded.transport.base import Carrier

_open: dict[int, Carrier] = {}
_indices = itertools.count()


def new_index() -> int:
    """Return an index that no group has had."""
    return next(_indices)


def add(carrier: Carrier) -> None:
    """Register the carrier of an open group."""
    _open[carrier.index] = carrier


def remove(index: int) -> None:
    """Remove a group, which then counts as closed."""
    _open.pop(index, None)


def is_open(index: int) -> bool:
    return index in _open


def find(index: int) -> Carrier:
    """Return the carrier of the group with this index. Raise `GroupClosed` if it was
    closed."""
    try:
        return _open[index]
    except KeyError:
        raise GroupClosed(
            f"use after close: group {index} was closed; make a new CodedGroup, and compile "
            "the functions that used the old group again with the new group"
        ) from None


def carriers() -> list[Carrier]:
    """Return the carriers of all open groups."""
    return list(_open.values())
