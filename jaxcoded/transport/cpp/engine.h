// The process's engine: its groups, its progress thread, and who does the work when.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "end_of_job.h"
#include "erasures.h"
#include "fair_mutex.h"
#include "mpi_wire.h"
#include "node.h"
#include "page.h"
#include "pool.h"
#include "reports.h"

namespace jaxcoded {

// A call on its way. The calls of a group at a rank are carried out one after the other, in the
// order in which they came.
struct Flight {
  std::uint32_t number = 0;  // by which a started one is called for; others have none
  Call call;                 // until the node has it
  bool submitted = false;    // the node has it
  std::shared_ptr<Flight> replaces = {};  // whose call the node has until then, in the same round
  bool open = false;         // more parts of its vectors follow
  bool shared = false;       // or blocks, until the round is over,
  bool looped = false;       // in a loop on the host, which says when it ends
  Outcome outcome = Outcome::pending;
  std::string error;
  std::uint64_t fingerprint = 0;   // of the call,
  std::vector<Segment> total;      // its result,
  std::vector<std::byte*> result;  // and where that is, of a started one
  // Copies of the caller's vectors. A result takes the place of a copy like it.
  std::shared_ptr<Pool> pool;
  std::vector<Buffer> memory;
  std::shared_ptr<Feed> feed;  // what brings its vectors, if they are not here
};

// A group at this rank, as the engine knows it.
struct Member {
  std::unique_ptr<MpiWire> wire;
  std::unique_ptr<Node> node;
  std::uint64_t slot = 0;
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<Rank> children;
  bool root = false;
  std::string failure;  // this rank's error since its last call, in words
  Erasures erasures;
  bool reports = false;  // for whom a call waits after its deadline
  std::pair<Round, int> reported = {0, 0};  // the round and `Node::overdue`
  bool abandoned = false;  // this rank makes no more calls, but relays
  std::shared_ptr<Pool> pool;
  // Calls that are not over, of which the node has the first. One that is open is the last.
  std::deque<std::shared_ptr<Flight>> queue;
  // Calls that were started and not called for yet, over or not, in their order.
  std::deque<std::shared_ptr<Flight>> started;
  std::uint32_t numbers = 0;  // given to started calls
  bool running = false;       // a thread is in `run` or `take`,
  std::string mixed_up;       // or two were, here or elsewhere: why no call is carried out any more
  bool closing = false;       // or in `close`,
  int inside = 0;             // and so many in `wait`
  std::uint32_t unmade = 0;   // calls that there was too little memory to make: their rounds are to fail,
  bool lacks_memory = false;  // as is the round of the node's call
  bool lost_part = false;     // the latest one was to come in parts, and one could not be kept

  // Whether the last call of the queue is open.
  bool has_open_call() const { return !queue.empty() && queue.back()->open; }
  // Rounds that were called and that the node does not count yet.
  std::uint64_t ahead() const;
  // Rounds that are decided and that this rank has not called yet.
  std::uint64_t lag() const;
  Round next() const { return node->next() + ahead(); }  // that this rank will call next
  std::uint64_t memory_bytes() const;
};

// What a collective's call brings along.
struct Request {
  std::uint64_t fingerprint = 0;
  std::string signature = {};
  bool up = true, down = true, skipped = false;
  std::vector<Segment> message = {}, total = {};
  std::vector<const std::byte*> own = {};
  std::vector<std::byte*> out = {};
  std::vector<bool> erased = {};  // ranks left out; empty: none
  std::vector<Apart> apart = {};
  Examples examples = {};
  Audits audits = {};
  std::vector<double> costs = {};  // of blocks, see `Ledger::begin`
  bool continues = false;    // the open call, of which parts are here
  std::shared_ptr<Feed> feed = {};  // what brings and takes the vectors, if they are not here
};

// What a program that shares its work gets: a block, or none, as the round is over.
struct Taken {
  std::optional<Work> work = {};
  std::string error = {};
  bool needs_own = false;  // its vectors, which were not brought along: it is to come again with them
};

struct Result {
  Outcome outcome;
  std::string error;
};

struct Started {
  std::uint32_t number = 0;
  std::string error;
};

class Engine {
 public:
  static Engine& instance();

  // This process's part of what all ranks need to know for a new group.
  Card introduce();
  // What all of a group's ranks made of `introduce`. To be called on every rank before any opens it.
  void let_read(const std::vector<Card>& cards);
  // There will be no such group.
  void forget(const Card& card);
  void open(std::uint64_t index, std::unique_ptr<MpiWire> wire, std::unique_ptr<Node> node,
            Member member);
  // It was opened here, but not on all ranks: nobody has called anything.
  void discard(std::uint64_t index);
  Validity& validity(std::uint64_t slot);
  const std::atomic<std::uint32_t>& messages(std::uint64_t slot);
  // Where vectors are to lie, such as other processes of this host read or not.
  Source& memory(bool shared);
  // The group of this communicator is open on all ranks; see `EndOfJob`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // This process joins a job, or is about to start others that do; see `EndOfJob`.
  void join();

  // One round. Blocks until its result is there; any thread, one call per group at a time.
  Result run(std::uint64_t index, Request request);
  // The same, to be called for by `finish`. Copies the vectors and does not wait, unless
  // `most_started` were not called for: then for the end of the oldest, which is forgotten.
  Started start(std::uint64_t index, Request request);
  // Blocks until the started call is over, and copies its result, which must be like `total`.
  Result finish(std::uint64_t index, std::uint32_t number, const std::vector<Segment>& total,
                const std::vector<std::byte*>& out);
  static constexpr std::size_t most_started = 64;
  // The next part of the vectors of a round that `run` will follow. Copies it, and does not wait.
  // `message` and `total` are those of the round. What a feed brings is not copied. In words, why
  // not; empty otherwise.
  std::string extend(std::uint64_t index, Request request);
  // The next block to compute in a round that `run` will follow, which `continues` it. What was
  // given before is computed, and `own`, this rank's vectors, are there until this returns. Without them it
  // returns, too, where they are needed. Blocks.
  Taken take(std::uint64_t index, Request request);
  // The program comes for no more blocks of such a round.
  void leave_share(std::uint64_t index);
  void note_failure(std::uint64_t index, const std::string& words);
  // A call that there was too little memory to bring here: its round fails.
  void note_unmade(std::uint64_t index);
  // Nor does the open call get its next part, if there is one.
  void note_lost_part(std::uint64_t index);
  // What brings the vectors of the open call that a request goes on with; none if it begins one.
  std::shared_ptr<Feed> feed_of(std::uint64_t index, const Request& request);
  // A feed has news. Any thread.
  void wake_up() { page_->wake_up.send(); }

  // Call `use` with the group's member, under the lock.
  template <class Use>
  auto with(std::uint64_t index, Use use) {
    std::unique_lock lock(mutex_);
    return use(member(index));
  }
  // Do the engine's work until `done(member)`, or so many seconds. Whether it is done. Raises
  // `Closed` if the group is closed meanwhile.
  bool wait(std::uint64_t index, double seconds, const std::function<bool(Member&)>& done);

  // The group goes on under another index, with another code. Not while it has a call.
  void replan(std::uint64_t index, std::uint64_t next, const std::vector<Rank>& children,
              Decoder decoder, Erasures erasures);

  // Of a group: whom a call waits for after its deadline, or what no round is left to fail with.
  using Warning = std::pair<std::uint64_t, std::string>;
  Reports<Warning>& warnings() { return warnings_; }

  // Refuse this rank's calls from now on, after a failure (see `Node::leave`). It still relays to
  // those below.
  void abandon(std::uint64_t index, const std::string& failure);
  // Leave the group once nobody needs this rank any more, after so many seconds at the latest.
  // The ranks below that had not left by then. Raises `Closed` once another thread has closed it.
  std::vector<Rank> close(std::uint64_t index, double seconds);
  // Leave all groups, after a failure or not, and fail what waits. Nothing works afterwards, but
  // whether this process is there is answered until `MPI_Finalize`. Ranks below that have not left
  // after so many seconds are given up. When it returns no other thread is in the engine, nor does
  // any rank take what it reads in this process. With a status that is not 0 the process would end
  // the job; whether the engine will do that, as its root has left ranks behind.
  bool stop(double seconds, const std::string& failure, int status);

 private:
  Engine();
  ~Engine();

  Member& member(std::uint64_t index);
  bool poll();
  bool hears_nothing() const;
  double longest_nap(const Member& member) const;
  double longest_sleep(bool waiting, double quiet) const;
  template <class Done>
  bool drive(std::unique_lock<FairMutex>& lock, const Done& done, double until);
  void progress();
  std::string standing() const;
  std::string waited_for_elsewhere(std::uint64_t index) const;
  std::shared_ptr<Flight> flight_of(Member& member, Request& request);
  std::shared_ptr<Flight> continued(Member& member, const Request& request) const;
  Call call_of(Member& member, Request& request);
  template <class Make>
  std::shared_ptr<Flight> launched(Member& member, const Request& request, Make make);
  void fail_for_memory(Member& member, Flight& flight);
  void enqueue(Member& member, const std::shared_ptr<Flight>& flight);
  void enqueue_unmade(Member& member);
  std::string why_not(Member& member);
  std::string returned(std::uint64_t index);
  void leave_share(Member& member, Flight& flight);
  void leave_open_share(Member& member);
  bool fly(Member& member);
  void work(Member& member);
  template <class Turn>
  bool in_memory(Member& member, Turn turn);
  void say_news(std::uint64_t index, Member& member, bool waits);
  void leave(Member& member, const std::string& failure);
  void give_up(const Member& member, const std::vector<Rank>& absent);
  void attend_finalize();
  void report_untold(std::uint64_t index, const Member& member);
  void finalize();
  void tell_waiting();
  void wait_until_nobody_is_in(std::unique_lock<FairMutex>& lock, const int& inside);

  OwnPage page_;
  Spare spare_{heap, &shared_spare_}, shared_spare_{page_.memory(), &spare_};
  FairMutex mutex_;
  std::condition_variable_any changed_;
  int waiting_ = 0;  // threads on `changed_`
  std::map<std::uint64_t, Member> members_;
  Reports<Warning> warnings_;
  // A thread that may look at a member again after it has waited for the lock.
  class Inside {
   public:
    explicit Inside(int& threads) : threads_(threads) { ++threads_; }
    ~Inside() { --threads_; }
    Inside(const Inside&) = delete;

   private:
    int& threads_;
  };
  int inside_ = 0;
  bool driving_ = false;
  bool ending_ = false;      // nothing can be called any more,
  bool stopping_ = false;    // and nothing is done,
  bool finalizing_ = false;  // nor answered
  double nap_ = 0;
  double asks_mpi_at_ = 0;  // again, for each group
  EndOfJob end_of_job_;
  int at_finalize_ = MPI_KEYVAL_INVALID;  // of MPI_COMM_SELF, whose attributes end first
  double answers_at_ = 0;
  std::thread thread_;
};

inline constexpr const char* no_memory = "CodedError: this rank has too little memory for this call";

// Calls of this thread that a group has counted: what fails for want of memory after that is not counted again.
inline thread_local std::uint64_t calls_counted = 0;

// Make a call. Without the memory for it, the round that it `begins` fails, or that of the open call.
template <class Make>
auto counted(std::uint64_t index, bool begins, Make make) {
  const std::uint64_t before = calls_counted;
  try {
    return make();
  } catch (const std::bad_alloc&) {
    Engine& engine = Engine::instance();
    begins && calls_counted == before ? engine.note_unmade(index) : engine.note_lost_part(index);
    throw;
  }
}

// Raised for a group that is not open.
struct Closed {
  std::string text;
};

}  // namespace jaxcoded
