// What a rank computes of a round whose work is shared: the blocks that its parent has granted it.
//
// The rules, and why they are enough, are in tests/sharing/model.py; `Ledger` is the parent's side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace jaxcoded {

using Block = std::uint32_t;  // of the global batch, from 0

// What a rank tells its parent of its blocks. Counts are those of a generation: of what the parent
// has ordered since it last gave the rank up.
struct Progress {
  std::uint32_t generation = 0;
  std::uint32_t added = 0;     // blocks in the rank's vector
  std::uint32_t answered = 0;  // blocks that were recalled, returned or not
  std::vector<Block> returned = {};  // of these, since it was said last
};

// Orders come in the order in which they were given, so none is of an older generation.
class Share {
 public:
  void grant(const std::vector<Block>& blocks) {
    queue_.insert(queue_.end(), blocks.begin(), blocks.end());
  }

  void recall(const std::vector<Block>& blocks) {
    for (const Block block : blocks) {
      ++progress_.answered;
      if (const auto found = std::ranges::find(queue_, block); found != queue_.end()) {
        queue_.erase(found);
      } else if (computes_ == block && wanted_) {
        wanted_ = false;
      } else {
        continue;  // it is in the vector
      }
      progress_.returned.push_back(block);
    }
  }

  // All that was granted is for others to compute. The vector is empty again.
  void drop(std::uint32_t generation) {
    progress_ = {.generation = generation};
    queue_.clear();
    wanted_ = false;
  }

  // The next block to compute, if there is one.
  std::optional<Block> take() {
    if (queue_.empty()) return {};
    computes_ = queue_.front();
    queue_.pop_front();
    wanted_ = true;
    return computes_;
  }

  // The block that was taken last is computed. Whether to add it to the vector.
  bool done() {
    const bool wanted = computes_ && wanted_;
    computes_.reset();
    progress_.added += wanted;
    return wanted;
  }

  // What to tell the parent now.
  Progress progress() {
    Progress out = progress_;
    progress_.returned.clear();
    return out;
  }

  bool computes() const { return computes_.has_value(); }

 private:
  std::deque<Block> queue_;
  std::optional<Block> computes_;
  bool wanted_ = false;  // it was neither recalled nor dropped
  Progress progress_;
};

}  // namespace jaxcoded
