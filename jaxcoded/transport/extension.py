"""The compiled extension, for the MPI of this process.

An extension that was built from source is next to this file, and works with the MPI
with which it was built. A wheel of jaxcoded, like mpi4py's wheels, has one extension
for each binary interface of MPI. One is the interface of Open MPI; the other is the
interface of MPICH, which other MPIs share.
"""

import importlib
import importlib.util
import sys

# Import mpi4py first, so that the extension uses the MPI library that mpi4py has
# loaded.
from mpi4py import MPI

from jaxcoded import transport

_NAME = f"{transport.__name__}._engine"


def load() -> None:
    """Load ``_engine``. Raise an ImportError if no extension fits this MPI and
    Python."""
    if _NAME in sys.modules:
        return
    if importlib.util.find_spec(_NAME):
        importlib.import_module(_NAME)
        return
    folder = "openmpi" if "Open MPI" in MPI.Get_library_version() else "mpich"
    try:
        engine = importlib.import_module(f"{transport.__name__}.{folder}._engine")
    except ModuleNotFoundError:
        raise ImportError(
            "it was left out, or does not exist for this Python"
        ) from None
    sys.modules[_NAME] = engine
    transport._engine = engine
