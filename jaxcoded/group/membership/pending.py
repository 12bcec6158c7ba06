import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def pending(call: Callable[[], T]) -> Future[T]:
    """Run a call in a separate thread; the caller may wait for it or abandon it."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # for the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
