// A node on the way up: offers of the children, the sum, the offer to the parent.
#include "node.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace jaxcoded {

void Node::on_offer(Child& child, const Message& message) {
  const Header& head = message.header;
  if (head.round == child.round && head.ready == 0) child.skips = true;
  if (head.round < child.round || (head.round == child.round && head.ready < child.ready)) return;
  std::vector<std::uint64_t> addresses;
  if (!(head.flags & inlined)) addresses = message.values<std::uint64_t>(0, head.segments);
  if (head.round > child.round) {
    child.order = ++offers_seen_;
    child.seen = wire_.now();
    telemetry_.arrived(child.column, child.round + 1, head.round, child.seen);
    child.ready = child.exact = 0;
    child.withdrawn = child.stalled = false;
    child.skips = head.ready == 0;
    child.slots.clear();
    child.round = head.round;
    child.fingerprint = head.fingerprint;
    Listener& listener = listeners_[child.rank];
    listener.first = listener.last = head.round;
    listener.told = 0;
  }
  if (!(head.flags & approximate)) child.exact = head.ready;
  child.ready = head.ready;
  child.addresses = std::move(addresses);
  child.body.clear();
  if (head.flags & inlined) child.body = message.body;
  check_offer(child);
}

// The piece of a child's message that goes into this piece of `incoming_`.
std::uint32_t Node::piece_of_row(std::size_t row, std::uint32_t piece) const {
  const std::size_t parts = decoder_.parts();
  if (parts == 1 || !incoming_[piece].count) return piece;
  const std::size_t segment = incoming_[piece].segment;
  const std::size_t vectors = call_.total.size();
  const std::size_t part = segment / vectors * parts + row % parts;
  return theirs_.first(part * vectors + segment % vectors) + piece - incoming_.first(segment);
}

bool Node::usable(std::size_t row, std::uint32_t piece) const {
  const std::size_t number = row / decoder_.parts();
  const Child& child = children_[number];
  return child.round == next_ && !child.withdrawn &&
         (approximating_ ? child.ready : child.exact) > piece_of_row(row, piece) &&
         child.fingerprint == call_.fingerprint &&
         (call_.erased.empty() || !call_.erased[number]);
}

// First parts before others, and of each the children in the order in which they came.
const std::vector<std::size_t>& Node::rows_in_order() {
  if (rows_.size() == decoder_.rows() && rows_sorted_ == offers_seen_) return rows_;
  rows_.resize(decoder_.rows());
  std::iota(rows_.begin(), rows_.end(), 0);
  std::ranges::sort(rows_, {}, [&](std::size_t row) {
    return std::pair(row % decoder_.parts(), child_of_row(row).order);
  });
  rows_sorted_ = offers_seen_;
  return rows_;
}

// The messages to decode a piece from: those in use as long as they come, otherwise the first that
// sufficed.
std::shared_ptr<const Decoding> Node::choose(std::uint32_t piece) {
  if (decoder_.checked()) return choose_checked();
  if (decoding_ && pinned()) {
    const bool there = std::ranges::all_of(decoding_->rows,
                                           [&](std::size_t row) { return usable(row, piece); });
    return there ? decoding_ : nullptr;
  }
  if (decoding_ && std::ranges::all_of(decoding_->rows, [&](std::size_t row) {
        return usable(row, piece) && !child_of_row(row).stalled;
      })) {
    return decoding_;
  }
  const std::vector<bool> possible = may_offer(piece);
  for (const bool with_stalled : {false, true}) {
    const bool waits = !overdue_ || limits_.on_deadline == OnDeadline::wait;
    if (approximating_ || (with_stalled && !waits)) break;
    std::vector<std::size_t> here;
    for (std::size_t row : rows_in_order()) {
      if (usable(row, piece) && (with_stalled || !child_of_row(row).stalled)) here.push_back(row);
    }
    if (auto found = decoder_.decode(here, possible)) return decoding_ = found;
  }
  decoding_.reset();
  if (overdue_ && limits_.on_deadline == OnDeadline::approximate) {
    decoding_ = approximation(piece);
  }
  return decoding_;
}

// The child's pieces do not come: the others' are used if they suffice, and it is the last to be
// asked otherwise, so that all are tried in turn.
void Node::stall(Child& child) {
  child.stalled = true;
  child.order = ++offers_seen_;
}

// Forget what is summed: it is of messages that no longer come. Nobody has been told of it yet. What
// is on its way from the children stays wanted.
void Node::start_again_without(const std::vector<std::size_t>& rows) {
  for (std::size_t row : rows) {
    if (!usable(row, decoded_)) stall(child_of_row(row));
  }
  decoding_.reset();
  decoded_ = exact_;
  decoded_elements_ = exact_elements_;
}

// A piece of a child's message, if it is here. Otherwise it is on its way, or the child has
// withdrawn its offer.
const std::byte* Node::bring(std::size_t row, std::uint32_t piece) {
  static const std::byte nothing[1] = {};
  Child& child = child_of_row(row);
  const Layout& layout = decoder_.parts() > 1 ? theirs_ : incoming_;
  const std::uint32_t first = piece_of_row(row, piece);
  const Piece& it = layout[first];
  if (it.bytes == 0) return nothing;
  if (!child.body.empty()) return child.body.data() + layout.start(it.segment) + it.offset;
  const std::uint32_t ahead = wire_.direct(child.rank) ? 1 : pieces_ahead;
  for (std::uint32_t p = first; p < std::min(child.ready, first + ahead); ++p) {
    const Piece& wanted = layout[p];
    // a part that may not be needed
    if (p != first && decoder_.parts() > 1 && wanted.segment != it.segment) break;
    const auto [slot, added] = child.slots.try_emplace(p);
    if (!added) continue;
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
  const Child::Slot& slot = child.slots[first];
  return slot.here ? slot.buffer.data() : nullptr;
}

// Whether this rank's own vectors are here as far as that piece of `incoming_`.
bool Node::own_ready(std::uint32_t piece) const {
  const Piece& it = incoming_[piece];
  if (call_.skipped || !it.count) return true;
  if (it.segment >= call_.own.size()) return false;
  if (!call_.feed) return true;
  const std::uint64_t last = (decoder_.slices() - 1) * incoming_.segments()[it.segment].bytes();
  return call_.feed->ready(it.segment) >= last + it.offset + it.bytes;
}

// This rank cannot contribute, and every rank is to hear why.
void Node::fail(const std::string& text) {
  if (root()) return decide_error(text);
  complain(next_, text);
  call_.skipped = true;  // the result, or the error, comes as to any other
}

bool Node::gather() {
  if (calling() && call_.feed && !call_.skipped) {
    if (const std::string why = call_.feed->failure(); !why.empty()) {
      fail("CodedError: rank " + std::to_string(family_.rank) + ": " + why);
    }
  }
  if (!calling() || !call_.up || !call_.refusal.empty()) {
    if (calling() && !root() && !offering_) offer();
    return false;
  }
  if (!root() && (call_.skipped || children_.empty())) {
    const std::uint32_t before = decoded_;
    while (!call_.skipped && decoded_ < incoming_.size() && own_ready(decoded_)) skip_piece();
    if (!offering_ || decoded_ != before) offer();
    return false;
  }
  ask_children();
  overdue_ = overdue_ || wire_.now() >= wakes_at() || only_silent_lack();
  std::uint64_t bytes = 0;
  while (decoded_ < incoming_.size()) {
    // What is decided is not needed any more, and may lie where this rank's own vector was.
    if (const Entry* entry = root() ? nullptr : history_.find(next_);
        entry && entry->ready > decoded_ &&
        entry->layout.segments() == incoming_.segments()) {
      complete_ = true;
      skip_piece();
      continue;
    }
    const auto decoding = own_ready(decoded_) ? choose(decoded_) : nullptr;
    if (!decoding) {
      if (bytes && !pinned()) announce_sum();
      if (overdue_ && own_ready(decoded_)) miss_the_deadline();
      return false;
    }
    const std::vector<std::size_t>& rows = decoder_.checked() ? brought_ : decoding->rows;
    std::vector<const std::byte*> inputs;
    for (std::size_t row : rows) {
      const std::byte* input = bring(row, decoded_);
      if (input) inputs.push_back(input);
    }
    if (inputs.size() < rows.size()) {
      if (std::ranges::any_of(rows,
                              [&](std::size_t row) { return child_of_row(row).withdrawn; })) {
        if (pinned()) start_again_without(rows);
        check_offers();
        if (!calling()) return false;
        continue;
      }
      // Those above go on with what is summed while the rest is on its way.
      if (bytes && !pinned()) announce_sum();
      return false;
    }
    bytes += incoming_[decoded_].bytes;
    if (decoder_.checked()) inputs = checked(*decoding, inputs);
    decode(*decoding, inputs);
    if (decoder_.checked() && decoded_ == incoming_.size() && !consistent()) return false;
    waiting_since_ = wire_.now();
    const bool all = decoded_ == incoming_.size();
    if (!all && bytes < limits_.announced_bytes) continue;
    // What may be formed again is announced as a whole.
    if (all || !pinned()) announce_sum();
    return calling() && !all;
  }
  announce_sum();
  return false;
}

void Node::decode(const Decoding& decoding, std::span<const std::byte* const> inputs) {
  for (std::size_t row : decoding.rows) telemetry_.used(next_, child_of_row(row).column);
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
  for (std::size_t row = 0; row < decoder_.rows(); ++row) {
    child_of_row(row).slots.erase(piece_of_row(row, decoded_));
  }
  ++decoded_;
}

// The pieces of this rank's message, or of the result at the root, that are summed: all before
// this one. Those before `piece` are known to be.
std::uint32_t Node::summed(const Layout& layout, std::uint32_t piece) const {
  if (decoded_ == incoming_.size()) return layout.size();
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
  if (decoded_ == incoming_.size() && !complete_) sum_complete();
  if (!root()) return offer();
  Entry& entry = *history_.find(next_);
  if (call_.down) {
    decided(entry, summed(entry.layout, entry.ready));
  } else if (decoded_ == incoming_.size()) {
    decided(entry, entry.layout.size());
  }
}

// Offer this rank's message to its parent, as far as it is summed.
void Node::offer() {
  if (!calling() || root()) return;
  const Rank parent = family_.ancestors.front();
  const bool empty = !call_.up || call_.skipped || !call_.refusal.empty();
  std::uint32_t ready = empty ? 0 : summed(outgoing_, offered_);
  const bool complete = empty || ready == outgoing_.size();
  // A small message goes as a whole, or with the parts that are ready.
  bool small = !empty && outgoing_.bytes() <= wire_.inline_bytes(parent);
  if (small && !complete) {
    small = false;
    const std::size_t vectors = call_.total.size();
    const std::size_t parts = outgoing_[ready].segment / vectors;
    ready = outgoing_.first(parts * vectors);
  }
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
  if (approximating_) message.header.flags = approximate;
  if (small) {
    message.header.flags |= inlined;
    message.body.resize(std::max<std::uint64_t>(outgoing_.bytes(), 1));
    for (std::size_t s = 0; s < sum_at_.size(); ++s) {
      const std::uint64_t size = call_.message[s].bytes();
      if (size) std::memcpy(message.body.data() + outgoing_.start(s), sum_at_[s], size);
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
  if (decoder_.checked()) return;  // nobody's message will do instead
  const double now = wire_.now();
  if (now - waiting_since_ < std::max(limits_.stall_seconds, waiting_since_ - started_)) return;
  waiting_since_ = now;
  if (pinned()) {
    std::vector<std::size_t> late;
    for (std::size_t row : decoding_->rows) {
      const auto slot = child_of_row(row).slots.find(piece_of_row(row, decoded_));
      const bool asked = slot != child_of_row(row).slots.end();
      if (asked ? !slot->second.here : !usable(row, decoded_)) late.push_back(row);
    }
    std::vector<std::size_t> others;
    for (std::size_t row : rows_in_order()) {
      if (usable(row, 0) && std::ranges::find(late, row) == late.end()) others.push_back(row);
    }
    if (late.empty()) return;
    if (!approximating_ && !decoder_.decode(others, may_offer(0))) return;  // nobody else
    for (std::size_t row : late) stall(child_of_row(row));
    return start_again_without({});
  }
  for (std::size_t row : decoding_->rows) {
    Child& child = child_of_row(row);
    const auto slot = child.slots.find(piece_of_row(row, decoded_));
    if (slot != child.slots.end() && !slot->second.here) stall(child);
  }
}

}  // namespace jaxcoded
