// Whether a process is there, for a root that would end the job without it.
#pragma once

#include <mpi.h>

namespace jaxcoded {

// Answers the root of a group that asks, whatever the program does, also when this process has
// closed the group and as long as its engine runs.
class Presence {
 public:
  // As ranks of `comm`, which is never freed.
  Presence(MPI_Comm comm, int root);
  ~Presence();
  Presence(const Presence&) = delete;

  // What was asked since the last time.
  void answer();

 private:
  void listen();

  MPI_Comm comm_;
  int root_;
  MPI_Request question_ = MPI_REQUEST_NULL;
};

}  // namespace jaxcoded
