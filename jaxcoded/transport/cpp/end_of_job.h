// How a process ends if other ranks of its job may never end.
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

// `MPI_Finalize` waits for every rank of the job, even for a frozen one. So a root that has left a group without
// waiting for some ranks finalizes only once it knows that all other ranks will finalize. At the start of
// `MPI_Finalize` every rank reports its end to its roots. The root then asks the remaining ranks whether they
// are there. The engine of a rank answers until the rank finalizes, whatever its program does, even after it has
// closed the group. Once all remaining ranks are silent, the root ends the job. The root does not know ranks
// that were never in one of its groups, and waits for these ranks in `MPI_Finalize`, as any program does.
//
// No rank continues with `MPI_Finalize` before its roots do. Open MPI's launcher may crash or hang if a job is
// ended while some of its ranks are in `MPI_Finalize`.
//
// If MPI is fault-tolerant, living ranks may continue without a rank whose program has ended with an error. MPI
// would consider this rank alive, and wait until it ends. So the rank kills itself, unless all other ranks are
// at their end, too. The rank kills itself only under `jaxcoded run`, which knows that the rank's program
// failed.
class EndOfJob {
 public:
  // Record that this process is in a group; all ranks of the group call this. `comm` is never freed. At the end
  // of its process, a root does not wait for ranks that have not answered for `silent_seconds`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // Record that this process joins a job, or lets other processes join its job. MPI then keeps communicators
  // with processes that were not all started together.
  void join() { joins_ = true; }
  // Record that this root has left a group without waiting for these ranks.
  void give_up(MPI_Comm comm, const std::vector<Rank>& ranks);
  // Whether this root has left a group without waiting for some ranks.
  bool left_any() const { return !absent_.empty(); }
  // Record how this process ends. `failed`: by an exception. `status`: the status with which this process would
  // end the job; 0 if it would not end the job.
  void note(bool failed, int status);

  // Answer the questions that have come since the last call. Returns whether there were any.
  bool answer();
  // Whether the root of one of this process's groups has left the group and is at its end. The root asks over
  // any communicator that it shares with this process, not necessarily over `comm`.
  bool has_ended(MPI_Comm comm, Rank root) const;
  // Called in `MPI_Finalize`, when no other thread of the engine calls MPI any more.
  void end();

 private:
  // A process of the world, as a rank of a group's communicator. The world contains all processes that this
  // process knows: first the processes of MPI_COMM_WORLD, then the processes that have joined.
  struct Place {
    MPI_Comm comm;
    Rank rank;
  };
  struct Own {
    MPI_Comm comm;
    std::vector<int> world;  // for each rank of `comm`, its rank in the world
  };
  // Return messages of at most one byte that have come since the last call, each with its sender's world rank.
  std::vector<std::pair<int, unsigned char>> received(int tag);
  std::set<int> dead() const;  // dead ranks of the world, as far as MPI has noticed
  void wait();
  void die() const;
  using Below = std::pair<MPI_Fint, Rank>;  // a group in which this rank is not the root: communicator and root
  void go_on(const std::vector<Below>& below);

  // The roots of this process's groups, by rank of the world. This process reports its end to a root over the
  // root's latest communicator, not over MPI_COMM_WORLD. Most roots never receive the report. For messages that
  // were never received, MPICH's MPI_Finalize reports an error in MPI_COMM_WORLD, but not in a communicator
  // that was never freed.
  std::map<int, Place> roots_;
  std::vector<Own> own_;  // the groups whose root this rank is
  struct Above {
    Above(MPI_Comm comm, Rank root, int world) : presence(comm, root), world(world) {}
    Presence presence;
    int world;  // the root's rank in the world
  };
  std::map<Below, Above> above_;
  std::set<int> absent_;  // ranks of the world
  unsigned char failed_ = 0;  // 1 if an exception ends a process of one of this rank's groups
  int status_ = 0;
  bool joins_ = false;
  bool dies_ = false;  // this process dies if other ranks continue without it
  double dies_at_ = 0;
  double silent_seconds_ = 0;
};

}  // namespace jaxcoded
