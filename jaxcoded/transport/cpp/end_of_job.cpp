#include "end_of_job.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <thread>

#include "mpi_wire.h"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#ifdef OPEN_MPI
// Open MPI's parameter async_mpi_finalize: whether MPI_Finalize ends without waiting for the other ranks.
extern "C" __attribute__((weak)) bool ompi_async_mpi_finalize;
// Open MPI's number of communicators with processes of more than one start. MPI_Finalize disconnects all of
// these.
extern "C" __attribute__((weak)) int ompi_comm_num_dyncomm;
#endif

#ifdef MPIX_ERR_PROC_FAILED
// A wheel may be loaded with an Open MPI that does not have this function.
#pragma weak MPIX_Comm_get_failed
#endif

namespace jaxcoded {
namespace {

constexpr double ask_seconds = 1;   // between an answer and the next question
constexpr double say_seconds = 10;  // how long a root waits before it names the ranks that it waits for
constexpr double look_seconds = 10e-3;
constexpr double go_on_seconds = 1e-3;
constexpr double others_seconds = 2;  // within this time the other ranks reach their end, if all have failed alike
constexpr double heard_seconds = 0.1;  // time for the last words to reach the launcher, which otherwise may lose them
constexpr double forever = std::numeric_limits<double>::infinity();

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

int rank_of(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

// The processes that this process knows: first the processes of MPI_COMM_WORLD, in the order of their ranks
// there, then the processes that have joined.
MPI_Group& world() {
  static MPI_Group known = [] {
    MPI_Group out;
    MPI_Comm_group(MPI_COMM_WORLD, &out);
    return out;
  }();
  return known;
}

int world_size() {
  int size = 0;
  MPI_Group_size(world(), &size);
  return size;
}

// Return the ranks of a group as ranks of the world. All processes of the group must be known.
std::vector<int> of_world(MPI_Group group) {
  int size = 0;
  MPI_Group_size(group, &size);
  std::vector<int> ranks(static_cast<std::size_t>(size)), out(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group_translate_ranks(group, size, ranks.data(), world(), out.data());
  return out;
}

// Return the ranks of a communicator as ranks of the world. Some of its processes may not be known yet.
std::vector<int> in_world(MPI_Comm comm) {
  MPI_Group group;
  MPI_Comm_group(comm, &group);
  std::vector<int> out = of_world(group);
  if (std::ranges::find(out, MPI_UNDEFINED) != out.end()) {
    MPI_Group all;
    MPI_Group_union(world(), group, &all);
    MPI_Group_free(&world());
    world() = all;
    out = of_world(group);
  }
  MPI_Group_free(&group);
  return out;
}

// Send a message of one byte, or an empty one, to a rank. A dead rank does not get it.
void tell(MPI_Comm comm, Rank to, int tag, const unsigned char* byte = nullptr) {
  MPI_Request sent;
  if (MPI_Isend(byte, byte != nullptr, MPI_BYTE, to, tag, comm, &sent) == MPI_SUCCESS) {
    outcome_of(sent);
  }
}

// Add the dead ranks of a communicator, as far as MPI has noticed. Only a fault-tolerant MPI notices any.
void add_dead([[maybe_unused]] MPI_Comm comm, [[maybe_unused]] std::set<int>& out) {
#ifdef MPIX_ERR_PROC_FAILED
  MPI_Group failed;
  if (MPIX_Comm_get_failed != nullptr && MPIX_Comm_get_failed(comm, &failed) == MPI_SUCCESS) {
    const std::vector<int> ranks = of_world(failed);
    out.insert(ranks.begin(), ranks.end());
    MPI_Group_free(&failed);
  }
#endif
}

template <class Ranks>
std::string listed(const Ranks& ranks) {
  std::string out;
  for (const int rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + out + "]";
}

void say(const std::string& words) {
  const std::string line =
      "jaxcoded: rank " + std::to_string(rank_of(MPI_COMM_WORLD)) + " " + words + "\n";
  std::fputs(line.c_str(), stderr);
}

// Write a letter for `jaxcoded run` to the parent of this process (`cli/rank.py`). Returns whether there is
// such a parent.
bool tell_parent(const char* letter) {
  const char* const variable = std::getenv("JAXCODED_ENDS_JOB");
  int parent = 0, pipe = 0;
  // processes that a rank has started inherit the variable, but not the pipe
  return variable && std::sscanf(variable, "%d:%d", &parent, &pipe) == 2 && parent == getppid() &&
         write(pipe, letter, 1) == 1;
}

// End the job. A fault-tolerant mpirun may continue after MPI_Abort, so `jaxcoded run` is told, too.
void end_job(int status) {
  tell_parent("!");
  nap(heard_seconds);
  MPI_Abort(MPI_COMM_WORLD, status);
}

}  // namespace

std::set<int> EndOfJob::dead() const {
  std::set<int> out;
  add_dead(MPI_COMM_WORLD, out);
  // add the dead ranks among the processes that have joined
  if (world_size() > size_of(MPI_COMM_WORLD)) {
    for (const Own& group : own_) add_dead(group.comm, out);
    for (const auto& [rank, root] : roots_) add_dead(root.comm, out);
  }
  return out;
}

void EndOfJob::enter(MPI_Comm comm, Rank root, double silent_seconds) {
  silent_seconds_ = silent_seconds;
  if (roots_.empty() && own_.empty()) tell_parent("+");
  std::vector<int> world = in_world(comm);
  if (rank_of(comm) != root) {
    roots_.insert_or_assign(world[static_cast<std::size_t>(root)], Place{comm, root});
    above_.try_emplace(Below{MPI_Comm_c2f(comm), root}, comm, root, world[static_cast<std::size_t>(root)]);
  } else if (std::ranges::find(own_, comm, &Own::comm) == own_.end()) {
    own_.push_back({comm, std::move(world)});
  }
}

void EndOfJob::give_up(MPI_Comm comm, const std::vector<Rank>& ranks) {
  const std::vector<int> world = in_world(comm);
  for (const Rank rank : ranks) absent_.insert(world[static_cast<std::size_t>(rank)]);
}

void EndOfJob::note(bool failed, int status) {
  failed_ = failed;
  status_ = status;
  dies_ = failed && tell_parent("-") && !status && fault_tolerant();
}

bool EndOfJob::answer() {
  bool asked = false;
  for (auto& [where, root] : above_) asked |= root.presence.answer();
  return asked;
}

bool EndOfJob::has_ended(MPI_Comm comm, Rank root) const {
  const auto entry = above_.find({MPI_Comm_c2f(comm), root});
  return entry != above_.end() && std::ranges::any_of(above_, [&](const auto& other) {
    return other.second.world == entry->second.world && other.second.presence.root_has_ended();
  });
}

void EndOfJob::end() {
  std::vector<Below> below;
  for (const auto& [where, root] : above_) below.push_back(where);
  above_.clear();
  for (const auto& [rank, root] : roots_) tell(root.comm, root.rank, tag::end, &failed_);
  dies_at_ = dies_ ? now() + others_seconds : forever;
  if (left_any()) {
    wait();
    if (status_) end_job(status_);
  }
  go_on(below);
  // the other ranks may by now have a new root, and continue without this rank
  if (dies_ && !dead().empty()) {
    nap(std::max(dies_at_ - now(), 0.0));
    die();
  }
#ifdef OPEN_MPI
  // If a rank has died, the barrier in MPI_Finalize of Open MPI 5.0 never ends in one of ten jobs.
  if ((joins_ || !dead().empty()) && &ompi_async_mpi_finalize) ompi_async_mpi_finalize = true;
  // To disconnect these communicators, Open MPI waits for all of their ranks, or crashes if one is dead.
  if (joins_ && &ompi_comm_num_dyncomm) ompi_comm_num_dyncomm = 0;
#endif
  tell_parent(".");
}

void EndOfJob::die() const {
  std::fflush(nullptr);
  kill(getpid(), SIGKILL);
}

// Wait until all other ranks are at their end. If none of the remaining ranks answers, end the job.
void EndOfJob::wait() {
  struct Other {
    Place place;
    double silent_since = forever, ask_at = 0;
  };
  std::map<int, Other> others;
  for (const Own& group : own_) {
    for (std::size_t i = 0; i < group.world.size(); ++i) {
      others[group.world[i]].place = {group.comm, static_cast<Rank>(i)};
    }
  }
  if (others.size() < static_cast<std::size_t>(world_size())) {
    std::set<int> absent = absent_;
    for (const int rank : dead()) absent.erase(rank);
    if (absent.empty()) return;
    say("waits in MPI_Finalize for ranks " + listed(absent) +
        ", without which it left its group. If they are frozen it waits for ever: it cannot end a "
        "job that has ranks outside its groups, of which it knows nothing");
    return;
  }
  others.erase(rank_of(MPI_COMM_WORLD));
  const auto remaining = [&] {
    std::vector<int> out;
    for (const auto& [rank, other] : others) out.push_back(rank);
    return listed(out);
  };
  double looked = now();
  for (double say_at = now() + say_seconds; !others.empty(); nap(look_seconds)) {
    const double time = now();
    // While this process was stopped it got no answers, so it asks all ranks again.
    if (time - looked >= silent_seconds_ / 2) {
      for (auto& [rank, other] : others) other = {other.place};
    }
    looked = time;
    for (const auto& [rank, byte] : received(tag::answer)) {
      const auto other = others.find(rank);
      if (other != others.end()) other->second = {other->second.place, forever, time + ask_seconds};
    }
    for (const auto& [rank, failed] : received(tag::end)) {
      failed_ |= failed;
      others.erase(rank);
    }
    for (const int rank : dead()) others.erase(rank);
    for (auto& [rank, other] : others) {
      if (other.silent_since != forever || time < other.ask_at) continue;
      tell(other.place.comm, other.place.rank, tag::question);
      other.silent_since = time;
    }
    const bool answered = std::ranges::any_of(others, [](const auto& other) {
      return other.second.silent_since == forever && other.second.ask_at > 0;
    });
    if (time >= dies_at_ && answered) die();
    const bool silent = std::ranges::all_of(others, [&](const auto& other) {
      return time - other.second.silent_since >= silent_seconds_;
    });
    if (silent && !others.empty()) {
      say("ends the job without ranks " + remaining() +
          ", which do not say whether they are there: they are frozen or dead");
      std::fflush(stdout);
      end_job(status_ ? status_ : failed_);
    }
    if (time >= say_at && !others.empty()) {
      say("waits for the end of ranks " + remaining());
      say_at = forever;
    }
  }
}

// Continue once all roots of this process's groups continue. A root waits until every rank has received the
// root's message, since MPI may move no messages in `MPI_Finalize`. Nobody waits for a dead rank.
void EndOfJob::go_on(const std::vector<Below>& below) {
  struct Pending {
    MPI_Request request;
    int other;  // rank of the world
  };
  std::vector<Pending> pending;
  const auto add = [&](auto start, MPI_Comm comm, Rank other) {
    MPI_Request request;
    // MPI may report that the other rank is dead
    if (start(nullptr, 0, MPI_BYTE, other, tag::go_on, comm, &request) == MPI_SUCCESS) {
      pending.push_back({request, in_world(comm)[static_cast<std::size_t>(other)]});
    }
  };
  for (const auto& [comm, root] : below) add(MPI_Irecv, MPI_Comm_f2c(comm), root);
  for (const Own& group : own_) {
    const Rank self = rank_of(group.comm);
    for (Rank rank = 0; rank < static_cast<Rank>(group.world.size()); ++rank) {
      if (rank != self) add(MPI_Issend, group.comm, rank);
    }
  }
  for (double each = go_on_seconds;; each = std::min(2 * each, look_seconds)) {
    const std::set<int> gone = dead();
    std::erase_if(pending, [&](Pending& one) { return outcome_of(one.request) || gone.contains(one.other); });
    if (pending.empty()) return;
    if (now() >= dies_at_) die();
    nap(each);
  }
}

std::vector<std::pair<int, unsigned char>> EndOfJob::received(int tag) {
  std::vector<std::pair<int, unsigned char>> out;
  for (const Own& group : own_) {
    // ask for one rank after the other: once MPI has noticed a failure, a probe for any source reports nothing
    for (Rank rank = 0; rank < static_cast<Rank>(group.world.size()); ++rank) {
      int has_message = 0;
      while (MPI_Iprobe(rank, tag, group.comm, &has_message, MPI_STATUS_IGNORE) == MPI_SUCCESS && has_message) {
        unsigned char byte = 0;
        if (MPI_Recv(&byte, 1, MPI_BYTE, rank, tag, group.comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
        out.emplace_back(group.world[static_cast<std::size_t>(rank)], byte);
      }
    }
  }
  return out;
}

}  // namespace jaxcoded
