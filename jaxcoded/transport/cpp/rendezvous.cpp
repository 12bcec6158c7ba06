#include "rendezvous.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine.h"

namespace jaxcoded {
namespace {

// Time between checks whether the group is still open.
constexpr auto turn = std::chrono::milliseconds(100);

constexpr const char* two_programs =
    "two programs on several devices called collectives of one group at the same time: hand the token "
    "that one returns to the next, or wait for the one before you start the next";

}  // namespace

Rendezvous& Rendezvous::instance() {
  static Rendezvous* rendezvous = new Rendezvous;  // a handler may be running while the process ends
  return *rendezvous;
}

// Return why the run has failed at this rank, if it has.
std::optional<std::string_view> Rendezvous::failure_of(std::int64_t run) const {
  const auto end = failed_.begin() + static_cast<std::ptrdiff_t>(std::min(failures_, failed_.size()));
  const auto failed = std::find_if(failed_.begin(), end, [&](const auto& failure) { return failure.first == run; });
  if (failed == end) return {};
  return failed->second.empty() ? no_memory : std::string_view(failed->second);
}

void Rendezvous::end(Meeting& meeting) {
  meeting.over = true;
  changed_.notify_all();
}

void Rendezvous::remember(std::int64_t run, std::string_view failure) {
  auto& [failed_run, words] = failed_[failures_++ % failed_.size()];
  failed_run = run;
  words.clear();
  try {
    words = failure;
  } catch (const std::bad_alloc&) {
  }
}

// End a meeting with an error. No thread keeps waiting, even if there is too little memory, for example for
// `words`.
template <class Words>
void Rendezvous::fail(std::uint64_t group, const std::shared_ptr<Meeting>& meeting, Words words) {
  open_.erase(group);
  end(*meeting);
  meeting->met.error = words();
  remember(meeting->run, meeting->met.error);
  try {  // this rank was not in the round: its next round reports that to the other ranks
    Engine::instance().note_failure(group, " after a call of which devices were missing");
  } catch (const Closed&) {
  }
}

// Like `fail`, for a device that came to a meeting of other devices.
template <class Words>
Met Rendezvous::refuse(const Arrival& arrival, const std::shared_ptr<Meeting>& meeting, Words words) {
  fail(arrival.group, meeting, words);
  if (arrival.run != meeting->run) remember(arrival.run, meeting->met.error);
  return meeting->met;
}

void Rendezvous::miss(const Arrival& arrival) {
  std::unique_lock lock(mutex_);
  miss_now(arrival);
}

void Rendezvous::miss_now(const Arrival& arrival) {
  if (failure_of(arrival.run)) return;
  Engine& engine = Engine::instance();
  arrival.begins ? engine.note_unmade(arrival.group) : engine.note_lost_part(arrival.group);
  const auto open = open_.find(arrival.group);
  if (open != open_.end() && open->second->run == arrival.run) {
    end(*open->second);
    open_.erase(open);
  }
  remember(arrival.run, {});
}

Met Rendezvous::meet(const Arrival& arrival,
                     const std::function<Met(const std::vector<void*>&)>& call) {
  std::unique_lock lock(mutex_);
  if (const auto why = failure_of(arrival.run)) {
    try {
      return {.failed = true, .error = std::string(*why)};
    } catch (const std::bad_alloc&) {
      throw Missed();
    }
  }
  auto opened = open_.find(arrival.group);
  if (opened == open_.end()) {
    try {
      auto begun =
          std::make_shared<Meeting>(arrival.run, arrival.call, std::vector<void*>(arrival.devices, nullptr));
      opened = open_.emplace(arrival.group, std::move(begun)).first;
    } catch (const std::bad_alloc&) {
      miss_now(arrival);
      throw Missed();
    }
  }
  const std::shared_ptr<Meeting> meeting = opened->second;
  if (meeting->run != arrival.run) return refuse(arrival, meeting, [] { return two_programs; });
  if (meeting->call != arrival.call || meeting->brought.size() != arrival.devices ||
      meeting->brought[arrival.device]) {
    return refuse(arrival, meeting, [&] {
      return "the devices of this process called different things: " + meeting->call + ", and " + arrival.call +
             ". All devices of a shard_map make the same calls in the same "
             "order: the predicates of cond and while_loop around them must be equal on all";
    });
  }
  meeting->brought[arrival.device] = arrival.brings;
  if (++meeting->arrived == arrival.devices) {
    open_.erase(arrival.group);
    lock.unlock();
    try {
      meeting->met = call(meeting->brought);  // no other thread reads `met` before the meeting is over
    } catch (Closed& closed) {
      meeting->met.error = std::move(closed.text);
    } catch (...) {  // for example too little memory; the other devices must not keep waiting
      lock.lock();
      end(*meeting);
      throw;
    }
    lock.lock();
    end(*meeting);
    return meeting->met;
  }
  // Turns are counted instead of time, since the devices cannot call while the process is stopped.
  std::chrono::duration<double> waited{0};
  while (!changed_.wait_for(lock, turn, [&] { return meeting->over; })) {
    waited += turn;
    if (meeting->arrived == arrival.devices) continue;  // the call is on its way
    // Nothing may be thrown before the meeting is over: the thread that makes its call uses what this device
    // brings.
    std::string closed;
    lock.unlock();
    try {
      Engine::instance().with(arrival.group, [](Member&) {});
    } catch (Closed& exception) {
      closed = std::move(exception.text);
    } catch (const std::bad_alloc&) {  // too little memory for the text: try again in the next turn
    }
    lock.lock();
    if (meeting->over || meeting->arrived == arrival.devices) continue;
    if (!closed.empty()) {
      fail(arrival.group, meeting, [&] { return std::move(closed); });
    } else if (waited.count() >= arrival.seconds) {
      fail(arrival.group, meeting, [&] {
        return std::to_string(meeting->brought.size() - meeting->arrived) + " of the " +
               std::to_string(meeting->brought.size()) + " devices of this process have not called " +
               arrival.call + " within " + std::to_string(static_cast<long>(arrival.seconds)) +
               " s of the first: all devices of a shard_map make the same calls; the predicates of cond "
               "and while_loop around them must be equal on all";
      });
    }
  }
  return meeting->met;
}

}  // namespace jaxcoded
