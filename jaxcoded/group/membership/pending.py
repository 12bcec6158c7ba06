import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def pending(call: Callable[[], T]) -> Future[T]:
    """Run a function in a separate thread, and return a future of its result. The
    caller may wait for the result or abandon it."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # pass it to the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
