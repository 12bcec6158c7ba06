"""These tests run in every rank of an mpirun job, and alone as a job of one rank.

`tests/test_mpirun.py` starts the jobs. The first failure on any rank ends the job: the
other ranks would wait for it for ever.
"""

import os
import pathlib
import sys
import tempfile

import jax
import pytest
from mpi4py import MPI

import jaxcoded
from jaxcoded.transport import engine

if "JAX_ENABLE_X64" not in os.environ:
    jax.config.update("jax_enable_x64", True)

# What happens above the transport: what the engine says of it, mpi4jax only says again.
ABOVE_THE_TRANSPORT = (
    "test_auto_plan.py",
    "test_builds.py",
    "test_gradients.py",
    "test_minibatches.py",
    "test_nonblocking.py",
    "test_sizes.py",
    "test_training.py",
    "test_wire_dtype.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Over mpi4jax a test of these files is exhaustive, if the engine runs it, too."""
    names = {item.nodeid for item in items}
    for item in items:
        twin = item.nodeid.replace("[mpi4jax", "[engine")
        if (
            item.path.name in ABOVE_THE_TRANSPORT
            and twin != item.nodeid
            and twin in names
        ):
            item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and MPI.COMM_WORLD.size > 1:
        place = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
        print(
            f"\n{place}: {item.nodeid} failed\n{report.longreprtext}",
            file=sys.__stderr__,
            flush=True,
        )
        MPI.COMM_WORLD.Abort(1)
    return report


@pytest.fixture
def tmp_path():
    """Pytest's own folders are cleared away by all ranks at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="session")
def comm():
    return MPI.COMM_WORLD


@pytest.fixture(scope="session", params=["mpi4jax", "engine"])
def transport(request):
    """The transport of `group`, and of the groups that tests make themselves."""
    if request.param == "engine" and (reason := engine.missing()):
        if os.environ.get("JAXCODED_ENGINE", "ON") != "ON":
            pytest.skip(reason)
        pytest.fail(f"without JAXCODED_ENGINE=OFF the engine must be there: {reason}")
    return request.param


@pytest.fixture(scope="session")
def group(comm, transport):
    """A group on all ranks that loses one straggler where there are enough of them.

    1, 2, 4, 7 and 13 ranks: alone, uncoded, cyclic repetition, fractional repetition on a
    star, and the paper's (3, 2) tree.
    """
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(
            stragglers=1 if comm.size > 2 else 0, fanout=3 if comm.size == 13 else None
        ),
        transport=transport,
    ) as group:
        yield group
