// A node that looks for mistakes: it waits for all of its children, and compares their messages
// before it hands on the sum. And a root that knows how many examples the sum is of.
#include "node.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace jaxcoded {
namespace {

constexpr const char* causes =
    ". What a rank hands in must be a sum over its examples, each weighted by what "
    "group.assignment(batch size) gave this very rank. Likely causes: the gradient of a plain shard "
    "of the batch, or of a mean over the rank's own examples; other weights, or those of another "
    "rank or batch size; parameters or batches that are not the same on all ranks; a loss that is "
    "not a sum over examples, as with batch normalisation; what was summed over the ranks before, as "
    "by coded_value_and_grad; dropout or augmentation that belongs to "
    "the rank and not to the example";

constexpr const char* miscounted =
    ". The values of some rank's weights are not those that group.assignment gave it, and the "
    "gradient is as wrong. Hand them on as they are; a group with debug=True finds out whose they are";

std::string percent(double share) {
  char out[32];
  std::snprintf(out, sizeof out, "%.3g %%", 100 * share);
  return out;
}

}  // namespace

// The rows that take part, once all of their messages are there: those of all children but the
// erased ones and those that have nothing to contribute.
std::optional<std::vector<bool>> Node::all_heard() const {
  const std::size_t parts = decoder_.parts();
  const std::uint32_t all = up_.of_child().size();
  std::vector<bool> out(decoder_.rows());
  for (std::size_t row = 0; row < out.size(); ++row) {
    const Child& child = children_[row / parts];
    if (up_.call.leaves_out(row / parts)) continue;
    if (skips(child)) continue;
    if (!usable(row, up_.decoded.pieces) || child.offer.exact < all) return std::nullopt;
    out[row] = true;
  }
  return out;
}

// Whether no child is waited for that has closed the group.
bool Node::all_may_come() const {
  const std::vector<bool> possible = may_offer(up_.decoded.pieces);
  for (std::size_t row = 0; row < possible.size(); ++row) {
    const std::size_t number = row / decoder_.parts();
    const Child& child = children_[number];
    const bool erased = up_.call.leaves_out(number);
    if (!possible[row] && !skips(child) && !erased) return false;
  }
  return true;
}

std::shared_ptr<const Decoding> Node::choose_checked() {
  if (up_.decoding) return up_.decoding;
  const auto heard = all_heard();
  if (!heard) return nullptr;
  up_.brought.clear();
  for (std::size_t row = 0; row < heard->size(); ++row) {
    if ((*heard)[row]) up_.brought.push_back(row);
  }
  up_.decoding = decoder_.decode(up_.brought, *heard);
  if (!up_.decoding) return nullptr;
  // of all parts the vectors are alike
  const Call& call = up_.call;
  decoder_.parity()->begin(call.fingerprint, *heard,
                           std::span(up_.incoming.segments()).first(call.total.size()), call.apart);
  return up_.decoding;
}

// Look at a piece of the messages that were brought. Those of the decoding.
std::vector<const std::byte*> Node::checked(const Decoding& decoding,
                                            std::span<const std::byte* const> messages) {
  std::vector<const std::byte*> of_rows(decoder_.rows());
  for (std::size_t i = 0; i < up_.brought.size(); ++i) of_rows[up_.brought[i]] = messages[i];
  const Piece& piece = up_.incoming[up_.decoded.pieces];
  if (piece.count) {
    decoder_.parity()->add(piece.segment % up_.call.total.size(), piece.first, of_rows, piece.count);
  }
  std::vector<const std::byte*> out;
  for (const std::size_t row : decoding.rows) out.push_back(of_rows[row]);
  return out;
}

// Whether the examples that were counted are as many as there are. Where they are not a number,
// neither is what is divided by it.
bool Node::counted() {
  const auto [number, allowed] = up_.call.examples;
  const Layout& incoming = up_.incoming;
  if (!number || !incoming[0].count) return true;
  double count = 0;
  widen(incoming.segments().front().dtype, &count, up_.sum_at.front(), 1);
  if (!(std::abs(count - number) > allowed * number)) return true;
  char counts[96];
  std::snprintf(counts, sizeof counts, "%.9g examples were counted, not %.9g", count, number);
  decide_error("InconsistentMessages: round " + std::to_string(next_) + ", " + up_.call.signature +
               ": " + counts + miscounted);
  return false;
}

// Whether the messages fit. If they do not, the round fails on every rank.
bool Node::consistent() {
  const auto wrong = decoder_.parity()->contradiction();
  if (!wrong) return true;
  std::vector<Rank> ranks;
  for (const std::size_t child : wrong->children) ranks.push_back(children_[child].rank);
  const bool one = ranks.size() == 1;
  std::string text = "InconsistentMessages: round " + std::to_string(next_) + ", " +
                     up_.call.signature + ": what " + listed(ranks) + (one ? " has" : " have") +
                     " sent to rank " + std::to_string(family_.rank);
  if (!wrong->finite) {
    fail(text + " has NaN or infinities");
    return false;
  }
  text += one           ? " does not fit with what its other children have sent"
          : wrong->each ? " does not fit together (which of them is wrong, more redundancy would tell)"
                        : " does not fit together (several of them are wrong)";
  text += ": it is off by " + percent(wrong->mismatch) + ", and rounding explains " +
          percent(wrong->allowed) + causes;
  fail(text);
  return false;
}

}  // namespace jaxcoded
