import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from jaxcoded import _require
from jaxcoded.transport import engine

logger = logging.getLogger("jaxcoded")

_LEAVING = 5.0  # seconds that a rank needs to leave if ranks are below it
_leaves = threading.Lock()  # the thread that holds this lock ends the process


def leave_on_sigterm(notice: float = 30.0) -> None:
    """Leave all groups and end with status 0 when ``SIGTERM`` arrives, as before a
    machine is reclaimed.

    The rank first completes the round that it has called, so the other ranks have its
    message for this round. Then the other ranks continue as if this rank had died, and
    `CodedGroup.recovered` removes it. If the program is in compiled code, the rank
    leaves after most of ``notice`` has passed. A rank cannot leave if its program never
    releases Python's global lock. The root cannot leave either, since it decides the
    rounds: its process ends at once, and the other ranks see a death.

    Neither ``finally`` blocks nor ``atexit`` functions run. `leave_on_sigterm` replaces
    the program's handler of ``SIGTERM``. Call it on the main thread.

    Args:
        notice: seconds from the signal until the process must have ended; at least 10
            if other ranks are below this rank.

    Raises:
        ValueError: ``notice`` is not a number ≥ 0; MPI is not fault-tolerant, and would
            end the job or wait for the job's end; or this is not the main thread.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.leave_on_sigterm(notice=120.0)
        Traceback (most recent call last):
            ...
        ValueError: leave_on_sigterm needs an MPI that survives the end of a rank: start the job with ...
    """
    notice = _require.not_negative("notice", notice)
    if not engine.fault_tolerant():
        raise ValueError(
            "leave_on_sigterm needs an MPI that survives the end of a rank: start the job with "
            "jaxcoded run --ft, which needs Open MPI 5"
        )
    process = os.getpid()

    def on_signal(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            _leave()
        # this process is a fork, which has no engine
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_signal)
    # Python calls a handler only when its main thread returns from compiled code. But
    # the byte that the signal writes into the pipe arrives at once.
    heard, tells = os.pipe()
    os.set_blocking(tells, False)
    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    threading.Thread(
        target=_watch,
        args=(heard, before, max(notice - 2 * _LEAVING, 0.0)),
        name="jaxcoded leaving",
        daemon=True,
    ).start()


def _watch(heard: int, before: int, seconds: float) -> NoReturn:
    """Leave this many seconds after the signal, and pass signals on to the previous listener."""
    while signal.SIGTERM not in (numbers := os.read(heard, 1)):
        if before >= 0:
            with contextlib.suppress(OSError):
                os.write(before, numbers)
    time.sleep(seconds)
    _leave()


def _leave() -> NoReturn:
    if not _leaves.acquire(blocking=False):
        while True:  # another thread ends the process; the program does not continue
            time.sleep(60.0)
    logger.warning("process %d leaves its groups, as it received SIGTERM", os.getpid())
    engine.leave(_LEAVING)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # MPI_Finalize would wait for the other ranks
