"""A call that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def pending(call: Callable[[], T]) -> Future[T]:
    """Make a call on a thread of its own, which may be waited for and left alone."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # for whoever waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
