// A lock that a thread may need for long, and still others get their turn.
#pragma once

#include <atomic>
#include <mutex>

namespace jaxcoded {

// Of a plain mutex, who unlocks it and locks it again has it before any thread that waits wakes up.
class FairMutex {
 public:
  void lock() {
    ++wanted_;
    const std::scoped_lock first_in_line(line_);
    mutex_.lock();
    --wanted_;
  }
  void unlock() { mutex_.unlock(); }
  // By who has it: whoever waits for it has it next.
  void give_way() {
    if (!wanted_) return;
    unlock();
    lock();
  }

 private:
  std::mutex line_;  // held by the one thread that has it next
  std::mutex mutex_;
  std::atomic<int> wanted_ = 0;  // by so many threads
};

}  // namespace jaxcoded
