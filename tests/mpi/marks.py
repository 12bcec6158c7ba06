"""On which transports a test runs, and on how many ranks. Without a mark: on each transport, and
on any number of ranks."""

import jax
import pytest
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size

# Nothing in these tests depends on the transport.
once = pytest.mark.parametrize("transport", ["mpi4jax"], indirect=True)
mpi4jax_only = once
engine_only = pytest.mark.parametrize("transport", ["engine"], indirect=True)

several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
# Costs much, and says on one rank nothing that it does not say on several.
not_alone = pytest.mark.exhaustive if SIZE == 1 else lambda test: test
slices = pytest.mark.skipif(SIZE < 4, reason="slices need 4 ranks")
# The groups of these tests lose one child of every parent.
redundant = pytest.mark.skipif(SIZE < 4, reason="no redundancy")

ON_GPU = jax.default_backend() == "gpu"
