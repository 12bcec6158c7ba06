#include "presence.h"

#include "mpi_wire.h"

namespace jaxcoded {

Presence::Presence(MPI_Comm comm, int root) : comm_(comm), root_(root) { listen(); }

Presence::~Presence() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized || question_ == MPI_REQUEST_NULL) return;
  MPI_Cancel(&question_);
  MPI_Wait(&question_, MPI_STATUS_IGNORE);
}

void Presence::listen() { MPI_Irecv(nullptr, 0, MPI_BYTE, root_, tag::question, comm_, &question_); }

void Presence::answer() {
  // After MPI has reported the root's end there are no questions.
  if (question_ == MPI_REQUEST_NULL) return;
  int asked = 0;
  if (MPI_Test(&question_, &asked, MPI_STATUS_IGNORE) != MPI_SUCCESS || !asked) return;
  MPI_Request sent;
  if (MPI_Isend(nullptr, 0, MPI_BYTE, root_, tag::answer, comm_, &sent) == MPI_SUCCESS) {
    MPI_Request_free(&sent);
  }
  listen();
}

}  // namespace jaxcoded
