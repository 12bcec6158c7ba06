// Results of past rounds, kept for ranks that still lack them.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "message.h"
#include "pool.h"

namespace jaxcoded {

// The result of a round, or the pieces of it that have arrived.
struct Entry {
  Round round = 0;
  std::uint64_t fingerprint = 0;
  bool failed = false;
  std::string error = {};  // the error of a round that failed
  bool alone = false;      // failed without the root; other ranks may have the root's decision
  Layout layout = {};
  std::vector<std::byte*> at = {};  // the address of each segment
  Buffer buffer = {};               // empty if the result lies in the caller's memory
  std::uint32_t ready = 0;          // pieces that are available
  std::uint32_t remains = 0;        // pieces that were available before the round failed
  std::vector<bool> arrived = {};   // which pieces have arrived, also out of order
  std::uint32_t sections = 0;            // the version of the sections that formed the result; 0: none
  std::uint64_t counted = 0;        // bytes, see `History::account`

  bool complete() const { return ready == layout.size(); }
  const std::byte* data(std::uint32_t piece) const {
    const Piece range = layout[piece];
    return at.empty() ? nullptr : at[range.segment] + range.offset;
  }
};

// Entries of consecutive rounds; only the newest may be incomplete.
class History {
 public:
  Entry* find(Round round) {
    if (entries_.empty() || round < first() || round > last()) return nullptr;
    return &entries_[round - first()];
  }
  const Entry* find(Round round) const { return const_cast<History*>(this)->find(round); }

  Entry& add(Entry entry) {
    Entry& out = entries_.emplace_back(std::move(entry));
    account(out);
    return out;
  }
  // Count the memory of an entry; call it again when the entry grows. The description of a result counts, too,
  // as it takes more memory than a short result.
  void account(Entry& entry) {
    bytes_ -= entry.counted;
    entry.counted = sizeof entry + entry.error.size() + entry.buffer.capacity();
    bytes_ += entry.counted;
  }
  Entry& newest() { return entries_.back(); }
  void drop_oldest() {
    bytes_ -= entries_.front().counted;
    entries_.pop_front();
  }
  void clear() {
    entries_.clear();
    bytes_ = 0;
  }

  bool empty() const { return entries_.empty(); }
  std::size_t rounds() const { return entries_.size(); }
  std::uint64_t bytes() const { return bytes_; }
  Round first() const { return entries_.front().round; }
  Round last() const { return entries_.back().round; }
  const Entry& oldest() const { return entries_.front(); }

 private:
  std::deque<Entry> entries_;
  std::uint64_t bytes_ = 0;
};

}  // namespace jaxcoded
