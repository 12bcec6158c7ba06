"""The end of a rank that has failed before it was in a group, where others are to go on without ranks that fail.

They cannot go on here: they wait for it to make the group with them, and it would wait for them in `MPI_Finalize`.
So it ends without that, and `jaxcoded.cli.rank`, its parent, ends the job.
"""

import atexit
import contextlib
import os
import sys

_in_group = False


def has_group() -> None:
    """This process is a rank of one."""
    global _in_group
    _in_group = True


def _end() -> None:
    parent = os.environ.get("JAXCODED_ENDS_JOB", "").partition(":")[0]
    goes_on = os.environ.get("JAXCODED_GOES_ON") == "1"
    failed = getattr(sys, "last_value", None) is not None
    if _in_group or not (failed and goes_on and parent == str(os.getppid())):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


atexit.register(_end)
