// What a node remembers of its latest rounds: which ranks were in time, and how long each step took.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "computed.h"
#include "message.h"
#include "step_time.h"

namespace jaxcoded {

// One round at this rank. Times are in seconds of the wire's clock, or `unknown` if the event has not happened.
struct RoundRecord {
  Round round = 0;
  double work = unknown;     // seconds from the end of the previous call to this one
  double started = unknown;  // when this rank called
  double decided = unknown;  // when its sum was complete
  double ended = unknown;    // when its result had arrived
  Rank decider = -1;         // the rank whose message completed the sum: a child, or this rank itself
  std::uint8_t outcome = 0;
  std::uint64_t payload = 0;  // bytes of the result
  bool skipped = false;
  bool approximate = false;
  bool shared = false;  // the round itself settled which rank computes which blocks
  bool loop = false;    // the round computes blocks in a loop, and the next round sums them
  double busy = 0;      // seconds for which this rank computed blocks
  std::uint32_t blocks = 0;  // the number of blocks that this rank computed
  double own = 0;       // the cost of this rank's own blocks, as a multiple of the cost of those that it computed
};

// A record for each of the latest rounds. For each child, a record has when the child's message came, and
// whether it was used. An event takes some ten nanoseconds to write.
class Telemetry {
 public:
  Telemetry(std::size_t rounds, std::size_t children)
      : children_(children),
        records_(rounds),
        arrived_(rounds * children, unknown),
        used_(rounds * children),
        heard_(children) {}

  bool on() const { return !records_.empty(); }

  void started(Round round, double now, bool skipped, bool shared, bool loop) {
    if (!on()) return;
    current_ = round;
    RoundRecord& old = records_[slot(round)];
    if (old.ended == old.ended) old.round = 0;  // the old record may be of this round, called before a resync
    RoundRecord& record = at(round);
    record.started = now;
    record.work = now - ended_;
    record.skipped = skipped;
    record.shared = shared;
    record.loop = loop;
  }
  // Record how many blocks of a round this rank has computed, and in how many seconds.
  void worked(Round round, double seconds, std::uint32_t blocks, double own) {
    if (!on()) return;
    RoundRecord& record = at(round);
    record.busy = seconds;
    record.blocks = blocks;
    record.own = own;
  }
  // Record what all members have computed in a round: this rank first, then its children by column.
  void divided(Round round, const std::vector<Computed>& computed) {
    if (!on()) return;
    at(round);
    computed_.resize(records_.size() * (children_ + 1));
    std::ranges::copy(computed, computed_.begin() + first_of(round));
  }
  // Record a child's first message in a round. The child has called the rounds from `first` on, too.
  void arrived(std::size_t child, Round first, Round round, double now) {
    if (!on()) return;
    heard_[child] = {round, now};
    const Round newest = std::min(round, current_ + records_.size() - 1);
    const Round oldest = newest < records_.size() ? 1 : newest - records_.size() + 1;
    for (Round r = std::max(first, oldest); r <= newest; ++r) {
      if (records_[slot(r)].round > r) continue;  // forgotten
      at(r);
      double& when = arrived_[slot(r) * children_ + child];
      if (when != when) when = now;
    }
  }
  void used(Round round, std::size_t child) {
    if (on()) used_[slot(round) * children_ + child] = 1;
  }
  void decided(Round round, double now, Rank own, const std::vector<Rank>& children,
               bool approximate) {
    if (!on()) return;
    RoundRecord& record = at(round);
    record.decided = now;
    record.approximate = approximate;
    record.decider = own;
    double last = record.started;
    for (std::size_t child = 0; child < children_; ++child) {
      const std::size_t place = slot(round) * children_ + child;
      if (!used_[place] || !(arrived_[place] > last)) continue;
      last = arrived_[place];
      record.decider = children[child];
    }
  }
  void ended(Round round, double now, std::uint8_t outcome, std::uint64_t payload) {
    ended_ = now;
    if (!on()) return;
    RoundRecord& record = at(round);
    record.ended = now;
    record.outcome = outcome;
    record.payload = payload;
  }

  // The rounds that have ended, the oldest first.
  std::vector<RoundRecord> records() const {
    std::vector<RoundRecord> out;
    for (const RoundRecord& record : records_) {
      if (record.ended == record.ended) out.push_back(record);
    }
    std::ranges::sort(out, {}, &RoundRecord::round);
    return out;
  }
  const RoundRecord* find(Round round) const {
    return on() && records_[slot(round)].round == round ? &records_[slot(round)] : nullptr;
  }
  double arrival(Round round, std::size_t child) const {
    return arrived_[slot(round) * children_ + child];
  }
  // Return what all members have computed in a round; empty if `divided` has recorded nothing.
  std::vector<Computed> computed(Round round) const {
    if (computed_.empty()) return {};
    const auto first = computed_.begin() + first_of(round);
    return {first, first + static_cast<std::ptrdiff_t>(children_ + 1)};
  }
  bool was_used(Round round, std::size_t child) const {
    return used_[slot(round) * children_ + child] != 0;
  }

 private:
  std::size_t slot(Round round) const { return round % records_.size(); }
  std::ptrdiff_t first_of(Round round) const {
    return static_cast<std::ptrdiff_t>(slot(round) * (children_ + 1));
  }
  RoundRecord& at(Round round) {
    RoundRecord& record = records_[slot(round)];
    if (record.round != round) {
      record = {.round = round};
      for (std::size_t child = 0; child < children_; ++child) {
        const std::size_t place = slot(round) * children_ + child;
        // the child may have been so far ahead that its rounds had no records yet
        arrived_[place] = heard_[child].round >= round ? heard_[child].at : unknown;
        used_[place] = 0;
      }
      if (!computed_.empty()) std::fill_n(computed_.begin() + first_of(round), children_ + 1, Computed());
    }
    return record;
  }

  std::size_t children_;
  std::vector<RoundRecord> records_;
  std::vector<double> arrived_;
  std::vector<std::uint8_t> used_;
  std::vector<Computed> computed_ = {};  // empty if no work is shared
  struct Heard {
    Round round = 0;
    double at = unknown;
  };
  std::vector<Heard> heard_;  // the latest message of each child
  Round current_ = 1;         // the round of this rank's latest call
  double ended_ = unknown;
};

}  // namespace jaxcoded
