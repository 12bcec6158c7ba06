import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Record = TypeVar("_Record")

# How many seconds the process waits at its end for the last calls.
_LAST_SECONDS = 1.0


def follow(
    following: Callable[[], _Record | None],
    callback: Callable[[_Record], Any],
    name: str,
) -> threading.Thread:
    """Start a thread that calls ``callback`` with each record that ``following``
    returns, until it returns None."""

    def run() -> None:
        while (record := following()) is not None:
            callback(record)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


# This is registered before the function that ends the engine, so it runs after that function.
@atexit.register
def _finish() -> None:
    """Wait until the last records are handled, before the interpreter ends."""
    until = time.monotonic() + _LAST_SECONDS
    for thread in list(_threads):
        thread.join(max(until - time.monotonic(), 0.0))
