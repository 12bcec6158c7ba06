// A lock that a thread may need for long, and still others get their turn.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

namespace jaxcoded {

// Of a plain mutex, who unlocks it and locks it again has it before any thread that waits wakes up.
// That is quick, as nobody changes places, so it stays as it is for as long as nobody waits long.
class FairMutex {
 public:
  void lock() {
    if (!mutex_.try_lock()) wait();
  }
  void unlock() { mutex_.unlock(); }
  // By who has it: whoever has waited for it for long has it next.
  void give_way() {
    const Time since = waits_since_;
    if (since == nobody || now() - since < patience) return;
    unlock();
    wait();
  }

 private:
  using Time = std::chrono::steady_clock::rep;
  static constexpr Time nobody = 0;
  static constexpr Time patience =
      std::chrono::steady_clock::duration(std::chrono::milliseconds(1)).count();

  static Time now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
  void wait() {
    const std::scoped_lock first_in_line(line_);
    waits_since_ = now();
    mutex_.lock();
    waits_since_ = nobody;
  }

  std::mutex line_;  // held by the one thread that has it next
  std::mutex mutex_;
  std::atomic<Time> waits_since_ = nobody;  // that thread
};

}  // namespace jaxcoded
