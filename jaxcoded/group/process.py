import errno
import os
import pathlib
import signal
import socket
import time
from typing import NamedTuple, Self

from mpi4py import MPI

STATE, PARENT, BEGAN = 0, 1, 19  # fields of `stat`
_LOOKS = 100  # how often to read an environment that seems empty


class Process(NamedTuple):
    """A process. Later processes with the same process number count as different."""

    host: str  # the name of its host
    numbers: str  # where its number is unique: the host's boot id and the pid namespace
    pid: int  # its number
    started: int  # its start time in ticks of the kernel's clock

    @classmethod
    def own(cls) -> Self:
        """Return this process. If the host has no ``/proc``, no rank can kill it."""
        pid = os.getpid()
        try:
            boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            numbers = f"{boot} {os.readlink('/proc/self/ns/pid')}"
            started = int(stat(pid)[BEGAN])
        except OSError:
            numbers, started = "", -1
        return cls(MPI.Get_processor_name(), numbers, pid, started)

    def reachable(self, other: "Process") -> bool:
        """Return whether the other process can signal this process if it has
        permission."""
        return bool(self.numbers) and self[:2] == other[:2]

    def kill(self) -> int:
        """Kill only this process, even if it is stopped. Return 0 or an error
        number."""
        try:
            # while the handle is open, it cannot refer to a later process
            handle = os.pidfd_open(self.pid)
            try:
                if int(stat(self.pid)[BEGAN]) != self.started:
                    return errno.ESRCH
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def is_first(self) -> bool:
        """Return whether no other call was made for the process that ``self`` describes.
        An earlier call counts only while the process that made it lives."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # an abstract socket name, which only one process can hold
            line.bind(f"\0jaxcoded.{self.pid}.{self.started}")
        except OSError as error:
            line.close()
            return error.errno != errno.EADDRINUSE
        line.detach()  # the name is held until this process ends
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def stat(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` file in proc(5) that follow its name.
    Raise an OSError if the file cannot be read."""
    text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def environment(pid: int) -> list[bytes]:
    """Return the variables of a process, as NAME=VALUE. Raise an OSError if the process
    has ended, or belongs to another user."""
    place = pathlib.Path(f"/proc/{pid}")
    # While a process starts a program (execve), Linux shows an empty environment. Only a running program has a
    # readable `exe`.
    for _ in range(_LOOKS):
        if words := (place / "environ").read_bytes():
            break
        os.readlink(place / "exe")
        time.sleep(0.001)
    return words.split(b"\0")
