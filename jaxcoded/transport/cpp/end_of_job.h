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

// `MPI_Finalize` waits for every rank of the job, also for one that is frozen. So a root that has
// left a group without some ranks does not finalize before it knows that the others will: at the
// start of `MPI_Finalize` every rank tells it of its end, and it asks those that have not whether
// they are there. An engine answers until then, whatever the program does and also when it has
// closed the group. Once nobody is left but ranks that do not answer, the root ends the job. Of
// ranks that were never in a group of its own it knows nothing, and waits in `MPI_Finalize` as any
// program does.
//
// No rank goes on with `MPI_Finalize` before its roots do: Open MPI's launcher may crash or hang
// where a job is ended while some are in it.
//
// Where MPI is fault-tolerant, ranks that live may go on without one whose program has ended with an
// error. For MPI it would live, and be waited for, until it is at its end: so it dies, unless all others are at
// theirs, and `jaxcoded run` knows its status.
class EndOfJob {
 public:
  // This process is in a group, of which all ranks call this: `comm` is never freed. A root
  // ends the job without ranks that have not answered for `silent_seconds`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // This process has joined a job, or others have joined, or will: MPI keeps communicators of all.
  void join() { joins_ = true; }
  // This root has left a group without these.
  void give_up(MPI_Comm comm, const std::vector<Rank>& ranks);
  // Whether it has done so.
  bool left_any() const { return !absent_.empty(); }
  // Whether an exception ends this process, and the status with which it would end the job, if it
  // would: other than 0.
  void note(bool failed, int status);

  // What was asked since the last time.
  void answer();
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
  // What ranks of the world have said since the last look, of one byte or none.
  std::vector<std::pair<int, unsigned char>> received(int tag);
  std::set<int> dead() const;  // ranks of the world, as MPI has noticed
  void wait();
  void die() const;
  using Below = std::pair<MPI_Fint, Rank>;  // where this rank is not the root: communicator and root
  void go_on(const std::vector<Below>& below);

  // By rank of the world. What this process tells a root of its end goes over the last
  // communicator. Not over MPI_COMM_WORLD: most roots never ask, and to MPICH a message that nobody
  // has received there is an error of MPI_Finalize, though none in one that was never freed.
  std::map<int, Place> roots_;
  std::vector<Own> own_;  // where this rank is the root
  std::map<Below, Presence> presences_;
  std::set<int> absent_;  // ranks of the world
  unsigned char failed_ = 0;  // whether an exception ends a process of the group: 1
  int status_ = 0;
  bool joins_ = false;
  bool dies_ = false;  // where others go on
  double dies_at_ = 0;
  double silent_seconds_ = 0;
};

}  // namespace jaxcoded
