"""What ranks tell their conductor without MPI: a file that all have in their memory."""

import pathlib

import numpy as np

ROW = np.dtype(
    [
        ("pid", np.int64),
        (
            "schedule",
            np.int64,
        ),  # it plays this one of the job, from 1; 0 before and after
        ("steps", np.int64),  # that it has done in it
        (
            "progress",
            np.float64,
        ),  # when it last came on; on the clock of `time.monotonic`
        ("wake", np.float64),  # it stops itself, and is to go on then
        ("kill", np.float64),  # it hangs, and is to be killed then
        ("host", np.int64),  # its number, where there are several
        ("cut", np.float64),  # the cable of its host is to be cut until then
        ("failed", np.int64),  # it has found something wrong
        ("done", np.int64),  # it has come to its end
    ]
)


class Board:
    """
    Args:
        path: of the file.
        processes: that the job may have, where this is the conductor, which makes the file.

    Attributes:
        rows: one for each process in the order in which they were started, which it alone writes, but
            for "wake" and "kill", that the conductor takes back.
    """

    def __init__(self, path: pathlib.Path, processes: int = 0) -> None:
        if processes:
            path.write_bytes(bytes(processes * ROW.itemsize))
        self.rows = np.memmap(path, ROW, "r+")
