#include "engine.h"

#include "reserve.h"
#include "status_signal.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>
#include <utility>

namespace jaxcoded {
namespace {

// For this long after the last message, a thread polls before it sleeps, and yields its core after each poll.
// Sleeping and waking up takes longer than the rest of a short round: 76 µs instead of 56 on 4 ranks.
constexpr double spin_seconds = 60e-6;
// Without wake-ups (peers on other hosts), the naps between polls grow. The naps grow slowly if no rank waits.
constexpr double shortest_nap = 20e-6;
constexpr double usual_nap = 1e-3;  // while any rank waits for a round
// With wake-ups no message goes unnoticed, so the lengths of sleeps matter only for timers. The longer nothing
// has come, the less often timers are checked.
constexpr double shortest_timer = 10e-3;
constexpr double longest_timer = 0.1;
constexpr double idle_seconds = 0.25;
double longer(double nap) {
  return std::clamp(nap * (nap < usual_nap ? 1.5 : 1.1), shortest_nap, longest_timer);
}
// How long to wait until a group's last messages are sent.
constexpr double flush_seconds = 1;
// How long to serve ranks that still lack results, if a program finalizes MPI while groups are open.
constexpr double finalize_seconds = 5;
// Time between answers that tell a root that this process is there.
constexpr double answer_seconds = 0.2;

constexpr const char* two_threads =
    "two threads called collectives of one group at the same time, and nobody knows what was summed with "
    "what: let one thread call them, or make a group for each thread (a new one, this one ends here); a "
    "compiled function whose calls have tokens calls from another thread until its results are ready: wait for them";
constexpr const char* broken_off =
    "a collective of the group was called before another one was over: let the first one end before "
    "the next begins, such as a loop over group.blocks; with tokens, hand on the one that the first "
    "returns";
constexpr const char* process_ends = "GroupClosed: the process ends";

// Whether this process was forked from one with an engine. Then the engine's thread is missing, and its lock
// may be held forever. MPI and the page belong to the parent process.
std::atomic<bool> forked = false;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t mixed(std::uint64_t fingerprint, const std::string& words) {
  for (const char c : words) {
    fingerprint = (fingerprint ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return fingerprint;
}

// Take memory for the first `count` of these vectors.
std::vector<std::byte*> memory_for(std::vector<Buffer>& memory, Pool& pool, const std::vector<Segment>& segments,
                                   std::size_t count) {
  std::vector<std::byte*> out;
  for (std::size_t i = 0; i < count; ++i) {
    memory.push_back(pool.take(segments[i].bytes()));
    out.push_back(memory.back().data());
  }
  return out;
}

void copy(const std::vector<std::byte*>& to, const std::vector<const std::byte*>& from,
          const Segment* segments) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (segments[i].bytes()) std::memcpy(to[i], from[i], segments[i].bytes());
  }
}

Closed use_after_close(std::uint64_t index) {
  return {"GroupClosed: use after close: group " + std::to_string(index) +
          " was closed; make a new CodedGroup, and compile with it what used the old one"};
}

// Return a call for which this rank has too little memory. The round of the call fails.
std::shared_ptr<Flight> unmade_flight(std::uint64_t fingerprint = 0) {
  auto out = std::make_shared<Flight>();
  out->call.fingerprint = fingerprint;
  out->call.lacks_memory = out->call.skipped = true;
  return out;
}

// Run a step. Returns whether there was enough memory for it.
template <class Step>
bool attempted(Step step) {
  const reserve::Turn turn;
  try {
    step();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void fail(Flight& flight, const char* why) {
  flight.outcome = Outcome::failed;
  attempted([&] { flight.error = why; });
}

}  // namespace

std::uint64_t Member::ahead() const {
  return queue.size() - has_open_call();
}

std::uint64_t Member::lag() const {
  const std::uint64_t decided = node->lag();
  return decided - std::min(decided, ahead());
}

std::uint64_t Member::memory_bytes() const {
  return node->memory_bytes() + pool->used();
}

Engine& Engine::instance() {
  // Never destroyed: a handler may be running while the process ends.
  static Engine* engine = new Engine;
  if (forked) {
    throw Closed{"GroupClosed: this process was forked from one of the group's; only that one can "
                 "call its collectives: start others with multiprocessing's \"spawn\""};
  }
  return *engine;
}

Engine::Engine() {
  pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    status_signal::uninstall();
  });
  reserve::keep();
  thread_ = std::thread([this] { progress(); });
  status_signal::install(page_->wake_up);
}

Engine::~Engine() = default;

Card Engine::introduce() {
  std::unique_lock lock(mutex_);
  return page_.open_slot();
}

void Engine::forget(const Card& card) {
  std::unique_lock lock(mutex_);
  page_.close_slot(card.slot);
}

void Engine::let_read(const std::vector<Card>& cards) { page_.let_read(cards); }

Validity& Engine::validity(std::uint64_t slot) { return page_->validity[slot]; }

const std::atomic<std::uint32_t>& Engine::messages(std::uint64_t slot) { return page_->messages[slot]; }

Source& Engine::memory(bool shared) { return shared ? shared_spare_ : spare_; }

void Engine::open(std::uint64_t index, std::unique_ptr<MpiWire> wire, std::unique_ptr<Node> node,
                  Member member) {
  std::unique_lock lock(mutex_);
  member.pool = std::make_shared<Pool>(0, wire->memory());
  member.wire = std::move(wire);
  member.node = std::move(node);
  members_.emplace(index, std::move(member));
  page_->wake_up.send();
}

void Engine::discard(std::uint64_t index) {
  std::unique_lock lock(mutex_);
  members_.erase(index);
}

void Engine::enter(MPI_Comm comm, Rank root, double silent_seconds) {
  const std::scoped_lock lock(mutex_);
  end_of_job_.enter(comm, root, silent_seconds);
  attend_finalize();
}

void Engine::join() {
  const std::scoped_lock lock(mutex_);
  end_of_job_.join();
  attend_finalize();
}

void Engine::attend_finalize() {
  if (at_finalize_ != MPI_KEYVAL_INVALID) return;
  const auto finalize = [](MPI_Comm, int, void* engine, void*) {
    static_cast<Engine*>(engine)->finalize();
    return MPI_SUCCESS;
  };
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, finalize, &at_finalize_, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, at_finalize_, this);
}

Member& Engine::member(std::uint64_t index) {
  if (ending_) throw Closed{process_ends};
  const auto entry = members_.find(index);
  if (entry == members_.end() || entry->second.abandoned) throw use_after_close(index);
  return entry->second;
}

void Engine::note_failure(std::uint64_t index, const std::string& words) {
  std::unique_lock lock(mutex_);
  member(index).failure = words;
}

void Engine::note_unmade(std::uint64_t index) {
  std::unique_lock lock(mutex_);
  if (const auto entry = members_.find(index); entry != members_.end()) ++entry->second.unmade;
  page_->wake_up.send();
}

void Engine::note_lost_part(std::uint64_t index) {
  std::unique_lock lock(mutex_);
  if (const auto entry = members_.find(index); entry != members_.end()) {
    Member& member = entry->second;
    if (member.has_open_call()) {
      fail_for_memory(member, *member.queue.back());
    } else if (member.failure.empty()) {
      member.failure = " out of memory";  // short, so that it needs no memory from the heap
    }
  }
  page_->wake_up.send();
}

std::shared_ptr<Feed> Engine::feed_of(std::uint64_t index, const Request& request) {
  std::unique_lock lock(mutex_);
  const auto flight = request.continues ? continued(member(index), request) : nullptr;
  return flight ? flight->feed : nullptr;
}

std::shared_ptr<Flight> Engine::flight_of(Member& member, Request& request) {
  auto out = std::make_shared<Flight>();
  out->pool = member.pool;
  out->feed = request.feed;
  out->fingerprint = request.fingerprint;
  out->total = request.total;
  out->call = call_of(member, request);
  return out;
}

// Return the open call that a request continues; null if no call is open, or if the open call does not match
// the request. A request that only ends the call has no fingerprint.
std::shared_ptr<Flight> Engine::continued(Member& member, const Request& request) const {
  if (!member.has_open_call()) return nullptr;
  const std::shared_ptr<Flight>& flight = member.queue.back();
  const bool same = !request.fingerprint || request.fingerprint == flight->fingerprint;
  return same && request.total == flight->total ? flight : nullptr;
}

Call Engine::call_of(Member& member, Request& request) {
  Call call;
  call.signature = std::move(request.signature);
  call.fingerprint = request.fingerprint;
  call.costs = std::move(request.costs);
  if (!request.erased.empty()) {
    call.signature += ", erasures of ranks [";
    for (std::size_t rank = 0; rank < request.erased.size(); ++rank) {
      if (!request.erased[rank]) continue;
      if (call.signature.back() != '[') call.signature += ", ";
      call.signature += std::to_string(rank);
    }
    call.signature += "]";
    call.fingerprint = mixed(call.fingerprint, call.signature);
    const Erasures::Verdict& verdict = member.erasures.judge(request.erased);
    for (Rank child : member.children) {
      call.erased.push_back(verdict.missing[static_cast<std::size_t>(child)]);
    }
    call.why_not = verdict.why_not;
  }
  if (member.root && request.skipped && request.up) {
    call.why_not = "TooManyErasures: the root is the one rank that cannot skip a round";
  }
  if (!member.failure.empty()) {
    call.signature += member.failure;
    call.fingerprint = mixed(call.fingerprint, member.failure);
    member.failure.clear();
  }
  call.up = request.up;
  call.down = request.down;
  call.skipped = request.skipped;
  call.message = std::move(request.message);
  call.total = std::move(request.total);
  call.own = std::move(request.own);
  call.out = std::move(request.out);
  call.apart = std::move(request.apart);
  call.examples = request.examples;
  call.audits = std::move(request.audits);
  call.feed = request.feed.get();
  if (member.root && call.feed && call.why_not.empty()) {
    if (const std::string why = call.feed->failure(); !why.empty()) {
      call.why_not = "CodedError: the root: " + why;
    }
  }
  return call;
}

// Return why the group carries out no calls, in words, or an empty text. If two threads have called the group,
// other ranks may have combined either thread's calls with different calls, from the first call on.
std::string Engine::why_not(Member& member) {
  if (member.running && member.mixed_up.empty()) {
    member.mixed_up = two_threads;
    in_memory(member, [&] { member.node->alarm(two_threads); });
    tell_waiting();
    page_->wake_up.send();
  }
  return member.mixed_up;
}

// Record that a thread returns from `run` or `take`. Returns why the thread's result is invalid; empty if it is
// valid.
std::string Engine::returned(std::uint64_t index) {
  const auto still = members_.find(index);
  if (still == members_.end()) return {};
  Member& member = still->second;
  member.running = false;
  if (member.mixed_up.empty()) return {};
  leave_open_share(member);
  leave(member, member.mixed_up);
  return member.mixed_up;
}

// Add a call to the queue. The new call takes the place of an open call whose last parts never came.
void Engine::enqueue(Member& member, const std::shared_ptr<Flight>& flight) {
  const bool breaks_off = member.has_open_call();
  member.queue.push_back(flight);  // if there is too little memory for this, nothing has changed
  if (!breaks_off) return;
  const auto at = member.queue.end() - 2;
  const std::shared_ptr<Flight> before = *at;
  if (before->shared) return leave_call(member, *before);
  member.queue.erase(at);
  flight->replaces = before->submitted ? before : before->replaces;
}

void Engine::enqueue_unmade(Member& member) {
  for (; member.unmade; --member.unmade) enqueue(member, unmade_flight());
}

// Return the call that `make` makes of this request or, if there is too little memory for this call, a call that
// fails its round. If there is too little memory even for the failing call, return null: the round then fails
// later, but before any later call's round.
template <class Make>
std::shared_ptr<Flight> Engine::launched(Member& member, const Request& request, Make make) {
  std::shared_ptr<Flight> out;
  const auto launch = [&](auto made) {
    return attempted([&] {
      enqueue_unmade(member);
      enqueue(member, out = made());
      ++calls_counted;
    });
  };
  member.lost_part = false;
  if (launch(make)) return out;
  reserve::fill();
  if (launch([&] { return unmade_flight(request.fingerprint); })) return out;
  ++member.unmade;
  ++calls_counted;
  page_->wake_up.send();
  return nullptr;
}

// Fail a call for lack of memory. An open call gets no next part.
void Engine::fail_for_memory(Member& member, Flight& flight) {
  reserve::fill();
  flight.open = false;
  member.lost_part = true;
  if (flight.submitted) {
    member.lacks_memory = !attempted([&] { member.node->lack_memory(true); });
  } else {
    flight.call.lacks_memory = flight.call.skipped = flight.call.complete = true;
  }
}

// End the open call of a program that takes no more blocks, or passes no more parts. Other ranks compute the
// program's blocks, and the round ends without this rank. If this runs out of memory, `fly` does it later.
void Engine::leave_call(Member& member, Flight& flight) {
  flight.open = false;
  if (flight.submitted) {
    in_memory(member, [&] { member.node->leave_call(); });
  } else {
    flight.call.skipped = flight.call.complete = true;
  }
}

void Engine::leave_open_share(Member& member) {
  if (member.has_open_call() && member.queue.back()->shared) leave_call(member, *member.queue.back());
}

// Run a turn of a member. Returns whether the turn made progress. If the turn runs out of memory, the member's
// round fails as soon as there is enough memory to fail it.
template <class Turn>
bool Engine::in_memory(Member& member, Turn turn) {
  const auto fail = [&] { return !attempted([&] { member.node->lack_memory(); }); };
  if (member.lacks_memory && (member.lacks_memory = fail())) return false;  // nothing continues from a half-done state
  bool news = false;
  const bool enough = attempted([&] {
    if constexpr (std::is_void_v<decltype(turn())>) {
      turn();
    } else {
      news = turn();
    }
  });
  member.lacks_memory |= !reserve::fill() || !enough;
  if (member.lacks_memory) member.lacks_memory = fail();
  return news;
}

// Carry out the calls of the queue as far as possible now. Returns whether a call began or ended.
bool Engine::fly(Member& member) {
  bool news = false;
  Node& node = *member.node;
  enqueue_unmade(member);
  while (!member.queue.empty()) {
    Flight& flight = *member.queue.front();
    if (!flight.submitted) {
      flight.submitted = news = true;
      if (const auto before = std::move(flight.replaces)) {
        node.break_off(std::move(flight.call));
      } else {
        node.submit(std::move(flight.call));
      }
      // after a stop, this process first notices that time has passed, so read what has come meanwhile
      if (node.wakes_at() <= now()) member.wire->poll(node, true);
      node.advance();
    }
    if (flight.shared && !flight.open) node.leave_call();
    if (node.outcome() == Outcome::pending || flight.open) break;
    flight.outcome = node.outcome();
    flight.error = node.error();
    if (flight.error.ends_with(two_threads) && member.mixed_up.empty()) member.mixed_up = flight.error;
    member.queue.pop_front();
    news = true;
    tell_waiting();
  }
  return news;
}

// Carry out calls like `fly`, and give the call in progress one turn. The engine handles other groups and new
// messages before the call's next turn.
void Engine::work(Member& member) {
  in_memory(member, [&] {
    fly(member);
    if (member.node->outcome() == Outcome::pending) member.node->advance();
    return fly(member);
  });
}

Result Engine::run(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  if (std::string why = why_not(member); !why.empty()) return {Outcome::failed, std::move(why)};
  std::shared_ptr<Flight> flight;
  if (request.continues) {
    flight = continued(member, request);
    if (!flight) return {Outcome::failed, member.lost_part ? no_memory : broken_off};
    const bool enough = attempted([&] {
      Call& call = flight->call;
      if (flight->submitted) {
        if (!request.skipped) member.node->extend(request.own);
        member.node->complete(std::move(request.out));
      } else {
        if (!request.skipped) call.own.insert(call.own.end(), request.own.begin(), request.own.end());
        call.out = std::move(request.out);
        call.complete = true;
      }
    });
    if (!enough) fail_for_memory(member, *flight);
    flight->open = false;
  } else {
    flight = launched(member, request, [&] { return flight_of(member, request); });
    if (!flight) return {Outcome::failed, no_memory};
  }
  work(member);
  if (flight->outcome == Outcome::pending) {
    member.running = true;
    drive(lock, [&] { return flight->outcome != Outcome::pending; }, 1e300);
    if (std::string why = returned(index); !why.empty()) return {Outcome::failed, std::move(why)};
  }
  if (flight->outcome == Outcome::pending) return {Outcome::failed, process_ends};
  return {flight->outcome, std::move(flight->error)};
}

void Engine::leave_share(std::uint64_t index) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  leave_open_share(member);
  work(member);
  page_->wake_up.send();
}

Taken Engine::take(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  if (std::string why = why_not(member); !why.empty()) return {.error = std::move(why)};
  if (request.continues) {
    const auto open = continued(member, request);
    if (!open || !open->shared) return {.error = broken_off};
  }
  if (!request.continues && member.has_open_call() && member.queue.back()->looped) {
    return {.error = broken_off};
  }
  std::vector<const std::byte*> own = std::move(request.own);
  const bool has_own = own.size() == request.message.size();
  std::shared_ptr<Flight> flight;
  if (request.continues) {
    flight = member.queue.back();
  } else {
    request.own.clear();
    flight = launched(member, request, [&] {
      auto opened = flight_of(member, request);
      opened->call.shared = true;
      opened->call.complete = false;
      opened->open = opened->shared = true;
      opened->looped = !opened->call.lends();
      return opened;
    });
    if (!flight) return {.error = no_memory};
  }
  Node& node = *member.node;
  bool lent = false, needs_own = false;
  std::optional<Work> taken;
  const auto done = [&] {
    if (flight->outcome != Outcome::pending) return true;  // the group is closed, or has failed
    if (taken || !member.mixed_up.empty()) return true;
    if (!flight->submitted || !flight->shared) return false;  // earlier rounds are not over, or the call fails
    return in_memory(member, [&] {
      if (!has_own && (needs_own = !node.goes_on_at_once())) return true;
      if (!has_own) own.assign(flight->total.size(), nullptr);
      if (!std::exchange(lent, true)) node.come_for_block(own);
      taken = node.take_block();
      return taken || node.no_more_blocks();
    });
  };
  work(member);
  member.running = true;
  const bool ended = drive(lock, done, 1e300);
  if (std::string why = returned(index); !why.empty()) return {.error = std::move(why)};
  if (!ended) return {.error = process_ends};
  if (flight->outcome != Outcome::pending) {
    return {.error = std::move(flight->error), .desynchronized = flight->outcome == Outcome::desynchronized};
  }
  // If more remains to be done than to wait for messages, the progress thread does it.
  if (!request.continues || member.root || member.wire->hears_nothing()) page_->wake_up.send();
  return {.work = taken, .needs_own = needs_own};
}

std::string Engine::extend(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  if (std::string why = why_not(member); !why.empty()) return why;
  std::shared_ptr<Flight> flight;
  if (request.continues && !(flight = continued(member, request))) return member.lost_part ? no_memory : broken_off;
  if (!flight || !request.skipped) {
    bool enough = true;
    std::vector<Buffer> memory;
    const auto brought = [&] {
      if (!request.feed) {
        const auto own = memory_for(memory, *member.pool, request.message, request.own.size());
        copy(own, request.own, request.message.data());
        request.own.assign(own.begin(), own.end());
      }
      if (flight) flight->memory.reserve(flight->memory.size() + memory.size());
    };
    if (!flight) {
      flight = launched(member, request, [&] {
        brought();
        auto opened = flight_of(member, request);
        opened->call.complete = false;
        opened->open = true;
        opened->memory = std::move(memory);
        return opened;
      });
      enough = flight && flight->open;
      member.lost_part = !enough;
    } else {
      enough = attempted([&] {
        brought();
        std::ranges::move(memory, std::back_inserter(flight->memory));
        if (flight->submitted) {
          member.node->extend(request.own);
        } else {
          flight->call.own.insert(flight->call.own.end(), request.own.begin(), request.own.end());
        }
      });
      if (!enough) fail_for_memory(member, *flight);
    }
    if (!enough) {
      work(member);
      page_->wake_up.send();
      return no_memory;
    }
    if (request.feed) flight->feed = request.feed;
  }
  work(member);
  page_->wake_up.send();  // the progress thread continues
  return {};
}

Started Engine::start(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member* member = &this->member(index);
  while (member->started.size() >= most_started) {
    const std::shared_ptr<Flight> oldest = member->started.front();
    drive(lock, [&] { return oldest->outcome != Outcome::pending; }, 1e300);
    member = &this->member(index);
    std::erase(member->started, oldest);
  }
  std::shared_ptr<Flight> flight;
  std::vector<std::byte*> own;
  const bool enough = attempted([&] {
    flight = std::make_shared<Flight>();
    flight->pool = member->pool;
    own = memory_for(flight->memory, *flight->pool, request.message, request.own.size());
    flight->result = request.message == request.total
                         ? own
                         : memory_for(flight->memory, *flight->pool, request.total, request.total.size());
  });
  if (std::string why = why_not(*member); !why.empty()) return {0, std::move(why)};
  member->running = true;  // the engine continues meanwhile
  lock.unlock();
  if (enough) copy(own, request.own, request.message.data());
  lock.lock();
  member = &this->member(index);
  member->running = false;
  if (std::string why = why_not(*member); !why.empty()) return {0, std::move(why)};
  // do everything that takes memory before the call is counted
  std::vector<Segment> total;
  const bool placed = attempted([&] {
    total = request.total;
    member->started.emplace_back();
  });
  flight = launched(*member, request, [&] {
    if (!enough || !placed) throw std::bad_alloc();
    request.own.assign(own.begin(), own.end());
    request.out = flight->result;
    flight->call = call_of(*member, request);
    return flight;
  });
  if (placed && !flight) member->started.pop_back();
  if (!placed || !flight) return {0, no_memory};
  flight->total = std::move(total);
  flight->number = ++member->numbers;
  member->started.back() = flight;
  in_memory(*member, [&] { return fly(*member); });
  page_->wake_up.send();  // the progress thread continues
  return {flight->number, {}};
}

Result Engine::finish(std::uint64_t index, std::uint32_t number, const std::vector<Segment>& total,
                      const std::vector<std::byte*>& out) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  if (!member.mixed_up.empty()) return {Outcome::failed, member.mixed_up};
  const auto position =
      std::ranges::find(member.started, number, [](const auto& flight) { return flight->number; });
  if (position == member.started.end()) {
    return {Outcome::failed,
            "coded_allreduce_done had this handle before, or " + std::to_string(most_started) +
                " rounds of the group were started after it, and its result was let go: call "
                "coded_allreduce_done once for each handle, and before so many others are started"};
  }
  std::shared_ptr<Flight> flight = *position;
  if (flight->total != total) {
    return {Outcome::failed, "the handle is of a call with other shapes or dtypes"};
  }
  const std::vector<const std::byte*> results(flight->result.begin(), flight->result.end());
  member.started.erase(position);
  drive(lock, [&] { return flight->outcome != Outcome::pending; }, 1e300);
  if (flight->outcome == Outcome::pending) return {Outcome::failed, process_ends};
  if (flight->outcome == Outcome::done) {
    lock.unlock();
    copy(out, results, total.data());
    lock.lock();
  }
  Result result{flight->outcome, std::move(flight->error)};
  flight.reset();  // under the lock, as the memory of the call returns to the group's pool
  return result;
}

bool Engine::wait(std::uint64_t index, double seconds, const std::function<bool(Member&)>& done) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  const Inside inside(member.inside);
  const bool ended = drive(lock, [&] { return member.closing || done(member); }, now() + seconds);
  if (member.closing) throw use_after_close(index);
  return ended;
}

// Let every node read its messages and do what it can. Returns whether any node made progress.
bool Engine::poll() {
  bool news = false;
  if (stopping_) return news;
  const double time = now();
  const bool anyway = time >= asks_mpi_at_;  // MPI reports dead ranks without a message
  if (anyway) asks_mpi_at_ = time + shortest_timer;
  for (auto& [index, member] : members_) {
    bool member_news = in_memory(member, [&] { return member.wire->poll(*member.node, anyway); });
    member_news |= in_memory(member, [&] { return member.node->advance(); });
    member_news |= in_memory(member, [&] { return fly(member); });
    in_memory(member, [&] { say_news(index, member, !member_news); });
    news |= member_news;
  }
  if (!news) {
    for (auto& [index, member] : members_) member.wire->has_all();
    end_abandoned();
  }
  return news;
}

void Engine::say_news(std::uint64_t index, Member& member, bool waits) {
  for (std::string& words : member.node->take_news()) warnings_.add({index, std::move(words)});
  const std::pair overdue{member.node->next(), member.node->overdue()};
  if (!waits || !member.reports || !overdue.second || member.reported >= overdue) return;
  const std::string words = member.node->waiting_for();
  if (words.empty()) return;
  member.reported = overdue;
  warnings_.add({index, words + waited_for_elsewhere(index)});
}

// Whether something may happen in some group without a wake-up.
bool Engine::hears_nothing() const {
  return std::ranges::any_of(members_, [](const auto& entry) { return entry.second.wire->hears_nothing(); });
}

// Return the time between polls of a group whose messages may arrive without a wake-up.
double Engine::longest_nap(const Member& member) const {
  if (!member.wire->awaits()) return longest_timer;
  return member.queue.empty() && !member.node->awaited_below() ? shortest_timer : usual_nap;
}

// Return how long a thread may sleep. `waiting`: it waits for a call. `quiet`: seconds since anything came.
double Engine::longest_sleep(bool waiting, double quiet) const {
  double out = waiting ? std::clamp(quiet / 4, shortest_timer, longest_timer) : idle_seconds;
  attempted([&] {
    for (const auto& [index, member] : members_) {
      // after a timer that had nothing to do, the next timer is less urgent
      out = std::min(out, std::max(member.node->wakes_at() - now(), std::min(nap_, usual_nap)));
      if (member.wire->hears_nothing()) out = std::min({out, nap_, longest_nap(member)});
    }
  });
  return out;
}

// Do the engine's work on this thread until `done`, or until the engine stops. Returns whether `done` is true.
template <class Done>
bool Engine::drive(std::unique_lock<FairMutex>& lock, const Done& done, double until) {
  WakeUp& wake_up = page_->wake_up;
  // What `done` reads stays valid while `inside_` counts this thread, and afterwards until this thread releases
  // the lock.
  const Inside inside(inside_);
  while (!done()) {
    if (stopping_ || now() >= until) return false;
    if (driving_) {  // another thread is at work: wake it, so that it checks again
      wake_up.send();
      ++waiting_;
      changed_.wait_for(lock, std::chrono::duration<double>(std::min(until - now(), idle_seconds)));
      --waiting_;
      continue;
    }
    driving_ = true;
    wake_up.begin_driving();
    std::uint32_t seen = wake_up.sent();
    double last_news = now();
    bool news = false;
    nap_ = shortest_nap;
    while (true) {
      seen = wake_up.sent();
      news = poll();
      if (done() || stopping_ || now() >= until) break;
      if (news) {
        last_news = now();
        nap_ = shortest_nap;
        tell_waiting();
        mutex_.give_way();
        continue;
      }
      double quiet = now() - last_news;
      const double longest = std::min(longest_sleep(true, quiet), until - now());
      const bool silent = hears_nothing();
      lock.unlock();
      // If every peer sends wake-ups, there is nothing to poll for before a wake-up arrives.
      do {
        if (quiet >= spin_seconds) {
          wake_up.sleep(WakeUp::driver, seen, longest);
          nap_ = longer(nap_);
          break;
        }
        sched_yield();
        quiet = now() - last_news;
      } while (!silent && wake_up.sent() == seen);
      lock.lock();
    }
    for (int i = 0; i < 4 && news; ++i) {
      seen = wake_up.sent();
      news = poll();
    }
    driving_ = false;
    wake_up.end_driving(seen, news || longest_sleep(false, 0) < idle_seconds);
    tell_waiting();
  }
  return true;
}

void Engine::progress() {
  std::unique_lock lock(mutex_);
  WakeUp& wake_up = page_->wake_up;
  std::string words;  // words that are still to be written
  while (!finalizing_) {
    if (words.empty() && status_signal::taken()) attempted([&] { words = standing(); });
    if (!words.empty()) {
      lock.unlock();
      status_signal::say(words);
      lock.lock();
    }
    if (now() >= answers_at_) {
      if (end_of_job_.answer()) tell_of_ended_roots();
      answers_at_ = now() + answer_seconds;
    }
    const std::uint32_t seen = wake_up.sent();
    double sleep = idle_seconds;
    if (!driving_) {
      if (poll()) {
        nap_ = shortest_nap;
        mutex_.give_way();
        continue;
      }
      nap_ = longer(nap_);
      sleep = longest_sleep(false, 0);
    }
    lock.unlock();
    wake_up.sleep(WakeUp::progress, seen, sleep);
    lock.lock();
  }
}

// A root that has left without this rank answers nothing any more, although it lives.
void Engine::tell_of_ended_roots() {
  for (auto& [index, member] : members_) {
    if (member.root || !end_of_job_.has_ended(member.comm, member.node->root_rank())) continue;
    in_memory(member, [&] { member.node->root_has_ended(); });
  }
}

// Describe where this process's groups stand, with a line for each.
std::string Engine::standing() const {
  std::string out;
  for (const auto& [index, member] : members_) {
    out += "jaxcoded: group " + std::to_string(index) + ", " + member.node->standing() + "\n";
  }
  return out.empty() ? "jaxcoded: no group is open\n" : out;
}

// Name the other groups in which ranks wait for this rank while it waits in the group `index`.
std::string Engine::waited_for_elsewhere(std::uint64_t index) const {
  std::string out;
  for (const auto& [other, member] : members_) {
    const std::string words = member.node->waited_for();
    if (other == index || words.empty()) continue;
    out += (out.empty() ? "; but in group " : ", and in group ") + std::to_string(other) + " " + words;
  }
  return out.empty() ? out : out + ": do all ranks call their groups in one order?";
}

void Engine::replan(std::uint64_t index, std::uint64_t next, const std::vector<Rank>& children,
                    Decoder decoder, Erasures erasures) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  member.node->replan(children, std::move(decoder));
  member.children = children;
  member.erasures = std::move(erasures);
  member.started.clear();  // these calls are over, and their handles have the old index
  auto moved = members_.extract(index);
  moved.key() = next;
  members_.insert(std::move(moved));
  tell_waiting();
}

// Leave a group. The node's current call may still end; the calls behind it in the queue fail.
void Engine::leave(Member& member, const std::string& failure) {
  while (member.queue.size() > 1) {
    fail(*member.queue.back(), "GroupClosed: the group has failed, or the process ends");
    member.queue.pop_back();
  }
  if (member.has_open_call()) leave_call(member, *member.queue.back());
  in_memory(member, [&] { member.node->leave(failure); });
  tell_waiting();
}

void Engine::abandon(std::uint64_t index, const std::string& failure) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  member.abandoned = true;
  member.started.clear();
  leave(member, failure);
  page_->wake_up.send();
}

std::vector<Rank> Engine::close(std::uint64_t index, double seconds) {
  std::unique_lock lock(mutex_);
  Member& member = this->member(index);
  const double until = now() + seconds;
  if (member.closing) {
    drive(lock, [&] { return !members_.contains(index); }, 1e300);
    throw use_after_close(index);
  }
  member.closing = true;
  {
    const Inside inside(inside_);
    wait_until_nobody_is_in(lock, member.inside);
  }
  // If one of these steps runs out of memory, the other ranks do not get the message of that step.
  leave_open_share(member);
  if (member.mixed_up.empty()) drive(lock, [&] { return member.queue.empty(); }, until);
  in_memory(member, [&] { member.node->leave({}); });
  if (!drive(lock, [&] { return member.node->left(); }, until)) in_memory(member, [&] { member.node->give_up(); });
  std::vector<Rank> absent;
  in_memory(member, [&] {
    absent = member.node->end();
    give_up(member, absent);
    report_untold(index, member);
  });
  drive(lock, [&] { return member.wire->sent(); }, now() + flush_seconds);
  end(members_.find(index), "GroupClosed: the group was closed before this round was over");
  return absent;
}

// Forget a group that this rank has left. Its calls that are not over fail.
Engine::Members::iterator Engine::end(Members::iterator entry, const char* why) {
  auto ended = members_.extract(entry++);
  for (const auto& flight : ended.mapped().queue) fail(*flight, why);
  tell_waiting();
  page_.close_slot(ended.mapped().slot);
  ended = {};
  if (members_.empty()) {
    for (Spare* each : {&spare_, &shared_spare_}) each->give_back(0);
  }
  return entry;
}

// End groups that an exception has ended at this rank, once no rank below needs them as relays any more.
void Engine::end_abandoned() {
  for (auto entry = members_.begin(); entry != members_.end();) {
    const Member& member = entry->second;
    const bool used = member.running || member.inside || member.closing || !member.queue.empty();
    const bool over = member.abandoned && !used && member.node->left() && member.wire->sent();
    entry = over && !ending_ ? end(entry, "") : std::next(entry);
  }
}

void Engine::give_up(const Member& member, const std::vector<Rank>& absent) {
  if (member.root) end_of_job_.give_up(member.comm, absent);
}

// Warn of a fault that was reported too late to fail a round.
void Engine::report_untold(std::uint64_t index, const Member& member) {
  if (!member.node->untold().empty()) {
    warnings_.add({index, "after its last round: " + member.node->untold()});
  }
}

// Let waiting threads check again whether they may continue.
void Engine::tell_waiting() {
  if (waiting_) changed_.notify_all();
}

// Wait until no thread is inside. The caller has made sure that the threads leave as soon as they check again.
void Engine::wait_until_nobody_is_in(std::unique_lock<FairMutex>& lock, const int& inside) {
  while (inside) {
    page_->wake_up.send();
    ++waiting_;
    changed_.wait_for(lock, std::chrono::milliseconds(10));
    --waiting_;
  }
}

bool Engine::stop(double seconds, const std::string& failure, int status) {
  std::unique_lock lock(mutex_);
  if (ending_) return false;
  ending_ = true;
  end_of_job_.note(!failure.empty(), status);
  for (auto& [index, member] : members_) leave(member, failure);
  const auto all = [&](auto of) {
    return std::ranges::all_of(members_, [&](const auto& entry) { return of(entry.second); });
  };
  drive(
      lock,
      [&] {
        return all([](const Member& member) {
          return member.node->outcome() != Outcome::pending && member.node->left();
        });
      },
      now() + seconds);
  for (auto& [index, member] : members_) {
    in_memory(member, [&] {
      give_up(member, member.node->end());
      report_untold(index, member);
    });
  }
  drive(lock, [&] { return all([](const Member& member) { return member.wire->sent(); }); },
        now() + flush_seconds);
  // From now on, ranks that read this process's memory, or the caller's, must not use what they read.
  for (const auto& [index, member] : members_) page_.close_slot(member.slot);
  stopping_ = true;
  warnings_.close();
  // Handlers that still wait notice `stopping_`, and release their groups.
  wait_until_nobody_is_in(lock, inside_);
  members_.clear();
  return end_of_job_.left_any();
}

// Called in `MPI_Finalize`, which a program may call by itself and while groups are open.
void Engine::finalize() {
  if (forked) return;
  stop(finalize_seconds, {}, 0);
  {
    const std::scoped_lock lock(mutex_);
    finalizing_ = true;
  }
  page_->wake_up.send();
  thread_.join();
  try {
    end_of_job_.end();
  } catch (const std::bad_alloc&) {  // the other ranks would wait for this rank for ever
    std::fputs("jaxcoded: this rank ran out of memory while waiting for the other ranks at the end, "
               "so it ends the job\n",
               stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

}  // namespace jaxcoded
