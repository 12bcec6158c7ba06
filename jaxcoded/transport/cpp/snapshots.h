// Snapshots of the user's state: the snapshot that a rank keeps, and a snapshot on its way from a rank above.
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

// Memory of a state. It lives as long as any `State` refers to it, so that a thread can fill or copy it while
// other threads have their turns.
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

// This rank's newest snapshot.
class Snapshot {
 public:
  // Keep a snapshot. Returns the previous one.
  State keep(Round round, State state, Layout layout);
  Round round() const { return round_; }  // the state results from the rounds before this one
  // Differs even between snapshots of the same round, for example of a round that is called again.
  std::uint64_t number() const { return number_; }
  std::uint64_t bytes() const { return state_.bytes(); }
  // Append where the snapshot is, for `Recovery::begin`.
  void describe(Message& message) const;
  std::optional<std::span<const std::byte>> read(std::uint64_t number, std::uint32_t piece) const;

 private:
  Round round_ = 0;
  std::uint64_t number_ = 0;
  State state_;
  Layout layout_;
};

// The attempt to fetch a snapshot from a rank above.
class Recovery {
 public:
  Recovery(const std::vector<Rank>& above, double now) : above_(above), since_(now) {}

  double since() const { return since_; }
  bool complete() const { return round_ != 0 && fetched_ == layout_.size(); }
  bool missing() const { return missing_; }  // no rank above has a snapshot
  Round round() const { return round_; }     // of the snapshot being fetched; 0: none yet
  State take() { return std::exchange(state_, State()); }
  std::uint64_t bytes() const { return state_.bytes(); }

  // Return the nearest rank to ask now, if there is one.
  std::optional<Rank> next(double now);
  void without(Rank rank) { without_.insert(rank); }
  // Record that a rank is dead. Returns whether to ask the rank that `next` returns.
  bool lost(Rank rank);
  // Begin to fetch the snapshot of a rank. `message` must be written by `Snapshot::describe`.
  void begin(Rank from, const Message& message, std::uint64_t piece_bytes);
  // Whether nothing has come for `patience` seconds, so that another rank must be asked. After all ranks were
  // asked, this rank asks the ranks that may have a snapshot again, but only a few times: questions to stopped
  // ranks pile up.
  bool stuck(double now, double patience);
  // Fetch pieces, at most `bytes` bytes in all. If a fetch takes time, request `ahead` pieces at a time.
  //   gone: the snapshot is gone, so ask `next`.
  //   more: there is more to do at once.
  enum class Progress { waits, more, gone };
  Progress fetch(Wire& wire, std::uint64_t bytes, std::uint32_t ahead);
  // Take a piece that has come. If `data` is empty, the snapshot is gone, see `fetch`.
  Progress arrived(Rank from, std::uint64_t number, std::uint32_t piece,
                   std::span<const std::byte> data, double now);

 private:
  Progress gone();

  const std::vector<Rank>& above_;
  double since_;
  double heard_at_ = 0;  // when something came or a rank was asked
  std::set<Rank> asked_ = {};
  std::set<Rank> without_ = {};
  bool missing_ = false;
  static constexpr int most_turns = 20;
  int turns_ = 0;  // how often all ranks were asked, and none had a snapshot

  // The snapshot being fetched.
  Round round_ = 0;
  Rank from_ = -1;
  std::uint64_t number_ = 0;
  std::uint64_t address_ = 0;
  Layout layout_ = {};
  State state_ = {};
  std::vector<bool> arrived_ = {};  // which pieces are here
  std::uint32_t fetched_ = 0;       // the number of pieces fetched
  std::uint32_t wanted_ = 0;        // the number of pieces requested
};

}  // namespace jaxcoded
