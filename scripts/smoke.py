"""Check that mpi4py, mpi4jax and the engine share the MPI of this set-up; exit with one line if not.

Usage: smoke.py RANKS [FOLDER]. FOLDER must contain the MPI library.
"""

import importlib
import os
import sys

import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI

ranks = int(sys.argv[1])
folder = os.path.realpath(sys.argv[2]) if len(sys.argv) > 2 else None

if os.environ.get("JAXCODED_ENGINE", "ON") == "ON":
    importlib.import_module("jaxcoded.transport._engine")

with open("/proc/self/maps") as maps:
    mapped = {line.split()[-1] for line in maps}
libraries = {
    path
    for path in mapped
    if os.path.basename(path).startswith(("libmpi.", "libmpi_abi.", "libmpich."))
}
if len(libraries) > 1:
    sys.exit(
        f"mpi4py, mpi4jax and the engine load different MPI libraries: {', '.join(sorted(libraries))}"
    )
for library in libraries:
    if folder and os.path.commonpath([library, folder]) != folder:
        sys.exit(f"{library} is loaded, not the MPI in {folder}: clear LD_LIBRARY_PATH")

comm = MPI.COMM_WORLD
total = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM, comm=comm)
if comm.size != ranks or total.tolist() != [ranks] * 3:
    sys.exit(
        f"{ranks} ranks were started, but MPI sees {comm.size} and sums to {total.tolist()}"
    )
if comm.rank == 0:
    print(MPI.Get_library_version().splitlines()[0].split(",")[0])
