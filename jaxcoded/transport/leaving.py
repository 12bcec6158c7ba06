"""A rank that is told to end soon leaves in order, as on a machine that is taken back (spot)."""

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

_LEAVING = 5.0  # seconds that a rank needs to leave those below it
_leaves = threading.Lock()  # whoever has it ends the process


def leave_on_sigterm(notice: float = 30.0) -> None:
    """Leave all groups and end with status 0 when ``SIGTERM`` comes from now on, as a machine gets before it is
    taken back.

    The round that this rank has called is carried to its end. The others go on without it as without
    a rank that is dead, but lack no message of that round, and `CodedGroup.recovered` takes it out. A
    program that is busy in compiled code, or waits there, is left as it is after most of the
    notice. One that holds Python's lock all the time cannot leave. The root cannot either, as
    it decides the rounds: it ends at once, and for the others it has died.

    Neither ``finally`` nor ``atexit`` run. Replaces the program's handler of ``SIGTERM``. Call it on
    the main thread.

    Args:
        notice: seconds from the signal until the process must be gone, 10 or more to be of use where
            others are below this rank.

    Raises:
        ValueError: ``notice`` is not a number ≥ 0, MPI is not fault-tolerant (it would end the
            job, or wait for its end), or this is not the main thread.

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
        signal.signal(number, signal.SIG_DFL)  # a fork, which has no engine
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_signal)
    # Python calls it when its main thread comes back from compiled code. A byte is here at once.
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
        while True:  # another thread ends the process; the program goes no further
            time.sleep(60.0)
    logger.warning("process %d leaves, as SIGTERM has come", os.getpid())
    engine.leave(_LEAVING)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # MPI_Finalize would wait for the others
