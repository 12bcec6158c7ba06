"""Settings of the tests that run in every rank of an mpirun job, or in a job of one rank.

`tests/test_mpirun.py` starts the jobs. The first failure on any rank ends the job: the
other ranks would wait for that rank for ever.
"""

import os
import pathlib
import sys
import tempfile

import jax
import pytest
from mpi4py import MPI
from outcomes import Outcomes

import jaxcoded
from jaxcoded.transport import engine

if "JAX_ENABLE_X64" not in os.environ:
    jax.config.update("jax_enable_x64", True)

# Defaults of tests without the marks `ranks` and `devices`.
RANKS = pytest.mark.ranks(4, exhaustive=(2, 7)).mark
NO_DEVICES = pytest.mark.devices().mark


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    names = {item.nodeid for item in items}
    for item in items:
        # mpi4jax would only repeat the engine's result
        twin = item.nodeid.replace("mpi4jax", "engine")
        if (
            twin != item.nodeid
            and twin in names
            and item.get_closest_marker("above_the_transport")
        ):
            item.add_marker(pytest.mark.exhaustive)
    done = set()
    if config.getoption("done"):
        done = set(pathlib.Path(config.getoption("done")).read_text().splitlines())
    suite = config.getoption("of_the_suite")
    exhaustive = config.getoption("exhaustive")
    items[:] = [
        item
        for item in items
        if item.nodeid not in done and not (suite and not named(item, exhaustive))
    ]


def named(item, exhaustive):
    """Return whether the suite runs a test in a job like this one."""
    size, devices = MPI.COMM_WORLD.size, jax.local_device_count()
    several = size == 4 and devices > 1
    if several:
        mark, number = item.get_closest_marker("devices") or NO_DEVICES, devices
    else:
        mark, number = item.get_closest_marker("ranks") or RANKS, size
    more = mark.kwargs.get("exhaustive", ()) if exhaustive else ()
    if number not in (*mark.args, *more):
        return False
    over = getattr(item, "callspec", None) and item.callspec.params.get("transport")
    # other trees test the other transport
    few = size == 7 or (not exhaustive and (size == 13 or several))
    return over != "mpi4jax" or not few


def pytest_configure(config):
    if path := config.getoption("outcomes"):
        config.pluginmanager.register(Outcomes(path, MPI.COMM_WORLD.rank))


@pytest.hookimpl(trylast=True)  # after the outcome is recorded
def pytest_runtest_logreport(report):
    if report.failed and MPI.COMM_WORLD.size > 1:
        place = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
        print(
            f"\n{place}: {report.nodeid} failed\n{report.longreprtext}",
            file=sys.__stderr__,
            flush=True,
        )
        MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def tmp_path():
    """Return a folder of this rank alone, because all ranks would delete pytest's folders at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="session")
def comm():
    return MPI.COMM_WORLD


@pytest.fixture(scope="session", params=["mpi4jax", "engine"])
def transport(request):
    """Return the transport of `group`, and of groups that tests make themselves."""
    if request.param == "engine" and (reason := engine.missing()):
        if os.environ.get("JAXCODED_ENGINE", "ON") != "ON":
            pytest.skip(reason)
        pytest.fail(f"without JAXCODED_ENGINE=OFF the engine must be there: {reason}")
    return request.param


@pytest.fixture(scope="session")
def group(comm, transport):
    """A group on all ranks that tolerates one straggler if there are enough ranks.

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
