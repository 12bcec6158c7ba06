// Tells a root that this process is there. If the root got no answer, it would end the job without this process.
#pragma once

#include <mpi.h>

namespace jaxcoded {

// Answers the questions of a group's root, whatever the program does, as long as this process's engine runs,
// even after the engine has closed the group.
class Presence {
 public:
  // `root`: its rank in `comm`, which is never freed.
  Presence(MPI_Comm comm, int root);
  ~Presence();
  Presence(const Presence&) = delete;

  // Answer the question that has come since the last call. Returns whether there was one.
  bool answer();
  // Whether the root is at its end, and everything that it sent before has arrived. The root asks only at its
  // end. The root asks again a while after the first answer.
  bool root_has_ended() const { return asked_ >= 2; }

 private:
  void listen();

  MPI_Comm comm_;
  int root_;
  int asked_ = 0;
  MPI_Request question_ = MPI_REQUEST_NULL;
};

}  // namespace jaxcoded
