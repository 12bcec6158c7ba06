"""Start a rank's program as a child process, with the rank's GPUs and the job's shared memory. Report the program's
beginning and end to `jaxcoded run`, and end in the same way as the program.

This file runs without the package: `python -I -S rank.py COMMAND...`.

Launchers signal a rank's process group, to which this process and the program belong. So the program gets the same
signals as it would without this process. This process ignores the signals. If this process is killed, the program is
killed, too.
"""

import ctypes
import os
import resource
import signal
import sys
import time

VARIABLE = "JAXCODED_ENDS"  # HOST:PORT:TOKEN of the listener
ALL_GPUS = "JAXCODED_ALL_GPUS"  # 1 if each rank sees all GPUs of its host
# the job's directory for shared memory, on the host that started the job
SHARED_MEMORY = "JAXCODED_SHARED_MEMORY"
# 1 if mpirun survives the death of a rank that other ranks have started
# (`jaxcoded.group.membership.joining`)
TAKES_IN = "JAXCODED_TAKES_IN"
# The words of this process's command that precede the program's command, one per line.
# Ranks that start other ranks need them.
STARTER = "JAXCODED_STARTER"
# START:… on ranks that other ranks have started; START is equal on all ranks that were started
# together
JOINS = "JAXCODED_JOINS"
GOES_ON = "JAXCODED_GOES_ON"  # 1 if the other ranks continue without a rank that ends
# PID:DESCRIPTOR: this process, and a pipe to it. The child writes to the pipe when it enters its first group, when
# an error has ended its program, when it leaves MPI, and when it ends the job.
_PIPE = "JAXCODED_ENDS_JOB"
_IN_GROUP, _FAILED, _LEFT_MPI, _ENDS_JOB = b"+", b"-", b".", b"!"
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
# A rank's number among the ranks of its host, and the number of ranks of its host: for Open MPI,
# and for MPICH.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# the settings for the place of shared memory, in Open MPI 5 and 4
BACKING = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 3.0  # seconds within which a report must be received
# If the program of a rank that joins ends before the rank has a group, this process waits
# for this many seconds before it ends. So the rank that started this process sees it at
# least once, and can then notice its end (`jaxcoded.group.membership.started`).
_SEEN = 1.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_OWN = {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}


def main() -> None:
    """Run the rank. This function never returns."""
    ignored = [each for each in signal.Signals if each.name not in _OWN]
    before = {each: signal.signal(each, signal.SIG_IGN) for each in ignored}
    # Python itself ignores these signals
    before |= dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_DFL)
    own_pid = os.getpid()
    heard, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.set_inheritable(pipe, True)
        os.environ[_PIPE] = f"{own_pid}:{pipe}"
        own = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.environ[STARTER] = "\n".join(own)
        for number, handler in before.items():
            kept = handler == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if kept else signal.SIG_DFL)
        if os.environ.pop(ALL_GPUS, "") != "1":
            _divide_gpus()
        _share_in(os.environ.pop(SHARED_MEMORY, ""))
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == own_pid:
            os.execvp(sys.argv[1], sys.argv[1:])
        os._exit(1)
    _tell("begun")
    _, status = os.waitpid(child, 0)
    # the status, or minus the number of a signal
    code = os.waitstatus_to_exitcode(status)
    os.set_blocking(heard, False)
    try:
        written = os.read(heard, 100)
    except BlockingIOError:
        written = b""
    joins = JOINS in os.environ
    if joins and _IN_GROUP not in written:
        time.sleep(_SEEN)
    # After an error the program may kill itself, so that the other ranks continue without it. Then
    # report status 1.
    reported = 1 if _FAILED in written and code == -signal.SIGKILL else code
    goes_on = os.environ.get(GOES_ON) == "1"
    can_go_on = _IN_GROUP in written or joins
    # The other ranks wait for this rank to make a group, and Open MPI would let them
    # wait forever.
    ends = _ENDS_JOB in written or (code > 0 and goes_on and not can_go_on)
    _tell(f"{reported} ends" if ends else reported)
    alone = goes_on and can_go_on and _LEFT_MPI not in written
    if code > 0 and alone:
        # Open MPI does not report the death of a process that ends with a status
        code = -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own_pid, -code)
    os._exit(code & 255)


def _share_in(directory: str) -> None:
    """Set the directory for shared memory, unless the user has set a directory. Other hosts do not have
    ``directory``."""
    if os.path.isdir(directory) and not any(name in os.environ for name in BACKING):
        os.environ.update(dict.fromkeys(BACKING, directory))


def gpus_of(rank: int, ranks: int, gpus: list[str]) -> list[str]:
    """Return which of its host's GPUs a rank gets: as many as every other rank or, if there are too few
    GPUs, one GPU that it shares with other ranks."""
    if each := len(gpus) // ranks:
        return gpus[rank * each : (rank + 1) * each]
    return [gpus[rank * len(gpus) // ranks]]


def _divide_gpus() -> None:
    """Divide the host's GPUs among its ranks. Otherwise JAX would use the first GPU in all
    ranks."""
    pairs = [
        [int(os.environ[name]) for name in names]
        for names in _LOCAL
        if all(_is_number(os.environ.get(name, "")) for name in names)
    ]
    gpus = _visible_gpus()
    # these variables may come from another job, and be inconsistent
    if not pairs or not gpus or pairs[0][0] >= pairs[0][1]:
        return
    rank, ranks = pairs[0]
    os.environ[_VISIBLE] = ",".join(gpus_of(rank, ranks, gpus))
    if len(gpus) >= ranks:
        return
    # Otherwise each rank would take most of the GPU's memory when JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if rank == 0:
        number = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        words = f"jaxcoded run: {ranks} ranks share {number} on {os.uname().nodename}"
        print(words, file=sys.stderr, flush=True)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _visible_gpus() -> list[str]:
    """Return the GPUs that CUDA can use here, as CUDA_VISIBLE_DEVICES names them."""
    if _VISIBLE in os.environ:  # set by the user or the scheduler
        gpus = []
        for each in map(str.strip, os.environ[_VISIBLE].split(",")):
            if not each or each.startswith("-"):
                break  # CUDA ignores the rest of the list
            gpus.append(each)
        return list(dict.fromkeys(gpus))
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return []
    return [] if failed else list(map(str, range(count.value)))


def number(variables: "os._Environ[str] | dict[str, str]") -> str:
    """Return the rank's number, as its launcher has set it, or -1 if it is unknown."""
    return next((variables[name] for name in _RANK if name in variables), "-1")


def _tell(code: int | str) -> None:
    """Report the rank's beginning or end. Without a listener the job continues."""
    rank = number(os.environ)
    import socket

    try:
        if start := os.environ.get(JOINS, "").partition(":")[0]:
            rank = f"{start}.{rank}"
        host, port, token = os.environ.get(VARIABLE, "").rsplit(":", 2)
        with socket.create_connection((host, int(port)), _PATIENCE) as line:
            line.sendall(f"{token} {rank} {code}\n".encode())
            # wait until the report is received: only then may the launcher end other
            # ranks
            line.recv(1)
    except (OSError, ValueError, OverflowError):  # no listener, or an invalid address
        pass


if __name__ == "__main__":
    main()
