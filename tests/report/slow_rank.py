"""The last rank takes ten times as long as the other ranks; the root saves its
telemetry.

slow_rank.py DIRECTORY ROUNDS
"""

import pathlib
import sys
import time

import numpy as np
from mpi4py import MPI

import jaxcoded

comm = MPI.COMM_WORLD
directory, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
x = np.ones(1000)
with jaxcoded.CodedGroup(
    comm, jaxcoded.Coded(stragglers=1), transport="engine"
) as group:
    weights = group.batch(1000).weights
    for _ in range(rounds):
        behind = group.lag() > 0
        if comm.rank and not behind:
            time.sleep(0.3 if comm.rank == comm.size - 1 else 0.03)
        jaxcoded.host.allreduce(x, group, weights, skip=behind)
    group.telemetry().save(directory / f"rank-{comm.rank}.npz")
