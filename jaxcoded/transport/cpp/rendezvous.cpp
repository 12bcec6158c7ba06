#include "rendezvous.h"

#include <algorithm>

#include "engine.h"

namespace jaxcoded {
namespace {

// Between looks whether the group is still open.
constexpr auto turn = std::chrono::milliseconds(100);
constexpr std::size_t most_failed = 1024;

constexpr const char* two_programs =
    "two programs on several devices called collectives of one group at the same time: hand the token "
    "that one returns to the next, or wait for the one before you start the next";

}  // namespace

Rendezvous& Rendezvous::instance() {
  static Rendezvous* rendezvous = new Rendezvous;  // a handler may be running while the process ends
  return *rendezvous;
}

void Rendezvous::fail(std::uint64_t group, const std::shared_ptr<Meeting>& meeting,
                      std::string why) {
  meeting->over = true;
  meeting->met = {.failed = true, .error = why};
  failed_.emplace_back(meeting->run, std::move(why));
  while (failed_.size() > most_failed) failed_.pop_front();
  open_.erase(group);
  changed_.notify_all();
  try {  // this rank was not in the round: the others hear of it with its next one
    Engine::instance().note_failure(group, " after a call of which devices were missing");
  } catch (const Closed&) {
  }
}

// The same for a device that came to a meeting of others.
Met Rendezvous::refuse(const Arrival& arrival, const std::shared_ptr<Meeting>& meeting,
                       std::string why) {
  if (arrival.run != meeting->run) failed_.emplace_back(arrival.run, why);
  fail(arrival.group, meeting, why);
  return {.failed = true, .error = std::move(why)};
}

Met Rendezvous::meet(const Arrival& arrival,
                     const std::function<Met(const std::vector<void*>&)>& call) {
  std::unique_lock lock(mutex_);
  const auto failed = std::ranges::find(failed_, arrival.run, [](const auto& it) { return it.first; });
  if (failed != failed_.end()) return {.failed = true, .error = failed->second};
  std::shared_ptr<Meeting>& opened = open_[arrival.group];
  if (!opened) {
    opened = std::make_shared<Meeting>(arrival.run, arrival.call,
                                       std::vector<void*>(arrival.devices, nullptr));
  }
  const std::shared_ptr<Meeting> meeting = opened;
  if (meeting->run != arrival.run) return refuse(arrival, meeting, two_programs);
  if (meeting->call != arrival.call || meeting->brought.size() != arrival.devices ||
      meeting->brought[arrival.device]) {
    return refuse(arrival, meeting,
                  "the devices of this process called different things: " + meeting->call + ", and " +
                      arrival.call + ". All devices of a shard_map make the same calls in the same "
                      "order: the predicates of cond and while_loop around them must be equal on all");
  }
  meeting->brought[arrival.device] = arrival.brings;
  if (++meeting->here == arrival.devices) {
    open_.erase(arrival.group);
    lock.unlock();
    const auto ended = [&](Met& met) {
      lock.lock();
      std::swap(meeting->met, met);
      meeting->over = true;
      changed_.notify_all();
    };
    Met met{.failed = true, .error = "CodedError: the call of this process's devices was not made"};
    try {
      met = call(meeting->brought);
    } catch (const Closed& closed) {
      met = {.failed = true, .error = closed.text};
    } catch (...) {  // as where there is too little memory: the other devices wait
      ended(met);
      throw;
    }
    ended(met);
    return meeting->met;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(arrival.seconds);
  while (!changed_.wait_for(lock, turn, [&] { return meeting->over; })) {
    if (meeting->here == arrival.devices) continue;  // the call is on its way
    std::string why;
    lock.unlock();
    try {
      Engine::instance().with(arrival.group, [](Member&) {});
    } catch (const Closed& closed) {
      why = closed.text;
    }
    lock.lock();
    if (meeting->over || meeting->here == arrival.devices) continue;
    if (why.empty() && std::chrono::steady_clock::now() >= until) {
      why = std::to_string(meeting->brought.size() - meeting->here) + " of the " +
            std::to_string(meeting->brought.size()) + " devices of this process have not called " +
            arrival.call + " within " + std::to_string(static_cast<long>(arrival.seconds)) +
            " s of the first: all devices of a shard_map make the same calls; the predicates of cond "
            "and while_loop around them must be equal on all";
    }
    if (!why.empty()) fail(arrival.group, meeting, std::move(why));
  }
  return meeting->met;
}

}  // namespace jaxcoded
