// Records on their way to the thread that reports them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace jaxcoded {

// A thread that adds a record never waits for a reader, nor for anything that a reader holds. If there are more
// than `most` unread records, the oldest is lost.
template <class Record>
class Reports {
 public:
  explicit Reports(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  void add(Record record) {
    {
      const std::scoped_lock lock(mutex_);
      records_.push_back(std::move(record));
      if (records_.size() > most_) {
        records_.pop_front();
        ++lost_;
      }
    }
    changed_.notify_one();
  }
  // No more records follow.
  void close() {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }
  // Return how many records were lost since the last call.
  std::uint64_t take_lost() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(lost_, 0);
  }
  // Blocks until there is a record; returns nothing after the last one.
  std::optional<Record> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !records_.empty(); });
    if (records_.empty()) return std::nullopt;
    Record out = std::move(records_.front());
    records_.pop_front();
    return out;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Record> records_;
  const std::size_t most_;
  std::uint64_t lost_ = 0;
  bool closed_ = false;
};

}  // namespace jaxcoded
