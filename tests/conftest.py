"""Settings of all tests: shared fixtures, order, time limits, and tests that run only
on request.
"""

import gc

import compiled
import hypothesis
import pytest
from launch import MOST
from outcomes import Reported

# JAX makes many permanent objects, which Python's garbage collector would traverse
# again and again.
gc.set_threshold(100_000, 20, 20)
compiled.make_haste()
compiled.share()
# A loaded machine must not make a drawn example fail. With "exhaustive" some tests draw more examples, see
# tests/engine/schedules.py.
for profile in "usual", "exhaustive":
    hypothesis.settings.register_profile(profile, deadline=None)
hypothesis.settings.load_profile("usual")


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="run what is marked exhaustive, too"
    )
    # for the jobs that tests/test_mpirun.py starts
    parser.addoption(
        "--of-the-suite",
        action="store_true",
        help="leave out what the marks `ranks` and `devices` do not name this job for",
    )
    parser.addoption("--outcomes", help="file to which outcomes of tests are added")
    parser.addoption("--done", help="file of tests that are left out, a line each")


def pytest_configure(config):
    if config.getoption("exhaustive"):
        hypothesis.settings.load_profile("exhaustive")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reported())


def pytest_collection_modifyitems(config, items):
    if not config.getoption("exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.get_closest_marker("mpi"):
            # jobs have separate limits, which depend on the machine's speed
            own = item.get_closest_marker("timeout")
            limit = own.args[0] if own else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(MOST * limit), append=False)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = arranged(items, workers)


def arranged(items, workers):
    """Return the tests in an order in which the workers end early.

    ``--dist worksteal`` divides the tests evenly, in order. The first worker begins
    with the jobs that compute most, and the other workers begin with the jobs that wait
    most. Short tests come at the end.
    """
    computing, waiting, short = [], [], []
    for item in items:
        if not item.get_closest_marker("mpi"):
            short.append(item)
        elif item.path.name == "test_mpirun.py":
            computing.append(item)
        else:
            waiting.append(item)
    others = max(1, workers - 1)
    out = []
    for long in (computing, *(waiting[i::others] for i in range(others))):
        rest = max(0, len(items) // (others + 1) - len(long))
        out += long + short[:rest]
        short = short[rest:]
    return out + short
