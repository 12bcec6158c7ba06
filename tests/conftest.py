"""For all tests: what is shared, in which order they run, what takes how long, and what is left
out unless it is asked for."""

import compiled
import pytest
from launch import MOST

compiled.make_haste()
compiled.share()


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="run what is marked exhaustive, too"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.get_closest_marker("mpi"):
            # jobs have limits of their own, which follow the machine
            own = item.get_closest_marker("timeout")
            limit = own.args[0] if own else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(MOST * limit), append=False)
    items[:] = arranged(items)


def arranged(items):
    """In the order in which two workers end early.

    ``--dist worksteal`` gives each of them a half. One begins with the jobs that compute most, and
    the other with those that wait most. What is short is left for the end.
    """
    computing, waiting, short = [], [], []
    for item in items:
        if not item.get_closest_marker("mpi"):
            short.append(item)
        elif item.path.name == "test_mpirun.py":
            computing.append(item)
        else:
            waiting.append(item)
    rest = max(0, len(items) // 2 - len(computing))
    return computing + short[:rest] + waiting + short[rest:]
