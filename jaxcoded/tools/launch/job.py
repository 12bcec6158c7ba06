"""Run a job of many processes, and leave no process or file of the job behind."""

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from jaxcoded.tools.launch import guardian, rank

TOO_LONG = 124  # the status of a job that its time limit ended, as with `timeout`
_GRACE = guardian.GRACE  # seconds for mpirun to end the job
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDED_ON = (*_ENDING, signal.SIGUSR1)
_SHARED_MEMORY = "/dev/shm"
_FOLDER = re.compile(r"jaxcoded\.([0-9]+\.[0-9a-f]{8})")
_BEGUN = 60.0  # seconds within which a process locks a folder that it has made


@dataclasses.dataclass(frozen=True)
class End:
    """How a job has ended."""

    # the launcher's status; 128 plus the number of the signal that ended the launcher, or that asked this process to
    # end the job; `TOO_LONG` after the time limit; 0 if the launcher still ran after a rank had ended the job
    status: int
    too_long: bool = False  # whether the time limit ended the job
    # the ranks on this host that were stopped at the time limit
    stopped: frozenset[int] = frozenset()


def play(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float | None = None,
    ended: threading.Event | None = None,
    own_files: bool = True,
    output: IO[str] | None = None,
    marked: bool = False,
) -> End:
    """Start a launcher (mpirun), pass signals on to it, and wait for its end.

    A killed launcher leaves ranks running, and stopped ranks do not react to signals. So this function kills the job's
    remaining processes on this host, including a launcher that after a signal still waits for stopped ranks. A killed
    launcher also leaves shared-memory files. They are in the job's directory, which this function removes, if
    `jaxcoded.tools.launch.rank` starts the ranks. If this process itself is killed, `jaxcoded.tools.launch.guardian`
    does all this.

    Args:
        seconds: the time limit of the job.
        ended: an event that is set once a rank has ended the job. A launcher that still
            runs some seconds later, as a fault-tolerant launcher may, is ended.
        own_files: whether the launcher gets a separate directory for its temporary files. Files that it leaves
            elsewhere would disturb a later launcher. Other hosts have no such directory.
        output: the file for the launcher's output and errors. Default: the output and errors of this process.
        marked: whether the launcher marks each piece of output with its rank, for `jaxcoded.tools.terminal.lines`.
    """
    places = tempfile.gettempdir(), _SHARED_MEMORY
    for place in places:
        _sweep(place)
    name = f"{os.getpid()}.{secrets.token_hex(4)}"
    outer = environment.get(guardian.MARK)
    settings = {**environment, guardian.MARK: f"{outer}/{name}" if outer else name}
    folders = [os.path.join(place, f"jaxcoded.{name}") for place in places]
    temporary, shared = folders
    held = []
    with contextlib.ExitStack() as stack:
        watcher = guardian.Guardian(name, folders)
        stack.callback(watcher.dismiss)
        stack.callback(guardian.clean_up, name, folders)
        if own_files:
            held.append(stack.enter_context(_folder(temporary)))
            settings["TMPDIR"] = temporary
        # A job that a rank has started uses the directory of the rank's job.
        if not any(name in environment for name in rank.BACKING):
            with contextlib.suppress(OSError):  # a system without /dev/shm
                held.append(stack.enter_context(_folder(shared)))
                settings[rank.SHARED_MEMORY] = shared
        # The launcher gets a separate session: otherwise a terminal would also signal
        # the ranks.
        to = subprocess.PIPE if marked else output
        process = subprocess.Popen(
            command,
            env=settings,
            start_new_session=True,
            stdout=to,
            stderr=to,
            pass_fds=held,
        )
        watcher.watch(process.pid)
        if process.stdout and process.stderr:
            # Imported here, since scripts/mpirun must run without packages such as
            # rich.
            from jaxcoded.tools.terminal import lines

            handed_on = lines.HandedOn(process.stdout, process.stderr)
            stack.callback(handed_on.end, _GRACE)
        stack.callback(guardian.kill_all, name)
        late: list[bool] = []
        if ended is not None:
            arguments = process, ended, late
            threading.Thread(target=_end_later, args=arguments, daemon=True).start()
        with _handing_on(process) as signals:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                stopped = _stopped(name)
                process.terminate()
                _kill_later(process)
                process.wait()
                return End(TOO_LONG, True, stopped)
    if status and signals:
        return End(128 + signals[0])
    if late:
        return End(0)
    return End(128 - status if status < 0 else status)


@contextlib.contextmanager
def _folder(path: str) -> Iterator[int]:
    """Make a folder, and yield its descriptor. While a process has the descriptor open, the folder is locked, so that
    `_sweep` does not remove it.
    """
    os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            _lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _sweep(place: str) -> None:
    """Remove this user's folders of jobs whose launcher and guardian were killed."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for each in entries:
            if match := _FOLDER.fullmatch(each.name):
                # the folder is locked, gone, or another user's
                with contextlib.suppress(OSError):
                    _remove(each.path, match[1])


def _remove(folder: str, name: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _BEGUN:
            return
        _lock(descriptor)
        if not guardian.processes(name):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _kill_later(process: subprocess.Popen[bytes]) -> None:
    # `kill` does nothing to a process that has ended
    timer = threading.Timer(_GRACE, process.kill)
    timer.daemon = True
    timer.start()


def _end_later(
    process: subprocess.Popen[bytes], ended: threading.Event, late: list[bool]
) -> None:
    ended.wait()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        late.append(True)
        process.terminate()
        _kill_later(process)


@contextlib.contextmanager
def _handing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass signals on to the launcher; yield the signals that ask this process to end."""
    signals: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(number)
            if number in _ENDING:
                signals.append(number)
                _kill_later(process)

    # Signals that are already ignored stay ignored, as with nohup.
    heard = [
        number for number in _HANDED_ON if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, hand_on) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(name: str) -> frozenset[int]:
    """Return the ranks of a job that have a stopped process, except joined ranks."""
    out = set()
    for place, variables in guardian.processes(name).items():
        with contextlib.suppress(OSError):
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            number = rank.number(variables)
            if state == "T" and number.isdigit() and rank.JOINS not in variables:
                out.add(int(number))
    return frozenset(out)
