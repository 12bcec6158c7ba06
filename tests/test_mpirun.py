"""Runs tests/mpi under mpirun."""

import os

import pytest
from launch import mpirun

LIMIT = 1500  # seconds for a job
TEST_LIMIT = 300  # seconds for a test in it; one that hangs says where

# What the tree has nothing to do with: on 4 ranks only.
ON_ANY_TREE = (
    "test_gradients.py",
    "test_misuse.py",
    "test_nonblocking.py",
    "test_sizes.py",
    "test_staging.py",
    "test_tokens.py",
    "test_training.py",
    "test_wire_dtype.py",
)
# On 13 ranks, which take turns on a few cores, only the sums themselves.
SUMS = (
    "test_collectives.py",
    "test_erasures.py",
    "test_schemes.py::test_exact",
    "test_schemes.py::test_approximate",
)


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [2, 4, 7, 13])
def test_under_mpirun(ranks):
    places = ["tests/mpi"] if ranks < 13 else [f"tests/mpi/{name}" for name in SUMS]
    environment = {}
    if ranks == 2:  # only there tests/mpi/test_devices.py runs
        flags = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    if ranks in (2, 7):
        places += [f"--ignore=tests/mpi/{name}" for name in ON_ANY_TREE]
    if ranks == 7:  # the other transport is tried on the other trees
        places += ["-k", "not mpi4jax"]
    job = mpirun(
        ranks,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
        *(f"--timeout={TEST_LIMIT}", "--timeout-method=thread", *places),
        limit=LIMIT,
        **environment,
    )
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
