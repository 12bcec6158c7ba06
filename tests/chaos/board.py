"""A memory-mapped file in which ranks report to their conductor without MPI."""

import pathlib

import numpy as np

ROW = np.dtype(
    [
        ("pid", np.int64),
        (
            "schedule",
            np.int64,
        ),  # the schedule in progress, from 1; 0 before and after
        ("steps", np.int64),  # steps done in this schedule
        (
            "progress",
            np.float64,
        ),  # when the process last made progress, by `time.monotonic`
        ("wake", np.float64),  # when the conductor must continue the process
        ("kill", np.float64),  # when the conductor must kill the process, if it hangs
        ("host", np.int64),  # number of its host, if there are several
        ("cut", np.float64),  # the time until which the cable of its host must be cut
        ("failed", np.int64),  # whether it has found a fault
        ("done", np.int64),  # whether it has ended
    ]
)


class Board:
    """
    Args:
        path: path of the file.
        processes: most processes of the job. Only the conductor, which makes the file,
            passes this.

    Attributes:
        rows: one for each process, in the order of their starts. Only that process
            writes it, except that the conductor resets "wake" and "kill".
    """

    def __init__(self, path: pathlib.Path, processes: int = 0) -> None:
        if processes:
            path.write_bytes(bytes(processes * ROW.itemsize))
        self.rows = np.memmap(path, ROW, "r+")
