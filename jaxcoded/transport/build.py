"""Compare the versions that ranks run, to see whether the ranks can work together.

The format of all other messages may differ between versions, so ranks exchange their
versions first: two numbers, and texts if the numbers differ.
"""

import functools
import hashlib
import importlib.metadata
import platform
import sys

import jax
import numpy as np
from mpi4py import MPI

from jaxcoded._version import __version__
from jaxcoded.transport import engine
from jaxcoded.transport.agreement import check_same, disagreement


@functools.cache
def required() -> str:
    """Return the versions that must be equal on all ranks, as text."""
    # `CodedGroup.epoch` must shuffle equally on all ranks; NumPy's draws may differ between versions
    drawn = np.random.default_rng([1, 2]).permutation(1000).astype("<i8")
    draws = hashlib.sha256(drawn.tobytes()).hexdigest()[:8]
    return f"jaxcoded {__version__}, {sys.byteorder}-endian numbers, random draws {draws} of NumPy"


@functools.cache
def wanted() -> str:
    """Return the versions that should be equal on all ranks, as text."""
    jaxlib = importlib.metadata.version("jaxlib")
    return f"jax {jax.__version__}, jaxlib {jaxlib}, {platform.machine()}"


def check(comm: MPI.Intracomm) -> str:
    """Raise a GroupMismatch on every rank unless the ranks run builds that understand each other.
    Collective.

    Return a warning if only the versions of JAX or the kinds of processors differ: sums
    have the same bits on all ranks, but values computed from them may differ. Otherwise
    return an empty text.
    """
    what = (
        "ranks run different builds, which do not work together: install the same jaxcoded and "
        "NumPy for all of them"
    )
    check_same(comm, required(), what)
    what = (
        "sums have the same bits on all ranks, but values computed from them may differ in the last "
        "bits: install the same JAX for all of them, or broadcast parameters with tree_bcast from "
        "time to time"
    )
    return disagreement(comm, wanted(), what) or ""


def check_engine(comm: MPI.Intracomm) -> None:
    """Raise a GroupMismatch unless all engines have the same sources. Collective."""
    what = (
        "the engines of the ranks were built from different sources, and may not understand each "
        "other: install the same jaxcoded for all of them"
    )
    check_same(comm, f"engine {engine.sources()}", what)
