// The end of a process whose job has ranks that will never end.
#pragma once

#include <mpi.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "node.h"
#include "presence.h"

namespace jaxcoded {

// `MPI_Finalize` waits for every rank of the job, even for one that is frozen. So a root that has left
// a group without some ranks does not finalize before it knows that the others will. At the start of
// `MPI_Finalize` every rank reports its end to the root, and the root asks the others whether they are
// there. An engine answers until then, whatever the program does, even after it has closed the group.
// Once only ranks that do not answer are left, the root ends the job. It knows nothing of ranks that
// were never in a group of this root, and waits in `MPI_Finalize` as any program does.
//
// No rank continues with `MPI_Finalize` before its roots do: Open MPI's launcher may crash or hang if
// a job is ended while some ranks are in it.
//
// If MPI is fault-tolerant, living ranks may continue without one whose program has ended with an
// error. MPI would take that rank for alive, and wait for it until its end. So the rank dies, unless all
// others are at their end, and `jaxcoded run` knows its status.
class EndOfJob {
 public:
  // This process is in a group; all ranks of the group call this. `comm` is never freed. A root
  // ends the job without ranks that have not answered for `silent_seconds`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // This process has joined a job, or others have joined, or will: MPI keeps communicators of all.
  void join() { joins_ = true; }
  // This root has left a group without these ranks.
  void give_up(MPI_Comm comm, const std::vector<Rank>& ranks);
  // Whether it has done so.
  bool left_any() const { return !absent_.empty(); }
  // Whether an exception ends this process, and the status with which it would end the job; 0 if it
  // would not.
  void note(bool failed, int status);

  // Answer what was asked since the last time. Returns whether anything was.
  bool answer();
  // Whether the root of a group of this process is at its end, and has left the group. It may have another
  // communicator in common with this process, and asks on one of them.
  bool has_ended(MPI_Comm comm, Rank root) const;
  // In `MPI_Finalize`, when no other thread calls MPI for the engine any more.
  void end();

 private:
  // A rank of the world, as one of a group's communicator. The world is all processes that this one knows: of
  // MPI_COMM_WORLD, and then those that have joined.
  struct Place {
    MPI_Comm comm;
    Rank rank;
  };
  struct Own {
    MPI_Comm comm;
    std::vector<int> world;  // its ranks as ranks of the world
  };
  // Messages of one byte or none that came from ranks of the world since the last look.
  std::vector<std::pair<int, unsigned char>> received(int tag);
  std::set<int> dead() const;  // ranks of the world, as MPI has noticed
  void wait();
  void die() const;
  using Below = std::pair<MPI_Fint, Rank>;  // where this rank is not the root: communicator and root
  void go_on(const std::vector<Below>& below);

  // By rank of the world. This process reports its end to a root over the last communicator, not over
  // MPI_COMM_WORLD. Most roots never ask, and MPICH takes a message that was never received there for
  // an error in MPI_Finalize, though not in a communicator that was never freed.
  std::map<int, Place> roots_;
  std::vector<Own> own_;  // where this rank is the root
  struct Above {
    Above(MPI_Comm comm, Rank root, int world) : presence(comm, root), world(world) {}
    Presence presence;
    int world;  // the root's rank there
  };
  std::map<Below, Above> above_;
  std::set<int> absent_;  // ranks of the world
  unsigned char failed_ = 0;  // whether an exception ends a process of the group: 1
  int status_ = 0;
  bool joins_ = false;
  bool dies_ = false;  // if others continue
  double dies_at_ = 0;
  double silent_seconds_ = 0;
};

}  // namespace jaxcoded
