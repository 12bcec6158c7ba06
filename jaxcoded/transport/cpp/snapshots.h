// Snapshots of the user's state: one that a rank keeps, and one on its way to a rank from above.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "message.h"
#include "wire.h"

namespace jaxcoded {

// Memory of a state. It is there as long as anybody has it, so that threads can fill and copy it
// while others have their turns.
class State {
 public:
  State() = default;
  explicit State(std::uint64_t bytes);

  std::byte* data() const { return memory_.get(); }
  std::uint64_t bytes() const { return bytes_; }
  std::span<const std::byte> all() const { return {data(), bytes_}; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::uint64_t bytes_ = 0;
};

// This rank's newest one.
class Snapshot {
 public:
  // Returns the one before.
  State keep(Round round, State state, Layout layout);
  Round round() const { return round_; }  // those before it have made the state
  // Those of one round, and of rounds called again, differ in their number.
  std::uint64_t number() const { return number_; }
  std::uint64_t bytes() const { return state_.bytes(); }
  // Where it is.
  void describe(Message& message) const;
  std::optional<std::span<const std::byte>> read(std::uint64_t number, std::uint32_t piece) const;

 private:
  Round round_ = 0;
  std::uint64_t number_ = 0;
  State state_;
  Layout layout_;
};

// One that a rank wants, until it is here.
class Recovery {
 public:
  Recovery(const std::vector<Rank>& above, double now) : above_(above), since_(now) {}

  double since() const { return since_; }
  bool complete() const { return round_ != 0 && fetched_ == layout_.size(); }
  bool missing() const { return missing_; }  // nobody above has any
  Round round() const { return round_; }     // of the one that is fetched; 0: none yet
  State take() { return std::exchange(state_, State()); }
  std::uint64_t bytes() const { return state_.bytes(); }

  // The nearest rank that is to be asked now, if any.
  std::optional<Rank> next(double now);
  void without(Rank rank) { without_.insert(rank); }
  // A rank is dead. Whether `next` is to be asked.
  bool lost(Rank rank);
  // A rank has one. What its message says of it must have been described by a `Snapshot`.
  void begin(Rank from, const Message& message, std::uint64_t piece_bytes);
  // Whether nothing has come for so many seconds. Then others are asked, and in the end all those
  // again that may have one; a few times, until one answers, as questions to stopped ranks pile up.
  bool stuck(double now, double patience);
  // Fetch pieces of so many bytes at most, and so many at a time of a rank where it takes time.
  //   gone: it is there no more, and `next` is to be asked.
  //   more: there is more to do at once.
  enum class Progress { waits, more, gone };
  Progress fetch(Wire& wire, std::uint64_t bytes, std::uint32_t ahead);
  // A piece that was fetched, or no data: it is gone, as above.
  Progress arrived(Rank from, std::uint64_t number, std::uint32_t piece,
                   std::span<const std::byte> data, double now);

 private:
  Progress gone();

  const std::vector<Rank>& above_;
  double since_;
  double heard_at_ = 0;  // or asked
  std::set<Rank> asked_ = {};
  std::set<Rank> without_ = {};
  bool missing_ = false;
  static constexpr int most_turns = 20;
  int turns_ = 0;  // in which all were asked, and none has answered with one

  // The one that is fetched.
  Round round_ = 0;
  Rank from_ = -1;
  std::uint64_t number_ = 0;
  std::uint64_t address_ = 0;
  Layout layout_ = {};
  State state_ = {};
  std::vector<bool> here_ = {};  // pieces
  std::uint32_t fetched_ = 0;    // so many of them
  std::uint32_t wanted_ = 0;     // pieces that were asked for
};

}  // namespace jaxcoded
