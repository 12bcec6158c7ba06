#include "snapshots.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pool.h"

namespace jaxcoded {

State::State(std::uint64_t bytes) : bytes_(bytes) {
  const std::uint64_t capacity = std::max<std::uint64_t>(bytes, 1);
  memory_.reset(heap.allocate(capacity),
                [capacity](std::byte* data) { heap.release(data, capacity); });
}

// --- Kept here ---

State Snapshot::keep(Round round, State state, Layout layout) {
  layout_ = std::move(layout);
  ++number_;
  round_ = round;
  return std::exchange(state_, std::move(state));
}

void Snapshot::describe(Message& message) const {
  const std::uint64_t where[3] = {state_.bytes(), reinterpret_cast<std::uintptr_t>(state_.data()),
                                  number_};
  message.append(where, sizeof where);
}

std::optional<std::span<const std::byte>> Snapshot::read(std::uint64_t number,
                                                         std::uint32_t piece) const {
  if (number != number_ || piece >= layout_.size()) return std::nullopt;
  return state_.all().subspan(layout_[piece].offset, layout_[piece].bytes);
}

// --- From above ---

std::optional<Rank> Recovery::next(double now) {
  round_ = 0;
  heard_at_ = now;
  for (const Rank rank : above_) {
    if (asked_.insert(rank).second) return rank;
  }
  missing_ = without_.size() == above_.size();
  return std::nullopt;
}

bool Recovery::lost(Rank rank) {
  if (std::ranges::find(above_, rank) == above_.end()) return false;
  without(rank);
  asked_.insert(rank);
  return !complete() && (!round_ || from_ == rank);
}

void Recovery::begin(Rank from, const Message& message, std::uint64_t piece_bytes) {
  const auto where = message.values<std::uint64_t>(0, 3);
  if (where[0] > most_bytes()) throw Damaged();
  // if there is too little memory for these, nothing has changed
  Layout layout({{DType::bytes, where[0]}}, piece_bytes);
  std::vector<bool> arrived(layout.size());
  state_ = State(where[0]);
  from_ = from;
  round_ = message.header.round;
  address_ = where[1];
  number_ = where[2];
  layout_ = std::move(layout);
  arrived_ = std::move(arrived);
  fetched_ = wanted_ = 0;
  turns_ = 0;
}

bool Recovery::stuck(double now, double patience) {
  if (now - heard_at_ <= patience) return false;
  if (asked_.size() == above_.size() && turns_ < most_turns) {
    asked_ = without_;
    ++turns_;
  }
  return true;
}

// Handle the news that a newer snapshot has replaced the snapshot being fetched.
Recovery::Progress Recovery::gone() {
  if (!without_.contains(from_)) asked_.erase(from_);
  return Progress::gone;
}

Recovery::Progress Recovery::fetch(Wire& wire, std::uint64_t bytes, std::uint32_t ahead) {
  const bool direct = wire.direct(from_);
  std::uint64_t taken = 0;
  // if this process can read the other rank's memory, each piece arrives at once
  while (wanted_ < layout_.size() && taken < bytes && wanted_ < fetched_ + ahead) {
    const Piece& piece = layout_[wanted_];
    const Wire::Fetch fetch =
        piece.bytes == 0 ? Wire::Fetch::done
                      : wire.fetch(from_, {Object::What::state, number_}, wanted_,
                                   address_ + piece.offset, state_.data() + piece.offset, piece.bytes,
                                   Copy::past_caches);
    if (fetch == Wire::Fetch::gone) return gone();
    taken += piece.bytes;
    if (fetch == Wire::Fetch::done && !arrived_[wanted_]) {
      arrived_[wanted_] = true;
      ++fetched_;
    }
    ++wanted_;
    heard_at_ = wire.now();
  }
  const bool more = wanted_ < layout_.size() && wanted_ < fetched_ + ahead;
  return direct && more ? Progress::more : Progress::waits;
}

Recovery::Progress Recovery::arrived(Rank from, std::uint64_t number, std::uint32_t piece,
                                     std::span<const std::byte> data, double now) {
  if (complete() || !round_ || from != from_ || number != number_) return Progress::waits;
  if (data.empty()) return gone();
  std::memcpy(state_.data() + layout_[piece].offset, data.data(), data.size());
  heard_at_ = now;
  fetched_ += !arrived_[piece];
  arrived_[piece] = true;
  return Progress::waits;
}

}  // namespace jaxcoded
