// A node on the way up: offers of the children, the sum, the offer to the parent.
#include "node.h"

#include <algorithm>
#include <numeric>

namespace jaxcoded {

void Node::on_offer(Child& child, const Message& message) {
  const Header& head = message.header;
  if (head.round < child.round || (head.round == child.round && head.ready < child.ready)) return;
  if (head.round > child.round) {
    child.order = ++offers_seen_;
    child.withdrawn = child.stalled = false;
    child.slots.clear();
    child.round = head.round;
    child.fingerprint = head.fingerprint;
    Listener& listener = listeners_[child.rank];
    listener.first = listener.last = head.round;
    listener.told = 0;
  }
  child.ready = head.ready;
  child.addresses.clear();
  child.body.clear();
  if (head.flags & inlined) {
    child.body = message.body;
  } else {
    child.addresses = message.values<std::uint64_t>(0, head.segments);
  }
  check_offer(child);
}

bool Node::usable(const Child& child, std::uint32_t piece) const {
  const auto row = static_cast<std::size_t>(&child - children_.data());
  return child.round == next_ && child.ready > piece && !child.withdrawn &&
         child.fingerprint == call_.fingerprint && (call_.erased.empty() || !call_.erased[row]);
}

// The children to decode a piece from: those in use as long as they deliver, otherwise the first
// that sufficed.
std::shared_ptr<const Decoding> Node::choose(std::uint32_t piece) {
  if (decoding_ && std::ranges::all_of(decoding_->rows, [&](std::size_t row) {
        return usable(children_[row], piece) && !children_[row].stalled;
      })) {
    return decoding_;
  }
  std::vector<std::size_t> rows(children_.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::ranges::sort(rows, {}, [&](std::size_t row) { return children_[row].order; });
  const std::vector<bool> possible = may_offer(piece);
  for (const bool with_stalled : {false, true}) {
    std::vector<bool> answered(children_.size());
    if (auto found = decoder_.decode(answered, possible)) return decoding_ = found;  // of nobody
    for (std::size_t row : rows) {
      if (!usable(children_[row], piece) || (children_[row].stalled && !with_stalled)) continue;
      answered[row] = true;
      if (auto found = decoder_.decode(answered, possible)) return decoding_ = found;
    }
  }
  decoding_.reset();
  return nullptr;
}

// A piece of a child's message, if it is here. Otherwise it is on its way, or the child has
// withdrawn its offer.
const std::byte* Node::bring(Child& child, std::uint32_t piece) {
  static const std::byte nothing[1] = {};
  const Piece& it = incoming_[piece];
  if (it.bytes == 0) return nothing;
  if (!child.body.empty()) return child.body.data() + incoming_.start(it.segment) + it.offset;
  const std::uint32_t ahead = wire_.direct(child.rank) ? 1 : pieces_ahead;
  for (std::uint32_t p = piece; p < std::min(child.ready, piece + ahead); ++p) {
    const auto [slot, added] = child.slots.try_emplace(p);
    if (!added) continue;
    const Piece& wanted = incoming_[p];
    slot->second.buffer = pool_.take(wanted.bytes);
    fetched_bytes_ += wanted.bytes;
    switch (wire_.fetch(child.rank, {Object::What::message, next_}, p,
                        child.addresses[wanted.segment] + wanted.offset,
                        slot->second.buffer.data(), wanted.bytes)) {
      case Wire::Fetch::done:
        slot->second.here = true;
        break;
      case Wire::Fetch::pending:
        break;
      case Wire::Fetch::gone:
        child.withdrawn = true;
        child.slots.clear();
        return nullptr;
    }
  }
  const Child::Slot& slot = child.slots[piece];
  return slot.here ? slot.buffer.data() : nullptr;
}

bool Node::gather() {
  if (!calling() || !call_.up || !call_.refusal.empty()) {
    if (calling() && !root() && !offering_) offer();
    return false;
  }
  if (!root() && (call_.skipped || children_.empty())) {
    if (!offering_ && !call_.skipped) decoded_ = incoming_.size();
    if (!offering_) offer();
    return false;
  }
  std::uint64_t bytes = 0;
  while (decoded_ < incoming_.size()) {
    // What is decided is not needed any more, and may lie where this rank's own vector was.
    if (const Entry* entry = root() ? nullptr : history_.find(next_);
        entry && entry->ready > decoded_ &&
        entry->layout.segments() == incoming_.segments()) {
      skip_piece();
      continue;
    }
    const auto decoding = choose(decoded_);
    if (!decoding) return false;
    std::vector<const std::byte*> inputs;
    for (std::size_t row : decoding->rows) {
      const std::byte* input = bring(children_[row], decoded_);
      if (input) inputs.push_back(input);
    }
    if (inputs.size() < decoding->rows.size()) {
      if (std::ranges::any_of(decoding->rows,
                              [&](std::size_t row) { return children_[row].withdrawn; })) {
        continue;
      }
      return false;
    }
    bytes += incoming_[decoded_].bytes;
    decode(*decoding, inputs);
    waiting_since_ = wire_.now();
    if (bytes >= limits_.announced_bytes || decoded_ == incoming_.size()) {
      announce_sum();
      if (!calling()) return false;
      return decoded_ < incoming_.size();
    }
  }
  announce_sum();
  return false;
}

void Node::decode(const Decoding& decoding, std::span<const std::byte* const> inputs) {
  const Piece& piece = incoming_[decoded_];
  if (piece.count) {
    const Segment& part = incoming_.segments()[piece.segment];
    for (std::size_t u = 0; u < decoder_.slices(); ++u) {
      const std::uint64_t offset = u * part.bytes() + piece.offset;
      combine(part.dtype, sum_at_[piece.segment] + offset,
              call_.skipped ? nullptr : call_.own[piece.segment] + offset, inputs,
              decoding.coefficients[u], piece.count);
    }
  }
  skip_piece();
}

void Node::skip_piece() {
  const Piece& piece = incoming_[decoded_];
  if (piece.count) decoded_elements_[piece.segment] += piece.count;
  for (Child& child : children_) child.slots.erase(decoded_);
  ++decoded_;
}

// The pieces of this rank's message, or of the result at the root, that are summed: all before
// this one.
std::uint32_t Node::summed(const Layout& layout) const {
  if (decoded_ == incoming_.size()) return layout.size();
  std::uint32_t piece = 0;
  for (; piece < layout.size(); ++piece) {
    const Piece& it = layout[piece];
    if (!it.count) break;
    const std::uint64_t part = incoming_.segments()[it.segment].count;
    const std::uint64_t known = decoded_elements_[it.segment];
    const std::uint64_t last = it.first + it.count - 1;
    if (known < part && (it.first / part != last / part || last % part >= known)) break;
  }
  return piece;
}

void Node::announce_sum() {
  if (!root()) return offer();
  Entry& entry = *history_.find(next_);
  if (call_.down) {
    decided(entry, summed(entry.layout));
  } else if (decoded_ == incoming_.size()) {
    decided(entry, entry.layout.size());
  }
}

// Offer this rank's message to its parent, as far as it is summed.
void Node::offer() {
  if (!calling() || root()) return;
  const Rank parent = family_.ancestors.front();
  const bool empty = !call_.up || call_.skipped || !call_.refusal.empty();
  const std::uint32_t ready = empty ? 0 : summed(outgoing_);
  const bool complete = empty || ready == outgoing_.size();
  const bool small = !empty && outgoing_.bytes() <= wire_.inline_bytes(parent);
  if (small && !complete) return;
  if (!empty && ready == offered_) return;
  if (!offering_) {
    // A parent that has not answered to an earlier round's offer gets no second one.
    if (unanswered_) {
      held_back_ = true;
      return;
    }
    introduce(parent, introduced_, call_.fingerprint);
  }
  Message message{header(Kind::offer, next_)};
  message.header.fingerprint = call_.fingerprint;
  message.header.ready = ready;
  if (small) {
    message.header.flags = inlined;
    message.body.resize(std::max<std::uint64_t>(outgoing_.bytes(), 1));
    for (std::size_t s = 0; s < sum_at_.size(); ++s) {
      std::memcpy(message.body.data() + outgoing_.start(s), sum_at_[s], call_.message[s].bytes());
    }
  } else if (!empty) {
    append_addresses(message, sum_at_);
  }
  wire_.send(parent, message);
  offered_ = ready;
  unanswered_ |= !offering_;
  offering_ = true;
  wanted_ = next_;  // which replaces what was asked for before
}

// A child whose pieces do not come while others' could be used instead.
void Node::watch_for_stalls() {
  if (!calling() || !decoding_ || decoded_ == incoming_.size()) return;
  const double now = wire_.now();
  if (now - waiting_since_ < std::max(limits_.stall_seconds, waiting_since_ - started_)) return;
  waiting_since_ = now;
  for (std::size_t row : decoding_->rows) {
    const auto slot = children_[row].slots.find(decoded_);
    if (slot != children_[row].slots.end() && !slot->second.here) children_[row].stalled = true;
  }
}

}  // namespace jaxcoded
