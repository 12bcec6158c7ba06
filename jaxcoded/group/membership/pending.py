"""A call that may never return."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A call on a thread of its own, which may be waited for and left alone."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._returned: list[T] = []
        self._raised: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._returned.append(self._call())
        except Exception as error:  # noqa: BLE001  # for whoever waits
            self._raised = error

    def runs(self) -> bool:
        """Whether it has neither returned nor raised."""
        return self._thread.is_alive()

    def result(self, seconds: float) -> T:
        """Return what the call returned, or raise what it raised; a TimeoutError if it
        has done neither after so many seconds."""
        self._thread.join(seconds)
        if self._raised is not None:
            raise self._raised
        if not self._returned:
            raise TimeoutError
        return self._returned[0]
