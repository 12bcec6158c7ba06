"""Marks for the transports and numbers of ranks of a test. Without a mark a test runs
on each transport and any number of ranks.
"""

import jax
import pytest
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size

# Nothing in these tests depends on the transport.
once = pytest.mark.parametrize("transport", ["mpi4jax"], indirect=True)
mpi4jax_only = once
engine_only = pytest.mark.parametrize("transport", ["engine"], indirect=True)

several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
# An expensive test, which one rank does not cover better than several ranks.
not_alone = pytest.mark.exhaustive if SIZE == 1 else lambda test: test
slices = pytest.mark.skipif(SIZE < 4, reason="slices need 4 ranks")
# The groups of these tests tolerate one missing child of every parent.
redundant = pytest.mark.skipif(SIZE < 4, reason="no redundancy")

ON_GPU = jax.default_backend() == "gpu"
