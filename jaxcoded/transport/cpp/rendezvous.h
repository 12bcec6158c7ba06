// Lets the devices of one process call together. Inside `shard_map` each device comes with its shard, and the
// last device makes the call for all of them.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jaxcoded {

// A device that comes, and the call that it comes for.
struct Arrival {
  std::uint64_t group = 0;
  std::int64_t run = 0;      // of the compiled program, equal on all its devices
  std::string call = {};     // the call, equal on all devices
  bool begins = false;       // whether the call begins a round
  std::size_t device = 0;    // the device's place on the mesh
  std::size_t devices = 1;   // how many devices the program has
  double seconds = 0;        // how long to wait for the other devices
  void* brings = nullptr;    // what the device brings, valid until `meet` returns
};

// The result of a call.
struct Met {
  bool failed = false, desynchronized = false;
  std::string error = {};
};

// Thrown for a device that has too little memory, if its run has failed for this.
struct Missed {};

class Rendezvous {
 public:
  static Rendezvous& instance();

  // Blocks until all devices of the run have come, and the last of them has made the call. `call` gets what the
  // devices bring, in their order on the mesh. All devices get its result. The call fails for all devices of the
  // run, even for devices that come later, in three cases: programs are mixed up, devices call different things,
  // or a device does not come. Raises `Closed` if the group is closed.
  Met meet(const Arrival& arrival, const std::function<Met(const std::vector<void*>&)>& call);
  // Record that a device has too little memory to come. The run fails on all devices, and so does the round
  // that the call begins.
  void miss(const Arrival& arrival);

 private:
  struct Meeting {
    std::int64_t run;
    std::string call;
    std::vector<void*> brought;
    std::size_t arrived = 0;
    bool over = false;
    Met met = {.failed = true, .error = "CodedError: the call of this process's devices was not made"};
  };

  std::optional<std::string_view> failure_of(std::int64_t run) const;
  void end(Meeting& meeting);
  void remember(std::int64_t run, std::string_view failure);
  void miss_now(const Arrival& arrival);
  template <class Words>
  void fail(std::uint64_t group, const std::shared_ptr<Meeting>& meeting, Words words);
  template <class Words>
  Met refuse(const Arrival& arrival, const std::shared_ptr<Meeting>& meeting, Words words);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::shared_ptr<Meeting>> open_;  // by group
  // The latest runs that failed here: devices that come later must not wait for devices that have left. Adding a run
  // needs no memory; its text is empty if there was no memory for it.
  std::array<std::pair<std::int64_t, std::string>, 1024> failed_;
  std::size_t failures_ = 0;
};

}  // namespace jaxcoded
