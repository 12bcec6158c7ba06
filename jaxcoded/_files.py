"""Files that are there as a whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from typing import BinaryIO


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
