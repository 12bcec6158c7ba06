"""What MPI makes of ranks that join, with mpi4py alone. ``joining.py DIRECTORY WAY``:

- "spawned": the ranks start one more (`MPI_Comm_spawn`), and all of them sum;
- "after a death": one rank has died before, and MPI has left it out (`Shrink`);
- "old dies": a rank that was there from the beginning dies afterwards, and the others leave it out;
- "new dies": the one that has joined does;
- "connects": it is started by an mpirun of its own instead (`MPI_Comm_connect` and `accept`).
"""

import os
import pathlib
import signal
import sys
import time

from mpi4py import MPI

directory, way, *joins = sys.argv[1:]
port = pathlib.Path(directory) / "port"


def tolerant(comm):
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def without(comm, rank):
    """The ranks of a communicator but one, which dies."""
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(source=rank)
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_PROC_FAILED
    return tolerant(comm.Shrink())


world, parent = tolerant(MPI.COMM_WORLD), MPI.Comm.Get_parent()
if parent != MPI.COMM_NULL:
    both = parent
elif joins:
    both = world.Connect(port.read_text())
elif way == "connects":
    name = None
    if world.rank == 0:
        name = MPI.Open_port()
        port.with_suffix(".new").write_text(name)
        port.with_suffix(".new").rename(port)
    both = world.Accept(name)
else:
    comm = tolerant(world.Dup())
    if way == "after a death":
        comm = without(comm, comm.size - 1)
    both = comm.Spawn(sys.executable, sys.argv)
comm = tolerant(tolerant(both).Merge(high=both is parent or bool(joins)))
if way in ("old dies", "new dies"):
    comm = without(tolerant(comm.Dup()), 1 if way == "old dies" else comm.size - 1)
assert comm.allreduce(1) == comm.size
# one write, so that lines of ranks do not mix
sys.stderr.write(f"sum of {comm.size} after {time.process_time():.1f} s\n")
