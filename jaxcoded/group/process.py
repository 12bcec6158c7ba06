"""A process of a rank, and how it is killed."""

import errno
import os
import pathlib
import signal
import socket
from typing import NamedTuple, Self

from mpi4py import MPI


class Process(NamedTuple):
    """A process that is not taken for a later one of the same number.

    Attributes:
        host: the name of its host.
        numbers: within which its number means it: a start of the host, and a namespace of pids.
        pid: its number.
        started: when, in ticks of the kernel's clock.
    """

    host: str
    numbers: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Self:
        """This process. Where there is no ``/proc`` nobody can kill it."""
        pid = os.getpid()
        try:
            boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            numbers = f"{boot} {os.readlink('/proc/self/ns/pid')}"
            started = _started(pid)
        except OSError:
            numbers, started = "", -1
        return cls(MPI.Get_processor_name(), numbers, pid, started)

    def reachable(self, other: "Process") -> bool:
        """Whether the other one can signal this one, if it may."""
        return bool(self.numbers) and self[:2] == other[:2]

    def kill(self) -> int:
        """Kill it, also where it is stopped, and nothing else. Return 0, or the number
        of an error."""
        try:
            # while this is open, no other process gets the number unnoticed
            handle = os.pidfd_open(self.pid)
            try:
                if _started(self.pid) != self.started:
                    return errno.ESRCH
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def is_first(self) -> bool:
        """Whether no other process of this host has asked this of this one, as far as those live."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # a name in no file system, which one alone can have
            line.bind(f"\0jaxcoded.{self.pid}.{self.started}")
        except OSError as error:
            line.close()
            return error.errno != errno.EADDRINUSE
        line.detach()  # the name is held until this process ends
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> int:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])  # see proc(5)
