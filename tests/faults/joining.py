"""How MPI handles ranks that join, with mpi4py alone. ``joining.py DIRECTORY WAY``:

- "spawned": the ranks start another rank (`MPI_Comm_spawn`), and all ranks sum;
- "after a death": one rank has died, and MPI has excluded it (`Shrink`);
- "old dies": an old rank dies afterwards, and the other ranks exclude it;
- "new dies": the new rank dies, and the other ranks exclude it;
- "at once": as "old dies", but other ranks may still be making the communicator;
- "again": old and new ranks die in turn, and each is replaced;
- "connects": another mpirun starts the rank (`MPI_Comm_connect` and `accept`).
"""

import os
import pathlib
import signal
import sys
import time

from mpi4py import MPI

directory, way, *joins = sys.argv[1:]
port = pathlib.Path(directory) / "port"
# the ranks that die in "again": the first rank, the newest rank, and so on
VICTIMS = [0, -1, 1, -1]


def tolerant(comm):
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def without(comm, rank):
    """Return a communicator without one rank, which dies."""
    old, comm = comm, tolerant(comm.Dup())
    rank %= comm.size
    if way != "at once":
        comm.Barrier()
        time.sleep(0.5)  # so that no rank is in `Dup` any more
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(source=rank)
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_PROC_FAILED
    left = tolerant(comm.Shrink())
    freed(old, comm)
    return left


def with_one_more(comm):
    both = merged(comm.Spawn(sys.executable, sys.argv), new=False)
    freed(comm)
    return both


def merged(both, new):
    comm = tolerant(tolerant(both).Merge(high=new))
    freed(both)
    return comm


def freed(*comms):
    """Free these communicators: otherwise `MPI_Finalize` waits for ranks of several
    starts.
    """
    for comm in comms:
        if comm != MPI.COMM_WORLD:
            comm.Free()


world, parent, deaths = tolerant(MPI.COMM_WORLD), MPI.Comm.Get_parent(), 0
if parent != MPI.COMM_NULL:
    comm = merged(parent, new=True)
elif joins:
    comm = merged(world.Connect(port.read_text()), new=True)
elif way == "connects":
    name = None
    if world.rank == 0:
        name = MPI.Open_port()
        port.with_suffix(".new").write_text(name)
        port.with_suffix(".new").rename(port)
    comm = merged(world.Accept(name), new=False)
else:
    comm = without(world, -1) if way == "after a death" else world
    comm = with_one_more(comm)
if way == "again":
    deaths = comm.bcast(deaths)
    while deaths < len(VICTIMS):
        comm = without(comm, VICTIMS[deaths])
        assert comm.allreduce(1) == comm.size == 3
        comm = with_one_more(comm)
        deaths = comm.bcast(deaths + 1)
elif way.endswith(("dies", "at once")):
    comm = without(comm, -1 if way == "new dies" else 1)
assert comm.allreduce(1) == comm.size
# a single write, so that lines of different ranks do not mix
sys.stderr.write(f"sum of {comm.size} after {time.process_time():.1f} s\n")
