// An MPI that does not take some messages, once it is told. To be preloaded.
#include <mpi.h>

static int each = 0, asked = 0;

void refuse_each(int number) { each = number; }

// How many messages of the engine were not taken.
int refused(void) { return each ? asked / each : 0; }

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  if (each && tag == 1 && ++asked % each == 0) return MPI_ERR_NO_MEM;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
