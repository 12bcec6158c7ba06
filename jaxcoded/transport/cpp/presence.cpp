#include "presence.h"

#include <algorithm>

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

bool Presence::answer() {
  // After MPI has reported that the root is dead, no question can come.
  if (question_ == MPI_REQUEST_NULL) return false;
  int asked = 0;
  if (MPI_Test(&question_, &asked, MPI_STATUS_IGNORE) != MPI_SUCCESS || !asked) return false;
  asked_ = std::min(asked_ + 1, 2);
  MPI_Request sent;
  if (MPI_Isend(nullptr, 0, MPI_BYTE, root_, tag::answer, comm_, &sent) == MPI_SUCCESS) {
    outcome_of(sent);
  }
  listen();
  return true;
}

}  // namespace jaxcoded
