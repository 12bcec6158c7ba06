"""Write files completely or not at all, and read whole files."""

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from jaxcoded import _require

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_PIECE = 1 << 20  # bytes that are read at a time
LONGEST = 1 << 30  # the most bytes of a file that are read


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write to. It replaces the file at ``path`` once its data is on
    the disk. If writing fails, as on a full disk, the old file stays.
    """
    target = os.path.realpath(path)  # follow links, so that the link stays
    if os.path.exists(target) and not os.path.isfile(target):
        # a device or pipe is written directly, since it cannot be replaced
        with open(target, "wb") as device:
            yield device
        return
    aside = f"{target}.{os.getpid()}.part"
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(aside)
        raise


def contents(path: str | os.PathLike[str]) -> bytes:
    """Return a file's contents. Raise a ValueError for more than `LONGEST` bytes."""
    data = bytearray()
    # read in pieces, so that memory grows only with the data
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            data += piece
            if len(data) > LONGEST:
                raise ValueError(f"{os.fspath(path)} is longer than {LONGEST} bytes")
    return bytes(data)


def array(data: bytes) -> np.ndarray:
    """Return the array of a ``.npy`` file, read-only.

    NumPy's reader would allocate the memory that the header claims before it checks
    the data. This function checks the data first. Raise a ValueError if the data is not
    a ``.npy`` file, is shorter or longer than its header claims, or has Python objects,
    which are never unpickled.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its NumPy format version is {version}, not (1, 0) or (2, 0)")
    try:
        with warnings.catch_warnings():  # headers from Python 2 cause warnings
            warnings.simplefilter("ignore")
            shape, by_columns, dtype = _HEADERS[version](file)
    except Exception as error:  # noqa: BLE001  # damaged files raise any error
        raise ValueError(f"its header cannot be read: {error}") from None
    start = file.tell()
    length = len(data) - start
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it holds {dtype} of shape {shape}, which is not supported")
    if math.prod(shape) * dtype.itemsize != length:
        raise ValueError(
            f"it has {length} bytes of data, but its header claims {dtype} of shape {_require.shown(shape)}"
        )
    flat = np.frombuffer(data, dtype, offset=start) if length else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if by_columns else "C")


def table(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the table of numbers in a ``.npy`` file, or in a text file with commas. A
    table from text has two axes. Raise a ValueError that names the file if the file has
    no table of numbers.
    """
    data = contents(path)
    try:
        if os.fspath(path).endswith(".npy"):
            return array(data)
        # NumPy warns about an empty table, for which the caller raises an error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            # Some programs write a byte order mark at the beginning of a table.
            lines = io.StringIO(data.decode("utf-8-sig"))
            return np.loadtxt(lines, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} has no table of numbers: {error}") from None
