// An MPI that does not take some messages, once it is told, and receives some pieces of vectors not at all, or not as a
// whole. To be preloaded.
#include <errno.h>
#include <mpi.h>
#include <sys/uio.h>

static int each = 0, asked = 0, pieces = 0;

void refuse_each(int number) { each = number; }

// How many messages of the engine were not taken.
int refused(void) { return each ? asked / each : 0; }

// Vectors go through MPI, as between hosts.
ssize_t process_vm_readv(pid_t process, const struct iovec* to, unsigned long places, const struct iovec* from,
                         unsigned long theirs, unsigned long flags) {
  errno = EPERM;
  return -1;
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  if (each && tag >= 5 && ++pieces % each == 0) {
    if (pieces / each % 2) return MPI_ERR_NO_MEM;
    --count;
  }
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  if (each && tag == 1 && ++asked % each == 0) return MPI_ERR_NO_MEM;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
