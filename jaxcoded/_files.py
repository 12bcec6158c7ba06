"""Files that exist as a whole or not at all, and are read as a whole."""

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
_PIECE = 1 << 20  # bytes
LONGEST = 1 << 30  # bytes of a file that is read


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of the one at ``path`` once it is on the
    disk. Where that fails, as on a full disk, the old one stays.

    Raises:
        OSError: it cannot be written.
    """
    target = os.path.realpath(path)  # where a link leads
    if os.path.exists(target) and not os.path.isfile(target):
        with open(target, "wb") as device:  # or a pipe: there is nothing to replace
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
    """Return what is in a file, of at most `LONGEST` bytes: there are files without end.
    A ValueError if there is more in it."""
    data = bytearray()
    with open(path, "rb") as file:  # takes memory only for what is there
        while piece := file.read(_PIECE):
            data += piece
            if len(data) > LONGEST:
                raise ValueError(f"{os.fspath(path)} is longer than {LONGEST} bytes")
    return bytes(data)


def array(data: bytes) -> np.ndarray:
    """The array that a ``.npy`` file has, read-only. NumPy would take memory for what the file says
    that it has before it looks whether it is there.

    Raises:
        ValueError: it is no such file, has less or more than it says, or has Python's objects,
            which are not unpickled.

    Example:
        >>> import io, numpy as np
        >>> from jaxcoded import _files
        >>> file = io.BytesIO()
        >>> np.save(file, np.eye(2))
        >>> _files.array(file.getvalue()).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"it is of version {version} of the format of NumPy")
    try:
        with warnings.catch_warnings():  # of headers that Python 2 has written
            warnings.simplefilter("ignore")
            shape, by_columns, dtype = _HEADERS[version](file)
    except Exception as error:  # noqa: BLE001  # damaged ones raise errors of all kinds
        raise ValueError(f"its header cannot be read: {error}") from None
    there = len(data) - file.tell()
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it has {dtype} of shape {shape}, and is not read")
    if math.prod(shape) * dtype.itemsize != there:
        raise ValueError(
            f"it has {there} bytes, and not those of {dtype} of shape {_require.shown(shape)}"
        )
    count = math.prod(shape)
    flat = (
        np.frombuffer(data, dtype, count, file.tell()) if there else np.empty(0, dtype)
    )
    return flat.reshape(shape, order="F" if by_columns else "C")
