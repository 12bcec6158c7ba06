"""After the process that launched a job has ended, kill the job's processes on this host and remove its folders.

The guardian runs without the package: `python -I -S guardian.py NAME FOLDER...`. The launching process holds the other
end of the guardian's standard input. So this input ends when the launching process ends, even by SIGKILL or a crash.
The guardian has a separate session and ignores all signals that can be ignored, so a terminal's signals to the
launching process do not end the guardian.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

# The environment variable that identifies processes of a job: NAME, or NAME/NAME for a
# job that a rank has started.
MARK = "JAXCODED_JOB"
GRACE = 10.0  # seconds for mpirun to end the job
_PAUSE = 0.1  # seconds between two checks of mpirun
_LOOKS = 100  # how often to read an environment that seems empty


class Guardian:
    """A handle of a job's guardian, for the launching process."""

    def __init__(self, name: str, folders: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, name, *folders],
            # If a rank has started this job, remove the mark of the rank's job: the end of the rank's job must not
            # end the guardian.
            env={key: value for key, value in os.environ.items() if key != MARK},
            cwd="/",
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._line = self._process.stdin

    def watch(self, mpirun: int) -> None:
        """Tell the guardian which process is mpirun. The guardian ends it first, because mpirun ends ranks on other
        hosts."""
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed
            self._line.write(b"%d" % mpirun)

    def dismiss(self) -> None:
        """End the guardian. Call this once nothing of the job is left."""
        self._process.kill()
        self._process.wait()
        self._line.close()


def main() -> None:
    """Wait until the launching process ends, and then end the job."""
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(each, signal.SIG_IGN)
    name, *folders = sys.argv[1:]
    mpirun = sys.stdin.buffer.read()
    # After this pause even a process that was just starting has its mark.
    time.sleep(_PAUSE)
    if mpirun:
        _end_in_order(name, int(mpirun))
    clean_up(name, folders)


def _end_in_order(name: str, mpirun: int) -> None:
    place = pathlib.Path(f"/proc/{mpirun}")
    end = time.monotonic() + GRACE
    if _belongs(place, name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(mpirun, signal.SIGTERM)
    while _belongs(place, name) and time.monotonic() < end:
        time.sleep(_PAUSE)


def clean_up(name: str, folders: Iterable[str]) -> None:
    """Remove everything of a job on this host."""
    kill_all(name)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def kill_all(name: str) -> None:
    """Kill a job's processes until none is left, since they may start other processes
    in the meantime."""
    end = time.monotonic() + GRACE
    while (places := processes(name)) and time.monotonic() < end:
        for place in places:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(place.name), signal.SIGKILL)
        time.sleep(0.01)


def processes(name: str) -> dict[pathlib.Path, dict[str, str]]:
    """Return the environment of each of a job's processes, by its folder in /proc."""
    return {
        place: environment
        for place in pathlib.Path("/proc").glob("[0-9]*")
        if _named(environment := _environment(place), name)
    }


def _belongs(place: pathlib.Path, name: str) -> bool:
    return _named(_environment(place), name)


def _named(environment: dict[str, str], name: str) -> bool:
    return name in environment.get(MARK, "").split("/")


def _environment(place: pathlib.Path) -> dict[str, str]:
    """Return a process's environment, or an empty dictionary if the process has ended or
    belongs to another user."""
    try:
        # As in `jaxcoded.group.process`: while a process starts a program, its environment seems empty.
        for _ in range(_LOOKS):
            if words := (place / "environ").read_bytes():
                break
            os.readlink(place / "exe")
            time.sleep(0.001)
    except OSError:
        return {}
    pairs = (word.partition("=") for word in words.decode(errors="replace").split("\0"))
    return {key: value for key, _, value in pairs}


if __name__ == "__main__":
    main()
