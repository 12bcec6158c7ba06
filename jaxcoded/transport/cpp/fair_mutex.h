// A lock that one thread may need for long, although other threads must get it in between.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

namespace jaxcoded {

// If a thread unlocks a plain mutex and locks it again, it gets the mutex before any waiting thread wakes up.
// This is fast, since the threads do not alternate. `FairMutex` allows this until a thread has waited for 1 ms.
class FairMutex {
 public:
  void lock() {
    if (!mutex_.try_lock()) wait();
  }
  void unlock() { mutex_.unlock(); }
  // Called by the thread that has the lock: if another thread has waited for 1 ms, it gets the lock next.
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

  std::mutex line_;  // held by the one thread that gets the lock next
  std::mutex mutex_;
  std::atomic<Time> waits_since_ = nobody;  // since when the first thread in line has waited
};

}  // namespace jaxcoded
