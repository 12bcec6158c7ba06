// The blocks of a round with shared work that a rank computes: those that its parent has granted it.
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

using Block = std::uint32_t;  // of the global batch, from 0

// The blocks in a rank's vector, by number.
struct Version {
  std::uint32_t generation = 0;
  std::uint32_t blocks = 0;

  bool operator==(const Version&) const = default;
  auto operator<=>(const Version&) const = default;
  std::uint64_t number() const { return std::uint64_t{generation} << 32 | blocks; }
};

// What a rank reports to its parent about its blocks. Counts are those of one generation: of the
// orders since the parent last gave the rank up.
struct Progress {
  std::uint32_t generation = 0;
  std::uint32_t added = 0;     // blocks in the rank's vector
  std::uint32_t answered = 0;  // blocks that were recalled, returned or not
  bool out = false;            // the rank no longer takes part in the round
  bool claims = false;         // it began with its own blocks, without being granted them
  float seconds = 0;           // since it added the last one
  std::vector<Block> returned = {};  // recalled blocks that it returns, since its last report

  Version version() const { return {generation, added}; }
  // Whether the rank reported this before the other one.
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

// Whether a rank with so many blocks left reports it: the fewer are left, the sooner it matters to
// others. A report in between, in answer to an order, is valid, too.
constexpr bool tells_with(std::size_t left) { return std::has_single_bit(left + 1); }

// Orders arrive in the order in which they were given, so none is of an older generation. The vector
// belongs to the program, which adds to it and can only empty it. So a block that is being computed
// is returned only if the vector is empty otherwise.
class Share {
 public:
  // `empties`: whether the program can empty the vector. `claimed`: blocks to begin with, which are
  // this rank's own.
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
      if (const auto found = std::ranges::find(queue_, block); found != queue_.end()) {
        queue_.erase(found);
      } else if (computes_ == block && wanted_ && empties_ && !progress_.added) {
        wanted_ = false;  // the vector holds nothing that is wanted
      } else {
        continue;
      }
      progress_.returned.push_back(block);
    }
  }

  // Others compute all that was granted. The vector must be emptied.
  void drop(std::uint32_t generation) {
    progress_ = {.generation = generation, .out = progress_.out || !empties_};
    queue_.clear();
    blocks_.clear();
    wanted_ = false;
    fresh_ = true;
  }

  // The same, and this rank gets no more blocks.
  void leave() {
    drop(progress_.generation);
    progress_.out = true;
  }

  // The next block to compute, if there is one. Call `fresh` before.
  std::optional<Block> take() {
    if (queue_.empty()) return {};
    computes_ = queue_.front();
    queue_.erase(queue_.begin());
    wanted_ = true;
    fresh_ = false;
    return computes_;
  }

  // The block that was taken last is computed, and added to the vector. Returns whether the parent must
  // be told.
  bool done() {
    if (!computes_) return false;
    const Block block = *std::exchange(computes_, std::nullopt);
    if (wanted_) {
      ++progress_.added;
      blocks_.push_back(block);
    } else {
      fresh_ = true;  // it is the only one in the vector
    }
    return tells_with(queue_.size());
  }

  // What to tell the parent so many seconds after the latest block was added.
  Progress progress(double seconds) {
    Progress out = progress_;
    out.seconds = static_cast<float>(seconds);
    progress_.returned.clear();
    return out;
  }

  bool has_blocks() const { return !queue_.empty(); }
  bool computes() const { return computes_.has_value(); }
  // Whether the vector must be emptied before anything is added to it.
  bool fresh() const { return fresh_; }
  // Whether the vector may be used as it is. Then its version, and its blocks.
  bool sealed() const { return !progress_.out && queue_.empty() && !computes(); }
  Version version() const { return {progress_.generation, progress_.added}; }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  bool empties_;
  std::vector<Block> queue_;
  std::optional<Block> computes_;
  bool wanted_ = false;  // it was neither recalled nor dropped
  bool fresh_ = false;
  std::vector<Block> blocks_ = {};  // in the vector, in order
  Progress progress_;
};

}  // namespace jaxcoded
