// How a node compares its children's messages before it passes on their sum, and what it does if they do not
// fit. Also, how the root checks the number of examples in the sum.
#include "node.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "percent.h"

namespace jaxcoded {
namespace {

constexpr const char* causes =
    ". What a rank hands in must be a sum over its examples, each weighted by what "
    "group.epoch or group.batch gave this very rank. Likely causes: the gradient of a plain shard "
    "of the batch, or of a mean over the rank's own examples; other weights, or those of another "
    "rank or batch size; parameters or batches that are not the same on all ranks; a loss that is "
    "not a sum over examples, as with batch normalisation; what was summed over the ranks before, as "
    "by coded_value_and_grad; dropout or augmentation that belongs to "
    "the rank and not to the example";

constexpr const char* miscounted =
    ". Some rank's parameters are not those of the others (tree_bcast hands on one rank's), its data are not "
    "(group.epoch and group.batch take the whole data set on each rank, in the same order), it is at another "
    "batch, as with another seed, or after a call that the others did not make, or its weights are not those that "
    "group.epoch or group.batch gave it. In the backward pass of a sum "
    "its loss may also be another function of the sum, with a constant, a random key or a branch of its own. The "
    "result is of no use";

constexpr const char* without =
    "; the sum does without it. So do later ones, and nothing is said of it, until what is sent fits again";

}  // namespace

// Whether every message that this rank waits for may come: none is from a child that has closed the group.
bool Node::all_may_come() const {
  const std::vector<bool> possible = may_offer(up_.incoming.size() - 1);
  for (std::size_t row = 0; row < possible.size(); ++row) {
    const std::size_t number = row / decoder_.parts();
    const Child& child = children_[number];
    const bool erased = up_.call.leaves_out(number);
    if (!possible[row] && !skips(child) && !erased) return false;
  }
  return true;
}

// Whether to wait for further messages before these are compared.
bool Node::awaits_more(const std::vector<bool>& heard) const {
  if (limits_.compares == Compares::what_has_come) return false;
  if (limits_.compares == Compares::until_deadline && up_.overdue) return false;
  for (std::size_t row = 0; row < heard.size(); ++row) {
    const std::size_t number = row / decoder_.parts();
    const Child& child = children_[number];
    if (heard[row] || up_.call.leaves_out(number) || skips(child) || child.dead) continue;
    if (!awaits_all() && (child.retired || stalled(child))) continue;
    return true;
  }
  return false;
}

// Return the messages to decode from, once all messages to compare were offered as a whole; null before. A
// piece of the sum is passed on only after the comparison, since it cannot be taken back.
std::shared_ptr<const Decoding> Node::choose_checked() {
  if (up_.decoding) {
    const auto gone = [&](std::size_t row) {
      const Offer& offer = child_of_row(row).offer;
      return offer.round != next_ || offer.withdrawn;
    };
    if (std::ranges::none_of(up_.brought, gone)) return up_.decoding;
    start_again_without(up_.brought);
  }
  const std::uint32_t last = up_.incoming.size() - 1;
  for (const bool with_stalled : {false, true}) {
    if (with_stalled && gives_up()) break;
    std::vector<bool> heard(decoder_.rows());
    up_.brought.clear();
    for (std::size_t row = 0; row < heard.size(); ++row) {
      const Child& child = child_of_row(row);
      const bool exact = child.offer.exact > up_.piece_of_row(row, last);
      heard[row] = usable(row, last) && exact && (with_stalled || !stalled(child));
      if (heard[row]) up_.brought.push_back(row);
    }
    if (awaits_more(heard)) return nullptr;
    up_.decoding = decoder_.decode(up_.brought, may_come(last));
    if (!up_.decoding) continue;
    const auto begin = [&](Parity& parity, const std::vector<bool>& rows) {
      const Call& call = up_.call;  // all parts have the same vectors
      parity.begin(rows, std::span(up_.incoming.segments()).first(call.total.size()), call.apart, program_eps_);
    };
    begin(*decoder_.parity(), heard);
    for (auto& [child, others] : up_.without) {
      std::vector<bool> rows = heard;
      const auto first = rows.begin() + static_cast<std::ptrdiff_t>(child * decoder_.parts());
      std::fill_n(first, decoder_.parts(), false);
      begin(others, rows);
    }
    up_.own_finite = true;
    return up_.decoding;
  }
  return nullptr;
}

// Add one piece of the fetched messages to the comparison. Returns the pieces to decode.
std::vector<const std::byte*> Node::checked(const Decoding& decoding,
                                            std::span<const std::byte* const> messages) {
  std::vector<const std::byte*> of_rows(decoder_.rows());
  for (std::size_t i = 0; i < up_.brought.size(); ++i) of_rows[up_.brought[i]] = messages[i];
  const Piece piece = up_.incoming[up_.decoded.pieces];
  if (piece.count) {
    const std::size_t vector = piece.segment % up_.call.total.size();
    decoder_.parity()->add(vector, piece.first, of_rows, piece.count);
    for (auto& without : up_.without) without.others.add(vector, piece.first, of_rows, piece.count);
    const Segment& part = up_.incoming.segments()[piece.segment];
    for (std::size_t u = 0; adds_own() && up_.own_finite && u < decoder_.slices(); ++u) {
      const std::byte* own = up_.call.own[piece.segment] + u * part.bytes() + piece.offset;
      up_.own_finite = finite(part.dtype, own, piece.count);
    }
  }
  std::vector<const std::byte*> out;
  for (const std::size_t row : decoding.rows) out.push_back(of_rows[row]);
  return out;
}

// Whether the sum's count of examples is the stated number. A NaN count is accepted, since whatever is divided
// by it is NaN, too.
bool Node::counted() {
  const auto [number, allowed] = up_.call.examples;
  const Layout& incoming = up_.incoming;
  if (!number || !incoming[0].count) return true;
  double count = 0;
  widen(incoming.segments().front().dtype, &count, up_.sum_at.front(), 1);
  if (!(std::abs(count - number) > allowed * number)) return true;
  char counts[96];
  std::snprintf(counts, sizeof counts, "%.9g examples were counted, not %.9g", count, number);
  decide_error("InconsistentMessages: " + about_round() + counts + miscounted);
  return false;
}

std::string Node::about_round() const {
  return "round " + std::to_string(next_) + ", " + up_.call.signature + ": ";
}

// Return, after the check, whether to pass on the sum; if not, the round fails or the sum is formed again.
bool Node::accepted() {
  Parity& parity = *decoder_.parity();
  const std::vector<std::size_t> not_finite = parity.not_finite();
  if (!not_finite.empty() || !up_.own_finite) return accepted_not_finite(not_finite);
  if (const auto wrong = parity.contradiction()) return accepted(*wrong);
  compared_rounds_ += parity.compares();
  parity.remember();
  if (!up_.without.empty()) {
    news_.push_back(about_round() + "messages that did not fit together did so when rank " +
                    std::to_string(family_.rank) + " fetched them once more");
  }
  return true;
}

bool Node::accepted(const Contradiction& wrong) {
  if (up_.without.empty()) {
    for (const std::size_t child : wrong.children) up_.without.push_back({child, *decoder_.parity()});
    start_again_without({});
    return false;
  }
  std::vector<std::size_t> alone;
  for (auto& [child, others] : up_.without) {
    if (!others.contradiction()) alone.push_back(child);
  }
  const bool one = alone.size() == 1;
  std::vector<Rank> ranks;
  for (const std::size_t child : alone.empty() ? wrong.children : alone) {
    ranks.push_back(children_[child].rank);
  }
  const std::string text =
      about_round() + "what " + listed(ranks) + (ranks.size() == 1 ? " has" : " have") + " sent to rank " +
      std::to_string(family_.rank) +
      (one             ? " does not fit with what the others have sent there"
       : alone.empty() ? " does not fit together (several of them are wrong)"
                       : " does not fit together (which of them is wrong, more redundancy would tell)") +
      ": it is off by " + percent(wrong.mismatch) + ", and rounding explains " + percent(wrong.allowed);
  if (limits_.on_contradiction == OnContradiction::drop && one && can_do_without(alone)) {
    if (decoder_.parity()->newly_wrong(alone)) news_.push_back(text + without);
    leave_out(alone);
    return false;
  }
  ++compared_rounds_;
  if (limits_.on_contradiction == OnContradiction::warn) {
    news_.push_back(text + "; the sum has it in all the same");
    return true;
  }
  fail("InconsistentMessages: " + text + causes);
  return false;
}

// Return what `accepted` returns if these children's messages, or this rank's own vectors, have NaN or
// infinities. No rank passes on NaN or infinities, unless it only warns of them.
bool Node::accepted_not_finite(const std::vector<std::size_t>& children) {
  const bool warns = limits_.on_contradiction == OnContradiction::warn;
  std::vector<Rank> ranks;
  for (const std::size_t number : children) {
    const Child& child = children_[number];
    if (child.not_finite_round != next_) ranks.push_back(child.rank);  // no rank below it has reported them
  }
  const std::string name = me();
  std::string text;
  if (!ranks.empty()) {
    text = "what " + listed(ranks) + (ranks.size() == 1 ? " has" : " have") + " sent to " + name + " has ";
  }
  if (!up_.own_finite) text += (text.empty() ? "what " : "and what ") + name + " adds itself has ";
  text = about_round() + text + "NaN or infinities";
  if (warns) {
    if (!ranks.empty() || !up_.own_finite) tell_not_finite(next_, text);
    return true;
  }
  if (limits_.on_contradiction == OnContradiction::drop) {
    if (children.empty() && !root()) return true;  // this rank's parent leaves this rank out
    if (!children.empty() && can_do_without(children)) {
      if (decoder_.parity()->newly_wrong(children)) news_.push_back(text + without);
      leave_out(children);
      return false;
    }
  }
  fail("InconsistentMessages: " + text);
  return false;
}

// Make the root report NaN or infinities.
void Node::tell_not_finite(Round round, const std::string& text) {
  if (root()) return news_.push_back(text);
  tell_alert(round, Flag::not_finite, text);
}

// Whether this rank has, or may get, the messages that it needs without these children.
bool Node::can_do_without(const std::vector<std::size_t>& children) {
  std::vector<bool> possible = may_come(up_.incoming.size() - 1);
  for (const std::size_t child : children) {
    const auto first = possible.begin() + static_cast<std::ptrdiff_t>(child * decoder_.parts());
    std::fill_n(first, decoder_.parts(), false);
  }
  std::vector<std::size_t> rows;
  for (std::size_t row = 0; row < possible.size(); ++row) {
    if (possible[row]) rows.push_back(row);
  }
  return decoder_.decode(rows, possible) != nullptr;
}

void Node::leave_out(const std::vector<std::size_t>& children) {
  for (const std::size_t child : children) up_.call.leave_out(child, children_.size());
  up_.without.clear();
  start_again_without({});
}

}  // namespace jaxcoded
