// Records of rounds on their way to whoever looks at them on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "telemetry.h"

namespace jaxcoded {

// Who adds a record never waits for who looks at it, nor for anything that one holds.
class Reports {
 public:
  void add(const RoundRecord& record) {
    {
      const std::scoped_lock lock(mutex_);
      records_.push_back(record);
    }
    changed_.notify_one();
  }
  // There will be no more.
  void close() {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }
  // Blocks until there is one; none after the last.
  std::optional<RoundRecord> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !records_.empty(); });
    if (records_.empty()) return std::nullopt;
    const RoundRecord out = records_.front();
    records_.pop_front();
    return out;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<RoundRecord> records_;
  bool closed_ = false;
};

}  // namespace jaxcoded
