"""Read and validate a file of telemetry."""

import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcoded._files import array, contents
from jaxcoded.plan import Plan

_LONGEST = 1e15  # the longest time that counts as valid, in seconds


def read(
    path: str | os.PathLike[str], arrays: Mapping[str, tuple[type, str]]
) -> dict[str, Any]:
    """Return the fields of a `Telemetry`, from a file that `Telemetry.save` wrote. Raise
    a ValueError if the file does not contain telemetry, or is inconsistent. ``arrays``
    has the dtype and the axes of each array.

    The function unpickles nothing, and needs no more memory than the file's length."""
    values = _arrays(contents(path))
    if values.keys() != {"rank", "plan", *arrays}:
        raise ValueError(
            f"{path} was not written by Telemetry.save of this version of jaxcoded, "
            "or is damaged"
        )
    try:
        return _checked(values, arrays)
    except ValueError as error:
        raise ValueError(f"{path} is not the telemetry of a rank: {error}") from None


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays by name. Return an empty dictionary if the data is not a file
    of arrays."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            # compressed data could have any length
            if any(each.compress_type != zipfile.ZIP_STORED for each in members):
                return {}
            values = {
                each.filename.removesuffix(".npy"): array(file.read(each))
                for each in members
            }
            return values if len(values) == len(members) else {}
    except Exception:  # noqa: BLE001  # damaged files raise errors of all kinds
        return {}


def _checked(
    values: dict[str, np.ndarray], arrays: Mapping[str, tuple[type, str]]
) -> dict[str, Any]:
    rank, plan = values["rank"], values["plan"]
    if rank.shape or rank.dtype.kind != "i" or plan.shape or plan.dtype.kind != "U":
        raise ValueError("rank must be an integer, and plan a text")
    made = Plan.from_json(str(plan))
    axes: dict[str, int] = {"N": made.size, "K": 3}
    for name, (dtype, letters) in arrays.items():
        array = values[name]
        known = array.dtype == dtype and array.ndim == len(letters)
        lengths = dict(zip(letters, array.shape))
        if not known or any(axes.setdefault(k, n) != n for k, n in lengths.items()):
            raise ValueError(
                f"{name} must be {np.dtype(dtype)} ({', '.join(letters)}), got {array.dtype} of "
                f"shape {array.shape}"
            )
        if array.dtype.kind == "f" and (abs(array) > _LONGEST).any():
            raise ValueError(f"{name} has numbers that are not times")

    def require(name: str, fits: Any) -> None:
        if not np.all(fits):
            raise ValueError(f"{name} does not fit the other fields")

    number = int(rank)
    require("rank", 0 <= number < made.size)
    require("parents", values["parents"] == made.parents)
    require("loads", (values["loads"] >= 0) & (values["loads"] <= 1))
    children = np.sort(values["children"])
    require("children", np.array_equal(children, made.tree.children[number]))
    require("rounds", np.diff(values["rounds"], prepend=0) > 0)
    require("rounds", values["rounds"] < 2**48)
    peers, deciders = values["peers"], values["decided_by"]
    require("peers", (peers >= 0) & (peers < made.size))
    require("peers", len(np.unique(peers)) == len(peers))
    require("decided_by", (deciders >= -1) & (deciders < made.size))
    shared, computed = values["shared"], values["computed"]
    require("shared", made.strategy.by_blocks or not shared.any())
    require("computed", (computed >= 0) & (computed < 2**32))
    require("computed", not computed[~shared].any())
    require("blocks", (values["blocks"] >= 0) & (values["blocks"] < 2**32))
    for name in ("payload", "link_bytes"):
        require(name, (values[name] >= 0) & (values[name] < 2**56))
    for name in ("link_seconds", "silent", "busy"):
        require(name, values[name] >= 0)
    for name in ("work", "step_times"):
        require(name, np.isnan(values[name]) | (values[name] >= 0))
    return values | {"rank": number, "plan": str(plan)}
