// The end of a process in a job with ranks that never end.
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

// `MPI_Finalize` waits for every rank of the job, even for a frozen one. So a root that has left a group
// without some ranks does not finalize before it knows that the other ranks will. At the start of
// `MPI_Finalize` every rank reports its end to its roots. The root then asks the remaining ranks whether they
// are there. The engine of a rank answers until the rank finalizes, whatever its program does, even after it
// has closed the group. Once only ranks that do not answer remain, the root ends the job. It knows nothing of
// ranks that were never in one of its groups. For these it waits in `MPI_Finalize`, as any program does.
//
// No rank continues with `MPI_Finalize` before its roots do. Open MPI's launcher may crash or hang if a job is
// ended while some of its ranks are in `MPI_Finalize`.
//
// If MPI is fault-tolerant, living ranks may continue without a rank whose program has ended with an error. MPI
// would take that rank for alive, and wait until it ends. So the rank kills itself, unless all other ranks are
// at their end. It does so only under `jaxcoded run`, which knows that its program failed.
class EndOfJob {
 public:
  // This process is in a group; all ranks of the group call this. `comm` is never freed. A root
  // ends the job without ranks that have not answered for `silent_seconds`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // This process joins a job, or lets other processes join its job. MPI then keeps communicators that contain
  // processes of several starts.
  void join() { joins_ = true; }
  // This root has left a group without these ranks.
  void give_up(MPI_Comm comm, const std::vector<Rank>& ranks);
  // Whether this root has left a group without some ranks.
  bool left_any() const { return !absent_.empty(); }
  // `failed`: an exception ends this process. `status`: the status with which this process would end the job; 0
  // if it would not end the job.
  void note(bool failed, int status);

  // Answer the questions that have come since the last call. Returns whether there were any.
  bool answer();
  // Whether the root of a group of this process is at its end, and has left the group. The root asks over one
  // of the communicators that it shares with this process, not necessarily over `comm`.
  bool has_ended(MPI_Comm comm, Rank root) const;
  // In `MPI_Finalize`, when no other thread calls MPI for the engine any more.
  void end();

 private:
  // A rank of the world, as a rank of a group's communicator. The world is all processes that this process
  // knows: those of MPI_COMM_WORLD, and then those that have joined.
  struct Place {
    MPI_Comm comm;
    Rank rank;
  };
  struct Own {
    MPI_Comm comm;
    std::vector<int> world;  // for each rank of `comm`, its rank in the world
  };
  // Messages of at most one byte that have come since the last call, each with its sender's rank in the world.
  std::vector<std::pair<int, unsigned char>> received(int tag);
  std::set<int> dead() const;  // dead ranks of the world, as far as MPI has noticed
  void wait();
  void die() const;
  using Below = std::pair<MPI_Fint, Rank>;  // a group in which this rank is not the root: communicator and root
  void go_on(const std::vector<Below>& below);

  // The roots of this process's groups, by rank of the world. This process reports its end to a root over the
  // root's latest communicator, not over MPI_COMM_WORLD. Most roots never receive the report. In
  // MPI_COMM_WORLD, MPICH takes a message that was never received for an error in MPI_Finalize, but not in a
  // communicator that was never freed.
  std::map<int, Place> roots_;
  std::vector<Own> own_;  // the groups whose root this rank is
  struct Above {
    Above(MPI_Comm comm, Rank root, int world) : presence(comm, root), world(world) {}
    Presence presence;
    int world;  // the root's rank in the world
  };
  std::map<Below, Above> above_;
  std::set<int> absent_;  // ranks of the world
  unsigned char failed_ = 0;  // 1 if an exception ends a process of a group of this rank
  int status_ = 0;
  bool joins_ = false;
  bool dies_ = false;  // this process dies if other ranks continue without it
  double dies_at_ = 0;
  double silent_seconds_ = 0;
};

}  // namespace jaxcoded
