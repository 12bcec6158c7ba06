// The blocks of a round with shared work that a rank computes: the blocks that its parent has granted it.
//
// The rules, and why they are enough, are in tests/sharing/model.py; `Ledger` is the parent's side.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "message.h"

namespace jaxcoded {

using Block = std::uint32_t;  // a block's number in the global batch, from 0

// Which blocks are in a rank's vector: a generation, and the number of blocks added in it.
struct Version {
  std::uint32_t generation = 0;
  std::uint32_t blocks = 0;

  bool operator==(const Version&) const = default;
  auto operator<=>(const Version&) const = default;
  std::uint64_t number() const { return std::uint64_t{generation} << 32 | blocks; }
};

// What a rank reports to its parent about its blocks. All counts belong to one generation: they begin when the
// parent last gave the rank up.
struct Progress {
  std::uint32_t generation = 0;
  std::uint32_t added = 0;     // blocks in the rank's vector
  std::uint32_t answered = 0;  // blocks that were recalled, returned or not
  bool out = false;            // the rank no longer takes part in the round
  bool claims = false;         // the rank began with its own blocks before they were granted
  float seconds = 0;           // since it added its latest block
  std::vector<Block> returned = {};  // recalled blocks that it has returned since its last report

  Version version() const { return {generation, added}; }
  // Whether the rank made this report before the `other` report.
  bool before(const Progress& other) const {
    return std::tie(generation, out, added, answered) <
           std::tie(other.generation, other.out, other.added, other.answered);
  }

  void append_to(Message& message) const {
    const std::uint32_t head[] = {generation, added, answered, out,
                                  static_cast<std::uint32_t>(returned.size()), claims,
                                  std::bit_cast<std::uint32_t>(seconds), 0};
    message.append(head, sizeof head);
    message.append(returned.data(), returned.size() * sizeof(Block));
  }
  // Read the report at the beginning of a message's body; `end`: where it ends.
  static Progress from(const Message& message, std::size_t& end) {
    const auto head = message.values<std::uint32_t>(0, 8);
    auto returned = message.values<Block>(8 * sizeof head[0], head[4]);
    end = (8 + returned.size()) * sizeof head[0];
    return {head[0],      head[1], head[2], head[3] != 0, head[5] != 0, std::bit_cast<float>(head[6]),
            std::move(returned)};
  }
};

// Whether a rank that has this many blocks left reports its progress. The fewer blocks are left, the sooner the
// report matters to other ranks. A report at another time, in answer to an order, is valid, too.
constexpr bool tells_with(std::size_t left) { return std::has_single_bit(left + 1); }

// Orders arrive in the sequence in which they were given, so no order belongs to an older generation. The
// vector belongs to the program, which adds blocks to it, and can empty it but not subtract a block. So a block
// in progress is returned only if the vector is otherwise empty.
class Share {
 public:
  // `empties`: whether the program can empty the vector. `claimed`: blocks of this rank's own, with which it
  // begins.
  explicit Share(bool empties = true, const std::vector<Block>& claimed = {})
      : empties_(empties), queue_(claimed.begin(), claimed.end()) {
    progress_.claims = !claimed.empty();
  }

  void grant(const std::vector<Block>& blocks) {
    if (!progress_.out) queue_.insert(queue_.end(), blocks.begin(), blocks.end());
  }

  void recall(const std::vector<Block>& blocks) {
    for (const Block block : blocks) {
      ++progress_.answered;
      if (const auto position = std::ranges::find(queue_, block); position != queue_.end()) {
        queue_.erase(position);
      } else if (computes_ == block && wanted_ && empties_ && !progress_.added) {
        wanted_ = false;  // the vector holds no block that is wanted
      } else {
        continue;
      }
      progress_.returned.push_back(block);
    }
  }

  // Give up all blocks that were granted to this rank; other ranks compute them. The vector must be emptied.
  void drop(std::uint32_t generation) {
    progress_ = {.generation = generation, .out = progress_.out || !empties_};
    queue_.clear();
    blocks_.clear();
    wanted_ = false;
    fresh_ = true;
  }

  // Like `drop`, and this rank gets no more blocks.
  void leave() {
    drop(progress_.generation);
    progress_.out = true;
  }

  // Return the next block to compute, if there is one. Call `fresh` first.
  std::optional<Block> take() {
    if (queue_.empty()) return {};
    computes_ = queue_.front();
    queue_.erase(queue_.begin());
    wanted_ = true;
    fresh_ = false;
    return computes_;
  }

  // Record that the block taken last is computed and added to the vector. Returns whether to tell the parent.
  bool done() {
    if (!computes_) return false;
    const Block block = *std::exchange(computes_, std::nullopt);
    if (wanted_) {
      ++progress_.added;
      blocks_.push_back(block);
    } else {
      fresh_ = true;  // this unwanted block is the only one in the vector
    }
    return tells_with(queue_.size());
  }

  // Return the report to the parent, `seconds` after the latest block was added.
  Progress progress(double seconds) {
    Progress out = progress_;
    out.seconds = static_cast<float>(seconds);
    progress_.returned.clear();
    return out;
  }

  bool has_blocks() const { return !queue_.empty(); }
  std::optional<Block> computes() const { return computes_; }
  // Whether the vector must be emptied before anything is added to it.
  bool fresh() const { return fresh_; }
  // Whether the vector may be used as it is. If so, `version` and `blocks` describe it.
  bool sealed() const { return !progress_.out && queue_.empty() && !computes_; }
  Version version() const { return {progress_.generation, progress_.added}; }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  bool empties_;
  std::vector<Block> queue_;
  std::optional<Block> computes_;
  bool wanted_ = false;  // the block in progress was neither recalled nor dropped
  bool fresh_ = false;
  std::vector<Block> blocks_ = {};  // the blocks in the vector, in order
  Progress progress_;
};

}  // namespace jaxcoded
