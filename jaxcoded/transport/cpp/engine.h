// The process's engine: its groups, its progress thread, and which thread does the work when.
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

// A call in progress. A rank carries out the calls of a group one after the other, in the order in which they
// were made.
struct Flight {
  std::uint32_t number = 0;  // identifies a started call for `finish`; 0 for other calls
  Call call;                 // the call itself, until the node takes it
  bool submitted = false;    // the node has taken the call
  std::shared_ptr<Flight> replaces = {};  // the same round's earlier call, which the node has until it takes this call
  bool open = false;         // more parts of the call's vectors follow
  bool shared = false;       // shared work: more blocks may follow, until the round is over
  bool looped = false;       // the program computes the blocks in a loop on the host, and reports the loop's end
  Outcome outcome = Outcome::pending;
  std::string error;
  std::uint64_t fingerprint = 0;   // of the call
  std::vector<Segment> total;      // the segments of the call's result
  std::vector<std::byte*> result;  // where a started call's result is written
  // Copies of the caller's vectors. The result may overwrite a copy that has the same segments.
  std::shared_ptr<Pool> pool;
  std::vector<Buffer> memory;
  std::shared_ptr<Feed> feed;  // copies the call's vectors, if they are not in host memory
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
  bool reports = false;  // whether to report the ranks for which a call waits after its deadline
  std::pair<Round, int> reported = {0, 0};  // the latest report: its round and `Node::overdue`
  bool abandoned = false;  // this rank makes no more calls, but still relays
  std::shared_ptr<Pool> pool;
  // Calls that are not over; the node has the first. An open call is always the last.
  std::deque<std::shared_ptr<Flight>> queue;
  // Started calls for which `finish` was not called, in the order of their starts. These calls may be over.
  std::deque<std::shared_ptr<Flight>> started;
  std::uint32_t numbers = 0;  // the latest number given to a started call
  bool running = false;       // a thread is in `run` or `take`, or copies in `start`
  std::string mixed_up;  // why no call is carried out any more: two threads called at once, at this rank or another
  bool closing = false;       // a thread is in `close`
  int inside = 0;             // threads in `wait`
  std::uint32_t unmade = 0;   // calls for which this rank had too little memory; their rounds must fail
  bool lacks_memory = false;  // the round of the node's current call must fail, too
  bool lost_part = false;     // the latest call came in parts, and one part could not be kept

  // Whether the last call of the queue is open.
  bool has_open_call() const { return !queue.empty() && queue.back()->open; }
  // Return how many rounds were called that the node does not count yet.
  std::uint64_t ahead() const;
  // Return how many decided rounds this rank has not called yet.
  std::uint64_t lag() const;
  Round next() const { return node->next() + ahead(); }  // the round that this rank will call next
  std::uint64_t memory_bytes() const;
};

// What a collective passes with its call.
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
  std::vector<double> costs = {};  // of the blocks, see `Ledger::begin`
  bool continues = false;    // this continues the open call, some of whose parts have come
  std::shared_ptr<Feed> feed = {};  // copies the vectors, if they are not in host memory
};

// The answer to a program with shared work that asks for a block: the block, or none once the round is over.
struct Taken {
  std::optional<Work> work = {};
  std::string error = {};
  bool desynchronized = false;  // the kind of the error
  bool needs_own = false;  // the program did not pass its vectors: it must call again with them
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

  // Return what the other ranks need to know about this process for a new group.
  Card introduce();
  // `cards`: what `introduce` returned on all ranks of a group. Must be called on every rank before any rank
  // opens the group.
  void let_read(const std::vector<Card>& cards);
  // Forget a card, because its group will not be opened.
  void forget(const Card& card);
  void open(std::uint64_t index, std::unique_ptr<MpiWire> wire, std::unique_ptr<Node> node,
            Member member);
  // Discard a group that was opened at this rank but not at all ranks. No rank has called anything in it.
  void discard(std::uint64_t index);
  Validity& validity(std::uint64_t slot);
  const std::atomic<std::uint32_t>& messages(std::uint64_t slot);
  // Memory for vectors, `shared` if other processes of this host read them.
  Source& memory(bool shared);
  // Record that the group of this communicator is open on all ranks; see `EndOfJob`.
  void enter(MPI_Comm comm, Rank root, double silent_seconds);
  // Record that this process joins a job, or is about to start processes that join its job; see `EndOfJob`.
  void join();

  // Run one round. Blocks until its result is available. Any thread may call; one call per group at a time.
  Result run(std::uint64_t index, Request request);
  // Start a round that `finish` will end. Copies the vectors and does not wait, with one exception: if
  // `most_started` calls wait for `finish`, this waits until the oldest one ends, and drops its result.
  Started start(std::uint64_t index, Request request);
  // Blocks until the started call is over, and copies its result. `total` must equal the segments of that
  // result.
  Result finish(std::uint64_t index, std::uint32_t number, const std::vector<Segment>& total,
                const std::vector<std::byte*>& out);
  static constexpr std::size_t most_started = 64;
  // Pass the next part of the vectors of a round that `run` will end. Copies vectors in host memory, and does
  // not wait. `message` and `total` describe the whole round. Returns why the part failed, in words, or an
  // empty text.
  std::string extend(std::uint64_t index, Request request);
  // Return the next block to compute, in a round that a `run` with `continues` will end. The program has
  // computed the previous block. `own`, this rank's vectors, must stay valid until this returns. Blocks until
  // there is an answer. Without `own`, this also returns as soon as the vectors are needed.
  Taken take(std::uint64_t index, Request request);
  // Record that the program takes no more blocks of a round with shared work.
  void leave_share(std::uint64_t index);
  void note_failure(std::uint64_t index, const std::string& words);
  // Fail the round of a call that this rank had too little memory to make.
  void note_unmade(std::uint64_t index);
  // Record that this rank had too little memory for the next part of the open call, if there is one.
  void note_lost_part(std::uint64_t index);
  // Return the feed of the open call that a request continues; null if the request begins a call.
  std::shared_ptr<Feed> feed_of(std::uint64_t index, const Request& request);
  // Wake the engine because a feed has news. Any thread may call this.
  void wake_up() { page_->wake_up.send(); }

  // Call `use` with the group's member, under the lock.
  template <class Use>
  auto with(std::uint64_t index, Use use) {
    std::unique_lock lock(mutex_);
    return use(member(index));
  }
  // Do the engine's work until `done(member)` is true, or for this many seconds. Returns whether `done(member)`
  // is true. Raises `Closed` if the group is closed meanwhile.
  bool wait(std::uint64_t index, double seconds, const std::function<bool(Member&)>& done);

  // Continue the group under the index `next`, with another code. The group must have no call in progress.
  void replan(std::uint64_t index, std::uint64_t next, const std::vector<Rank>& children,
              Decoder decoder, Erasures erasures);

  // A group's index, and a text: the ranks that its call waits for after its deadline, or an error that no
  // later round can report.
  using Warning = std::pair<std::uint64_t, std::string>;
  Reports<Warning>& warnings() { return warnings_; }

  // Refuse this rank's calls from now on, after a failure (see `Node::leave`). This rank still relays to the
  // ranks below it.
  void abandon(std::uint64_t index, const std::string& failure);
  // Leave the group once no rank needs this rank any more, after this many seconds at the latest. Returns the
  // ranks below that this rank did not wait for. Raises `Closed` if another thread has closed the group.
  std::vector<Rank> close(std::uint64_t index, double seconds);
  // Leave all groups, after a failure or as planned, and fail the calls that wait. Ranks below that have not
  // left after this many seconds are given up. Afterwards the engine does only one thing: until `MPI_Finalize`,
  // it answers that this process is there. When this returns, no other thread is in the engine, and no rank
  // uses anything that it reads in this process. If `status` is not 0, the process would end the job with this
  // status. Returns whether the engine itself will end the job, as a root does that has left without waiting for
  // some ranks.
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
  void leave_call(Member& member, Flight& flight);
  void leave_open_share(Member& member);
  bool fly(Member& member);
  void work(Member& member);
  template <class Turn>
  bool in_memory(Member& member, Turn turn);
  void say_news(std::uint64_t index, Member& member, bool waits);
  void leave(Member& member, const std::string& failure);
  void give_up(const Member& member, const std::vector<Rank>& absent);
  using Members = std::map<std::uint64_t, Member>;
  Members::iterator end(Members::iterator entry, const char* why);
  void end_abandoned();
  void attend_finalize();
  void report_untold(std::uint64_t index, const Member& member);
  void finalize();
  void tell_waiting();
  void tell_of_ended_roots();
  void wait_until_nobody_is_in(std::unique_lock<FairMutex>& lock, const int& inside);

  OwnPage page_;
  Spare spare_{heap, &shared_spare_}, shared_spare_{page_.memory(), &spare_};
  FairMutex mutex_;
  std::condition_variable_any changed_;
  int waiting_ = 0;  // threads on `changed_`
  Members members_;
  Reports<Warning> warnings_;
  // Counts a thread that may use a member again after it has waited for the lock.
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
  bool ending_ = false;      // no more calls are accepted
  bool stopping_ = false;    // no more work is done
  bool finalizing_ = false;  // questions from roots are answered no more
  double nap_ = 0;
  double asks_mpi_at_ = 0;  // when every group asks MPI for messages again
  EndOfJob end_of_job_;
  int at_finalize_ = MPI_KEYVAL_INVALID;  // a keyval of MPI_COMM_SELF, whose attributes MPI_Finalize deletes first
  double answers_at_ = 0;
  std::thread thread_;
};

inline constexpr const char* no_memory = "CodedError: this rank has too little memory for this call";

// How many calls of this thread a group has counted. If memory runs out in a counted call, the call is not
// counted again.
inline thread_local std::uint64_t calls_counted = 0;

// Make a call. If there is too little memory for it, a round fails: the round that the call `begins`, or else
// the round of the open call.
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

// Thrown for a group that is not open.
struct Closed {
  std::string text;
};

}  // namespace jaxcoded
