"""Check whether MPI accepts pointers to a GPU's memory, before mpi4jax passes a pointer
to MPI.

With ``MPI4JAX_USE_CUDA_MPI=1``, mpi4jax passes pointers to GPU memory to MPI. An MPI
that cannot use these pointers crashes.
"""

import contextlib
import ctypes
import importlib.util
import os

import jax
from mpi4py import MPI

_ON = ("true", "1", "on")
# the mpi4jax library that is linked to MPI
_BRIDGE = "mpi4jax._src.xla_bridge.mpi_xla_bridge_cpu"
_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def why_not() -> str:
    """Return why MPI must not get device pointers although the environment requests it.
    Return an empty text if MPI accepts device pointers, or will not get any.
    """
    asked = os.environ.get("MPI4JAX_USE_CUDA_MPI", "").lower() in _ON
    if not asked or jax.default_backend() != "gpu" or supported():
        return ""
    return (
        "MPI4JAX_USE_CUDA_MPI=1, but this MPI does not report that it accepts pointers to a "
        f"GPU's memory ({MPI.Get_library_version().splitlines()[0]}): set the variable to 0, "
        "then mpi4jax copies through the host"
    )


def supported() -> bool:
    """Return whether MPI reports that it accepts device pointers, according to the
    extensions of Open MPI and MPICH."""
    spec = None
    with contextlib.suppress(ModuleNotFoundError):  # the package is missing
        spec = importlib.util.find_spec(_BRIDGE)
    if spec is None or spec.origin is None:
        return False
    library = ctypes.CDLL(spec.origin)  # this loads MPI and its functions
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_MPICH_CUDA, ctypes.byref(flag))
        return not failed and bool(flag.value)
    return False
