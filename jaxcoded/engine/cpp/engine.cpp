#include "engine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace jaxcoded {
namespace {

// After the last news a thread looks again and again for this long before it sleeps.
constexpr double spin_seconds = 20e-6;
// Without a bell (peers on other hosts), naps between looks grow from the one to the other.
constexpr double shortest_nap = 20e-6;
constexpr double longest_nap = 1e-3;
// With bells nothing comes unheard: this is for timers only. The longer nothing has come, the less
// often they are looked at.
constexpr double shortest_timer = 10e-3;
constexpr double longest_timer = 0.1;
constexpr double idle_seconds = 0.25;
// For the last messages of a group to leave.
constexpr double flush_seconds = 0.2;

constexpr const char* two_threads =
    "two threads called collectives of one group at the same time";

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t mixed(std::uint64_t fingerprint, const std::string& words) {
  for (const char c : words) {
    fingerprint = (fingerprint ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return fingerprint;
}

}  // namespace

Engine& Engine::instance() {
  // Never destroyed: a handler may be running while the process ends.
  static Engine* engine = new Engine;
  return *engine;
}

Engine::Engine() {
  thread_ = std::thread([this] { progress(); });
}

Engine::~Engine() = default;

Card Engine::introduce() {
  std::unique_lock lock(mutex_);
  return page_.open_slot();
}

Validity& Engine::validity(std::uint64_t slot) { return page_->validity[slot]; }

void Engine::open(std::uint64_t index, std::unique_ptr<MpiWire> wire, std::unique_ptr<Node> node,
                  Member member) {
  std::unique_lock lock(mutex_);
  member.wire = std::move(wire);
  member.node = std::move(node);
  members_.emplace(index, std::move(member));
  page_->bell.ring();
}

Member& Engine::member(std::uint64_t index) {
  const auto found = members_.find(index);
  if (found == members_.end() || found->second.abandoned || stopping_) {
    throw Closed{"GroupClosed: use after close: group " + std::to_string(index) +
                 " was closed; make a new CodedGroup, and compile with it what used the old one"};
  }
  return found->second;
}

void Engine::note_failure(std::uint64_t index, const std::string& words) {
  std::unique_lock lock(mutex_);
  member(index).failure = words;
}

std::string Engine::refusal(Member& member, const std::vector<bool>& erased) {
  if (erased.empty() || !member.refuse) return {};
  const auto found = member.refusals.find(erased);
  if (found != member.refusals.end()) return found->second;
  if (member.refusals.size() > 4096) member.refusals.clear();
  return member.refusals[erased] = member.refuse(erased);
}

Call Engine::call_of(Member& its, Request& request) {
  Call call;
  call.words = std::move(request.words);
  call.fingerprint = request.fingerprint;
  if (!request.erased.empty()) {
    call.words += ", erasures of ranks [";
    for (std::size_t rank = 0; rank < request.erased.size(); ++rank) {
      if (!request.erased[rank]) continue;
      if (call.words.back() != '[') call.words += ", ";
      call.words += std::to_string(rank);
    }
    call.words += "]";
    call.fingerprint = mixed(call.fingerprint, call.words);
    for (Rank child : its.children) {
      call.erased.push_back(request.erased[static_cast<std::size_t>(child)]);
    }
    call.refusal = refusal(its, request.erased);
  }
  if (its.root && request.skipped && request.up) {
    call.refusal = "TooManyErasures: the root is the one rank that cannot skip a round";
  }
  if (!its.failure.empty()) {
    call.words += its.failure;
    call.fingerprint = mixed(call.fingerprint, its.failure);
    its.failure.clear();
  }
  call.up = request.up;
  call.down = request.down;
  call.skipped = request.skipped;
  call.message = std::move(request.message);
  call.total = std::move(request.total);
  call.own = std::move(request.own);
  call.out = std::move(request.out);
  call.feed = request.feed.get();
  if (its.root && call.feed && call.refusal.empty()) {
    if (const std::string why = call.feed->failure(); !why.empty()) {
      call.refusal = "CodedError: the root: " + why;
    }
  }
  return call;
}

Result Engine::run(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member& its = member(index);
  Node& node = *its.node;
  const bool broken_off = !its.begun.empty() && !request.begun;
  if (node.outcome() == Outcome::pending && its.begun.empty()) {
    return {Outcome::failed, two_threads};
  }
  const auto before = std::exchange(its.feed, request.feed);
  if (request.begun) {
    if (!request.skipped) node.extend(request.own);
    node.complete(std::move(request.out));
  } else if (broken_off) {
    node.break_off(call_of(its, request));
  } else {
    node.submit(call_of(its, request));
  }
  while (node.outcome() == Outcome::pending && node.advance()) {
  }
  if (node.outcome() == Outcome::pending) {
    drive(lock, [&] { return node.outcome() != Outcome::pending || stopping_; }, 1e300);
  }
  its.begun.clear();
  its.feed.reset();
  if (node.outcome() == Outcome::pending) {
    return {Outcome::failed, "GroupClosed: the process ends"};
  }
  return {node.outcome(), node.error()};
}

std::string Engine::extend(std::uint64_t index, Request request) {
  std::unique_lock lock(mutex_);
  Member& its = member(index);
  Node& node = *its.node;
  const bool broken_off = !its.begun.empty() && !request.begun;
  if (node.outcome() == Outcome::pending && its.begun.empty()) return two_threads;
  if (broken_off) its.begun.clear();
  const auto before = std::exchange(its.feed, request.feed);
  if (!request.begun || !request.skipped) {
    for (std::size_t i = 0; i < request.own.size() && !request.feed; ++i) {
      const std::byte* vector = request.own[i];
      its.begun.emplace_back(vector, vector + request.message[i].bytes());
      request.own[i] = its.begun.back().data();
    }
    // an empty message is one too
    if (its.begun.empty()) its.begun.emplace_back();
    if (request.begun) {
      node.extend(request.own);
    } else {
      Call call = call_of(its, request);
      call.complete = false;
      if (broken_off) {
        node.break_off(std::move(call));
      } else {
        node.submit(std::move(call));
      }
    }
  }
  while (node.outcome() == Outcome::pending && node.advance()) {
  }
  page_->bell.ring();  // the progress thread goes on
  return {};
}

bool Engine::wait(std::uint64_t index, double seconds, const std::function<bool(Member&)>& done) {
  std::unique_lock lock(mutex_);
  Member& its = member(index);
  return drive(lock, [&] { return done(its); }, now() + seconds);
}

// Let every node see its messages and do what it can. Whether there was anything.
bool Engine::poll() {
  bool news = false;
  for (auto& [index, its] : members_) {
    bool its_news = its.wire->poll(*its.node);
    its_news |= its.node->advance();
    news |= its_news;
    if (!its_news && its.report && its.node->overdue() && its.reported < its.node->next()) {
      const std::string words = its.node->waiting_for();
      its.reported = its.node->next();
      if (!words.empty()) its.report(words);
    }
  }
  return news;
}

// Whether something may happen without a ring of the bell.
bool Engine::hears_nothing() const {
  return std::ranges::any_of(members_, [](const auto& it) {
    const MpiWire& wire = *it.second.wire;
    return wire.silent_peers() || wire.unfinished();
  });
}

// How long a thread may sleep, when nothing has come for `quiet` seconds to a thread that waits.
double Engine::longest_sleep(bool waiting, double quiet) const {
  if (hears_nothing()) return nap_;
  double out = waiting ? std::clamp(quiet / 4, shortest_timer, longest_timer) : idle_seconds;
  for (const auto& [index, its] : members_) {
    out = std::min(out, std::max(its.node->wakes_at() - now(), 0.0));
  }
  return out;
}

// Do the engine's work on this thread until `done`. Whether it is.
bool Engine::drive(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                   double until) {
  Bell& bell = page_->bell;
  while (!done()) {
    if (now() >= until) return false;
    if (driving_) {  // another thread is at work; tell it that there is more
      bell.ring();
      ++waiting_;
      changed_.wait_for(lock, std::chrono::milliseconds(10));
      --waiting_;
      continue;
    }
    driving_ = true;
    bell.begin_driving();
    std::uint32_t seen = bell.rings();
    double last_news = now();
    bool news = false;
    nap_ = shortest_nap;
    while (true) {
      seen = bell.rings();
      news = poll();
      if (done() || now() >= until) break;
      if (news) {
        last_news = now();
        nap_ = shortest_nap;
        if (waiting_) changed_.notify_all();
        continue;
      }
      double quiet = now() - last_news;
      const double longest = std::min(longest_sleep(true, quiet), until - now());
      const bool silent = hears_nothing();
      lock.unlock();
      // Where every peer rings, there is nothing to look at before one does.
      do {
        if (quiet >= spin_seconds) {
          bell.sleep(Bell::driver, seen, longest);
          nap_ = std::min(nap_ * 1.5, longest_nap);
          break;
        }
        sched_yield();
        quiet = now() - last_news;
      } while (!silent && bell.rings() == seen);
      lock.lock();
    }
    for (int i = 0; i < 4 && news; ++i) {
      seen = bell.rings();
      news = poll();
    }
    driving_ = false;
    bell.end_driving(seen, news || longest_sleep(false, 0) < idle_seconds);
    if (waiting_) changed_.notify_all();
  }
  return true;
}

void Engine::progress() {
  std::unique_lock lock(mutex_);
  Bell& bell = page_->bell;
  while (!stopping_) {
    const std::uint32_t seen = bell.rings();
    double sleep = idle_seconds;
    if (!driving_) {
      if (poll()) {
        nap_ = shortest_nap;
        continue;
      }
      nap_ = std::min(nap_ * 1.5, longest_nap);
      sleep = longest_sleep(false, 0);
    }
    lock.unlock();
    bell.sleep(Bell::progress, seen, sleep);
    lock.lock();
  }
}

void Engine::replan(std::uint64_t index, std::uint64_t next, const std::vector<Rank>& children,
                    Decoder decoder,
                    std::function<std::string(const std::vector<bool>&)> refuse) {
  std::unique_lock lock(mutex_);
  member(index);
  auto moved = members_.extract(index);
  Member& its = moved.mapped();
  its.node->replan(children, std::move(decoder));
  its.children = children;
  its.refuse = std::move(refuse);
  its.refusals.clear();
  moved.key() = next;
  members_.insert(std::move(moved));
}

void Engine::abandon(std::uint64_t index) {
  std::unique_lock lock(mutex_);
  member(index).abandoned = true;
}

std::vector<Rank> Engine::close(std::uint64_t index, double seconds) {
  std::unique_lock lock(mutex_);
  Member& its = member(index);
  const double until = now() + seconds;
  const auto idle = [&] { return its.node->outcome() != Outcome::pending; };
  const auto gone = [&] { return its.node->left() && !its.wire->unfinished(); };
  drive(lock, idle, until);
  its.node->leave();
  if (!drive(lock, gone, until)) {
    its.node->give_up();
    drive(lock, gone, now() + flush_seconds);
  }
  const std::vector<Rank> absent = its.node->absent();
  auto ended = members_.extract(index);
  if (!idle()) {  // its handler still waits, and will be told that the process ends
    ended_.push_back(std::move(ended.mapped()));
    return absent;
  }
  page_.close_slot(its.slot);
  return absent;
}

std::map<std::uint64_t, std::vector<Rank>> Engine::stop(double seconds) {
  std::unique_lock lock(mutex_);
  for (auto& [index, its] : members_) its.node->leave();
  drive(
      lock,
      [&] {
        return std::ranges::all_of(members_, [](auto& it) {
          const Member& its = it.second;
          return its.node->outcome() != Outcome::pending && its.node->left() &&
                 !its.wire->unfinished();
        });
      },
      now() + seconds);
  std::map<std::uint64_t, std::vector<Rank>> remaining;
  for (auto& [index, its] : members_) remaining[index] = its.node->not_left();
  stopping_ = true;
  lock.unlock();
  page_->bell.ring();
  thread_.join();
  lock.lock();
  // Handlers that still wait are told; their groups must outlive them.
  while (std::ranges::any_of(members_, [](auto& it) {
    return it.second.node->outcome() == Outcome::pending;
  }) && driving_) {
    page_->bell.ring();
    ++waiting_;
    changed_.wait_for(lock, std::chrono::milliseconds(10));
    --waiting_;
  }
  members_.clear();
  return remaining;
}

}  // namespace jaxcoded
