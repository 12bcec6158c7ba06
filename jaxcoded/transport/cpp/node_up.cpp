// A node on the way up: offers of the children, the sum, the offer to the parent.
#include "node.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "readable.h"

namespace jaxcoded {

void Node::on_offer(Child& child, const Message& message) {
  const Header& head = message.header;
  // A child that goes back offers an earlier round again, and no other round before it gets an answer.
  if (head.round < child.offer.round) return note(child.rank, newest_);
  if (head.round == child.offer.round) {
    if (head.ready <= child.offer.ready && !(head.flags & shares)) note(child.rank, newest_);
    if (!child.offer.grow(message)) return;
  } else {
    Offer offer{.round = head.round,
                .fingerprint = head.fingerprint,
                .order = ++offers_seen_,
                .seen = wire_.now()};
    offer.grow(message);
    telemetry_.arrived(child.column, child.offer.round + 1, offer.round, offer.seen);
    child.offer = std::move(offer);
    up_.stalled.erase(child.rank);
    listeners_[child.rank].want(head.round, head.round);
  }
  check_offer(child);
  join_sections(child);
  if (head.flags & shares) hear_share(static_cast<std::size_t>(&child - children_.data()));
}

bool Node::usable(std::size_t row, std::uint32_t piece) const {
  const std::size_t number = row / decoder_.parts();
  const Offer& offer = children_[number].offer;
  return offer.round == next_ && !offer.withdrawn &&
         (up_.approximating ? offer.ready : offer.exact) > up_.piece_of_row(row, piece) &&
         offer.fingerprint == up_.call.fingerprint && !up_.call.leaves_out(number);
}

// Return the rows in the order in which to use them: first parts before later parts, and for each part the
// children in the order in which they came.
const std::vector<std::size_t>& Node::rows_in_order() {
  if (rows_.size() == decoder_.rows() && rows_sorted_ == offers_seen_) return rows_;
  rows_.resize(decoder_.rows());
  std::iota(rows_.begin(), rows_.end(), 0);
  std::ranges::sort(rows_, {}, [&](std::size_t row) {
    return std::pair(row % decoder_.parts(), child_of_row(row).offer.order);
  });
  rows_sorted_ = offers_seen_;
  return rows_;
}

// Return the messages from which to decode a piece: the messages in use as long as their pieces come, otherwise
// the first messages that sufficed.
std::shared_ptr<const Decoding> Node::choose(std::uint32_t piece) {
  if (up_.call.shared) return choose_sealed(piece);
  if (sums_blocks()) return choose_dealt(piece);
  if (decoder_.checked()) return choose_checked();
  if (const auto chosen = up_.decoding; chosen && pinned()) {
    const auto withdrawn = [&](std::size_t row) { return child_of_row(row).offer.withdrawn; };
    const auto available = [&](std::size_t row) { return usable(row, piece); };
    if (std::ranges::none_of(chosen->rows, withdrawn)) {
      return std::ranges::all_of(chosen->rows, available) ? chosen : nullptr;
    }
    start_again_without(chosen->rows);
  }
  if (up_.decoding && std::ranges::all_of(up_.decoding->rows, [&](std::size_t row) {
        return usable(row, piece) && !stalled(child_of_row(row));
      })) {
    return up_.decoding;
  }
  const std::vector<bool> possible = may_come(piece);
  for (const bool with_stalled : {false, true}) {
    if (up_.approximating || (with_stalled && gives_up())) break;
    std::vector<std::size_t> available;
    for (std::size_t row : rows_in_order()) {
      if (usable(row, piece) && (with_stalled || !stalled(child_of_row(row)))) available.push_back(row);
    }
    if (auto decoding = decoder_.decode(available, possible)) return up_.decoding = decoding;
  }
  up_.decoding.reset();
  if (up_.overdue && approximates()) {
    up_.decoding = approximation(piece);
  }
  return up_.decoding;
}

// Return the messages of which this rank has this piece, or may get it from children that live and contribute.
std::vector<bool> Node::may_come(std::uint32_t piece) const {
  std::vector<bool> out = may_offer(piece);
  for (std::size_t row = 0; row < out.size(); ++row) {
    const Child& child = children_[row / decoder_.parts()];
    out[row] = out[row] && (usable(row, piece) || !(skips(child) || child.dead));
  }
  return out;
}

// Return the piece that must be available next: if messages are compared as a whole, their last piece.
std::uint32_t Node::needed() const {
  return decoder_.checked() ? up_.incoming.size() - 1 : up_.decoded.pieces;
}

// Whether this piece can no longer be decoded, because children are dead or have nothing to contribute,
// whichever other children still come. `exact`: children that offer an approximation do not count as coming.
bool Node::too_few_left(std::uint32_t piece, bool exact) {
  if (up_.call.shared) return false;
  const auto lacks = [&](const Child& child) { return child.dead || skips(child); };
  if (std::ranges::none_of(children_, lacks)) return false;
  std::vector<bool> possible = may_come(piece);
  std::vector<std::size_t> rows;
  for (std::size_t row : rows_in_order()) {
    if (exact && !usable(row, piece) && offers_approximation(child_of_row(row))) possible[row] = false;
    if (possible[row]) rows.push_back(row);
    if (sums_blocks() && !possible[row] && !up_.call.leaves_out(row / decoder_.parts())) return true;
  }
  return !sums_blocks() && !decoder_.decode(rows, possible);
}

// Give up this rank's sum, for which too few children are left. This rank's message is then missing, too.
void Node::go_without_sum() {
  std::string lacks;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    if (!(child.dead || skips(child)) || up_.call.leaves_out(i)) continue;
    const std::string name = "rank " + std::to_string(child.rank);
    lacks += (lacks.empty() ? "" : ", ") +
             (child.dead                ? name + is_dead
              : child.offer.why.empty() ? name + " (skip=True)"
                                        : readable(child.offer.why));
  }
  if (root()) {
    const auto& tensor = decoder_.tensor();
    const bool dead = lacks.find(is_dead) != std::string::npos;
    // messages from ranks below a dead rank go only to the dead rank: no other rank can add them
    if (dead && family_.descendants.size() > children_.size()) lacks += ", and what any below them have";
    return decide_error(
        "TooManyErasures: round " + std::to_string(next_) + ": " + me() + " cannot rebuild its sum, as " +
        (dead ? "it lacks " : sums_blocks() ? "it gets nothing of " : "these contribute nothing: ") + lacks +
        (sums_blocks() ? "; but they have computed blocks of the batch: repeat the step"
                       : "; any " + std::to_string(tensor.stragglers) + " of its " +
                             std::to_string(tensor.children()) + " children may " +
                             (dead ? "be missing: go on with group.recovered()"
                                   : "skip: skip only where group.lag is not 0, or make the group with "
                                     "more stragglers")));
  }
  withdraw(Object::What::message, next_ + 1);
  up_.call.skipped = true;
  up_.call.lacks = me() + " (as it lacks " + lacks + ")";
  offer();
}

// Note that the child's pieces do not come. The pieces of other children are used if they suffice. Otherwise
// this child is tried last, so that all children are tried in turn.
void Node::stall(Child& child) {
  up_.stalled.insert(child.rank);
  child.offer.order = ++offers_seen_;
}

// A child that has answered since it was asked can be used again.
void Node::believe_answers() {
  for (const Child& child : children_) {
    if (!child.asked) up_.stalled.erase(child.rank);
  }
}

// Forget the sum so far, because it uses messages that will no longer come. No rank has been told about this sum yet.
// Pieces that are on their way from children are kept when they come.
void Node::start_again_without(const std::vector<std::size_t>& rows) {
  for (std::size_t row : rows) {
    if (!usable(row, up_.decoded.pieces)) stall(child_of_row(row));
  }
  up_.decoding.reset();
  up_.decoded = up_.exact;
}

// Return a piece of a child's message, if it has arrived; null if it is on its way, or if the child has
// withdrawn its offer.
const std::byte* Node::bring(std::size_t row, std::uint32_t piece) {
  static const std::byte nothing[1] = {};
  const Rank child = child_of_row(row).rank;
  Offer& offer = child_of_row(row).offer;
  const Layout& layout = up_.of_child();
  const std::uint32_t first = up_.piece_of_row(row, piece);
  const Piece range = layout[first];
  if (range.bytes == 0) return nothing;
  if (!offer.body.empty()) return offer.body.data() + layout.start(range.segment) + range.offset;
  const std::uint32_t ahead = wire_.direct(child) ? 1 : pieces_ahead;
  for (std::uint32_t p = first; p < std::min(offer.ready, first + ahead); ++p) {
    const Piece wanted = layout[p];
    // a part that the sum may not need
    if (p != first && decoder_.parts() > 1 && wanted.segment != range.segment) break;
    if (offer.slots.contains(p)) continue;
    Buffer memory = pool_.take(wanted.bytes);
    const auto slot = offer.slots.try_emplace(p, std::move(memory)).first;
    fetched_bytes_ += wanted.bytes;
    switch (wire_.fetch(child, {Object::What::message, next_, version_of(offer)}, p,
                        offer.addresses[wanted.segment] + wanted.offset,
                        slot->second.buffer.data(), wanted.bytes, Copy::cached)) {
      case Wire::Fetch::done:
        slot->second.arrived = true;
        break;
      case Wire::Fetch::pending:
        break;
      case Wire::Fetch::gone:
        offer.withdraw();
        return nullptr;
    }
  }
  const Offer::Slot& slot = offer.slots[first];
  return slot.arrived ? slot.buffer.data() : nullptr;
}

// Whether this rank's own vectors are available up to this piece of `up_.incoming`.
bool Node::own_ready(std::uint32_t piece) const {
  const Piece range = up_.incoming[piece];
  if (up_.call.shared) return up_.lent || !work_.ledger->version(0).blocks;
  if (up_.call.skipped || !range.count) return true;
  if (range.segment >= up_.call.own.size()) return false;
  if (!up_.call.feed) return true;
  const std::uint64_t last = (decoder_.slices() - 1) * up_.incoming.segments()[range.segment].bytes();
  return up_.call.feed->ready(range.segment) >= last + range.offset + range.bytes;
}

// Report to every rank why this rank cannot contribute.
void Node::fail(const std::string& text) {
  if (root()) return decide_error(text);
  alert(next_, text);
  up_.call.skipped = true;  // this rank gets the result, or the error, like any other rank
}

bool Node::gather() {
  up_.overdue = up_.overdue || wire_.now() >= overdue_at();
  if (calling() && up_.call.shared && (!root() || up_.all_decoded())) return false;
  if (calling() && up_.call.feed && !up_.call.skipped) {
    if (const std::string why = up_.call.feed->failure(); !why.empty()) {
      fail("CodedError: rank " + std::to_string(family_.rank) + ": " + why);
    }
  }
  if (!calling() || !up_.call.up || !up_.call.why_not.empty()) {
    if (calling() && !root() && !up_.offering) offer();
    return false;
  }
  if (!root() && (up_.call.skipped || children_.empty())) {
    const std::uint32_t before = up_.decoded.pieces;
    while (!up_.call.skipped && !up_.all_decoded() && own_ready(up_.decoded.pieces)) skip_piece();
    if (!up_.offering || up_.decoded.pieces != before) offer();
    return false;
  }
  ask_children();
  up_.overdue = up_.overdue || only_silent_lack();
  if (deals() && !deal()) {
    abandon_sections();
    if (!up_.overdue) return false;
  }
  if (!calling()) return false;
  if (const auto more = delegate()) return *more;
  if (!calling()) return false;
  std::uint64_t bytes = 0;
  while (up_.decoded.pieces < up_.incoming.size()) {
    // Decided pieces are no longer needed, and the result may have overwritten this rank's own vector.
    if (const Entry* entry = root() ? nullptr : history_.find(next_);
        entry && entry->ready > up_.decoded.pieces &&
        entry->layout.segments() == up_.incoming.segments()) {
      up_.complete = true;
      skip_piece();
      continue;
    }
    const auto decoding = own_ready(up_.decoded.pieces) ? choose(up_.decoded.pieces) : nullptr;
    if (!decoding) {
      if (!(approximates() && !decoder_.checked()) && too_few_left(needed())) {
        go_without_sum();
        return false;
      }
      if (bytes && !as_a_whole()) announce_sum();
      if (up_.overdue) miss_the_deadline();
      return false;
    }
    if (!up_.moving_since) up_.moving_since = wire_.now();
    const std::vector<std::size_t>& rows = decoder_.checked() ? up_.brought : decoding->rows;
    std::vector<const std::byte*> inputs;
    for (std::size_t row : rows) {
      const std::byte* input = bring(row, up_.decoded.pieces);
      if (input) inputs.push_back(input);
    }
    if (inputs.size() < rows.size()) {
      if (std::ranges::any_of(rows,
                              [&](std::size_t row) { return child_of_row(row).offer.withdrawn; })) {
        if (pinned()) start_again_without(rows);
        check_offers();
        if (up_.call.shared) deal();
        if (!calling()) return false;
        continue;
      }
      // Let ranks above continue with the pieces summed so far, while the rest is on its way.
      if (bytes && !as_a_whole()) announce_sum();
      return false;
    }
    bytes += up_.incoming[up_.decoded.pieces].bytes;
    if (decoder_.checked()) inputs = checked(*decoding, inputs);
    decode(*decoding, inputs);
    const bool all = up_.all_decoded();
    if (decoder_.checked() && all && !accepted()) return !up_.all_decoded();
    if (root() && (decoder_.checked() ? all : up_.decoded.pieces == 1) && !counted()) return false;
    if (root() && all && !audited_alike()) return false;
    up_.waiting_since = wire_.now();
    if (!all && bytes < limits_.announced_bytes) continue;
    // A sum that may have to be formed again is announced only as a whole.
    if (all || !as_a_whole()) announce_sum();
    return calling() && !all;
  }
  announce_sum();
  return false;
}

// Whether this rank's own vectors are part of the sum.
bool Node::adds_own() const {
  if (up_.call.shared || sums_blocks()) return work_.ledger->version(0).blocks > 0;
  return !up_.call.skipped;
}

void Node::decode(const Decoding& decoding, std::span<const std::byte* const> inputs) {
  for (std::size_t row : decoding.rows) telemetry_.used(next_, child_of_row(row).column);
  const Piece piece = up_.incoming[up_.decoded.pieces];
  if (piece.count) {
    const Segment& part = up_.incoming.segments()[piece.segment];
    for (std::size_t u = 0; u < decoder_.slices(); ++u) {
      const std::uint64_t offset = u * part.bytes() + piece.offset;
      combine(part.dtype, up_.sum_at[piece.segment] + offset,
              adds_own() ? up_.call.own[piece.segment] + offset : nullptr, inputs,
              decoding.coefficients[u], piece.count);
    }
  }
  skip_piece();
}

void Node::skip_piece() {
  const Piece piece = up_.incoming[up_.decoded.pieces];
  if (piece.count) up_.decoded.elements[piece.segment] += piece.count;
  for (std::size_t row = 0; row < decoder_.rows(); ++row) {
    child_of_row(row).offer.slots.erase(up_.piece_of_row(row, up_.decoded.pieces));
  }
  ++up_.decoded.pieces;
}

void Node::announce_sum() {
  if (up_.all_decoded() && !up_.complete) sum_complete();
  if (!root()) return offer();
  if (up_.call.shared && !up_.call.lends()) dealt(true);
  if (up_.call.shared) remember_division();
  if (up_.call.shared && work_.hook) work_.hook({next_, up_.call.signature, work_.ledger->division()});
  Entry& entry = *history_.find(next_);
  if (up_.delegated) entry.sections = sections_.version();
  if (up_.call.down) {
    decided(entry, up_.summed(entry.layout, entry.ready));
  } else if (up_.all_decoded()) {
    decided(entry, entry.layout.size());
  }
}

// Offer this rank's message to its parent, as far as it is summed.
void Node::offer() {
  if (!calling() || root()) return;
  const Rank parent = family_.ancestors.front();
  const bool empty = !up_.call.sums();
  std::uint32_t ready = empty ? 0 : up_.summed(up_.outgoing, up_.offered);
  const bool complete = empty || ready == up_.outgoing.size();
  // Send a small message as a whole, or with the parts that are ready.
  bool small = !empty && up_.outgoing.bytes() <= wire_.inline_bytes(parent);
  if (small && !complete) {
    small = false;
    const std::size_t vectors = up_.call.total.size();
    const std::size_t parts = up_.outgoing[ready].segment / vectors;
    ready = up_.outgoing.first(parts * vectors);
  }
  if (!empty && ready == up_.offered) return;
  if (!begin_offer()) return;
  Message message{header(Kind::offer, next_)};
  message.header.fingerprint = up_.call.fingerprint;
  message.header.ready = ready;
  if (up_.approximating) message.header.flags = approximate;
  if (!empty) append_vectors(message, small);
  message.append(up_.call.lacks.data(), up_.call.lacks.size());
  send_offer(message);
}

// Whether to hold back an offer. A parent that has not answered an earlier round's offer gets no second offer.
// No sum may use a message that depends on a state that other ranks may not have.
bool Node::holds_back() const { return upstream_.unanswered() || unsure_of(); }

void Node::offer_what_is_held_back() {
  if (!calling() || !up_.held_back || holds_back()) return;
  up_.call.shared ? tell_share() : offer();
}

// Tell the parent which call this is, unless offers are held back. Returns whether the parent knows.
bool Node::begin_offer() {
  if (up_.offering) return true;
  up_.held_back = holds_back();
  if (!up_.held_back) {
    introduce(upstream_.parent(), upstream_.introduced(), up_.call.fingerprint);
  }
  return !up_.held_back;
}

void Node::send_offer(const Message& message) {
  wire_.send(upstream_.parent(), message);
  up_.offered = message.header.ready;
  upstream_.offered(next_, up_.offering);
  up_.offering = true;
}

// Append this rank's message itself, or its addresses.
void Node::append_vectors(Message& message, bool inline_them) const {
  if (!inline_them) return append_addresses(message, up_.sum_at);
  message.header.flags |= inlined;
  const std::size_t start = message.body.size();
  message.body.resize(start + std::max<std::uint64_t>(up_.outgoing.bytes(), 1));
  for (std::size_t s = 0; s < up_.sum_at.size(); ++s) {
    const std::uint64_t size = up_.call.message[s].bytes();
    std::byte* to = message.body.data() + start + up_.outgoing.start(s);
    if (size) std::memcpy(to, up_.sum_at[s], size);
  }
}

// Find children whose pieces do not come while pieces of other children could be used instead.
void Node::watch_for_stalls() {
  if (up_.call.shared) return watch_members();
  if (up_.delegated) return;  // see `mend_sections`
  if (!calling() || !up_.decoding || up_.all_decoded()) return;
  // Until the deadline, wait for children whose messages cannot be replaced.
  const bool others_only = !up_.overdue;
  if (others_only && awaits_all()) return;
  const double now = wire_.now();
  // A piece may take as long as all pieces before it. The time before the children called says little about pieces.
  const double moving = std::max(limits_.silent_seconds, up_.waiting_since - up_.moving_since.value_or(now));
  const double least = std::max(limits_.stall_seconds, std::min(up_.waiting_since - up_.started, moving));
  if (now - up_.waiting_since < least) return;
  up_.waiting_since = now;
  if (pinned()) {
    // until the deadline, wait for living children
    const bool waits = decoder_.checked() && limits_.compares == Compares::until_deadline && !up_.overdue;
    std::vector<std::size_t> late;
    for (std::size_t row : decoder_.checked() ? up_.brought : up_.decoding->rows) {
      if (waits && !child_of_row(row).dead) continue;
      const auto& slots = child_of_row(row).offer.slots;
      const auto slot = slots.find(up_.piece_of_row(row, up_.decoded.pieces));
      const bool asked = slot != slots.end();
      if (asked ? !slot->second.arrived : !usable(row, up_.decoded.pieces)) late.push_back(row);
    }
    std::vector<std::size_t> others;
    for (std::size_t row : rows_in_order()) {
      if (usable(row, 0) && std::ranges::find(late, row) == late.end()) others.push_back(row);
    }
    if (late.empty()) return;
    const bool known = std::ranges::all_of(late, [&](std::size_t row) { return stalled(child_of_row(row)); });
    // if no other messages suffice, keep waiting
    if ((others_only || known) && !up_.approximating && !decoder_.decode(others, may_offer(0))) return;
    for (std::size_t row : late) stall(child_of_row(row));
    return start_again_without({});
  }
  for (std::size_t row : up_.decoding->rows) {
    Child& child = child_of_row(row);
    const auto slot = child.offer.slots.find(up_.piece_of_row(row, up_.decoded.pieces));
    if (slot != child.offer.slots.end() && !slot->second.arrived) stall(child);
  }
}

}  // namespace jaxcoded
