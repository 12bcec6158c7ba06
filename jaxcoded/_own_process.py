"""How this process began, and how it ends if it never had a group with other ranks.

Ranks that have a group survive each other's failures. They do not survive the failure
of a rank with which they have no group yet: they would wait for the failed rank to make
the group, and the failed rank would wait for them in `MPI_Finalize`. So a rank that
fails before it has a group ends without `MPI_Finalize`, and its parent process,
`jaxcoded.tools.launch.rank`, ends the job.
"""

import atexit
import contextlib
import os
import sys

try:
    began_in: str | None = os.getcwd()
except OSError:  # the directory was removed
    began_in = None
# The command that starts another process of the job. On a process that was started to
# join a group, this is the command of the group's ranks.
command = [sys.executable, *sys.orig_argv[1:]]
in_group = False  # whether this process has had a group with other ranks


def _end() -> None:
    parent = os.environ.get("JAXCODED_ENDS_JOB", "").partition(":")[0]
    goes_on = os.environ.get("JAXCODED_GOES_ON") == "1"
    failed = getattr(sys, "last_value", None) is not None
    if in_group or not (failed and goes_on and parent == str(os.getppid())):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


atexit.register(_end)
