// Audits: two ranks compute one block of shared work, so that a fault of one of them shows.
//
// Each round audits one block. The auditor is a rank that holds the block's data and is not its owner. It
// computes the block before its own blocks and does not add it. The auditor and the rank that computes the
// block for the sum both report on it. Their reports are in the last vector of the sum, of float32:
//
//     First, for each rank, how many of its blocks had NaN or infinities.
//     Then whether the block was computed for the sum (1). For each of the block's vectors follow an exponent
//     of 2 and two numbers in units of that power: the Euclidean norm, and the sum of the numbers with
//     pseudo-random signs.
//     Last, the same report from the auditor.
//
// Nothing is compared if one of the two ranks is late, so that its report is not in the sum, or if the auditor
// has taken the block over from a late rank.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "node.h"
#include "percent.h"

namespace jaxcoded {
namespace {

constexpr const char* different =
    ". Likely causes: memory or a processor at fault; parameters, data or a loss that are not the same "
    "on all ranks; dropout or augmentation that belongs to the rank and not to the example";

// The last steps of SplitMix64.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

// Return the audited block of the call in progress, if there is one.
std::optional<Block> Node::audited() const {
  if (up_.call.audits.empty() || work_.holders.empty()) return {};
  return static_cast<Block>(mixed(2 * next_) % work_.holders.size());
}

// Return the rank that audits the block.
Rank Node::auditor(Block block) const {
  const std::vector<Rank>& holders = work_.holders[block];
  if (holders.size() < 2) return holders.front();
  return holders[1 + mixed(2 * next_ + 1) % (holders.size() - 1)];
}

// Whether the sum may be used: the two reports on the round's block fit together, or a mismatch is only logged
// (`warn`).
bool Node::audited_alike() {
  const auto block = audited();
  if (!block) return true;
  const std::size_t vectors = up_.call.audits.size(), ranks = children_.size() + 1;
  std::vector<double> reports(ranks + 2 * (1 + 3 * vectors));
  if (up_.incoming.segments().back() != Segment{DType::float32, reports.size()}) {
    decide_error("CodedError: " + about_round() + "what is told of audits is of another shape");
    return false;
  }
  widen(DType::float32, reports.data(), up_.sum_at.back(), reports.size());
  const bool warns = limits_.on_contradiction == OnContradiction::warn;
  const auto wrong = [&](const std::string& text) {
    if (warns) {
      news_.push_back(about_round() + text);
    } else {
      decide_error("InconsistentMessages: " + about_round() + text);
    }
    return warns;
  };
  std::vector<Rank> not_finite;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (reports[rank] != 0) not_finite.push_back(static_cast<Rank>(rank));
  }
  if (!not_finite.empty()) {
    return wrong("what " + listed(not_finite) + (not_finite.size() == 1 ? " has" : " have") +
                 " computed has NaN or infinities");
  }
  std::vector<Rank> both{auditor(*block)};
  const Division division = work_.ledger->division();
  for (std::size_t member = 0; member < division.size(); ++member) {
    if (std::ranges::find(division[member], *block) == division[member].end()) continue;
    both.insert(both.begin(), member ? children_[member - 1].rank : family_.rank);
  }
  if (both.size() < 2 || both[0] == both[1]) return true;
  const double* const first = reports.data() + ranks;
  const double* const second = first + 1 + 3 * vectors;
  if (first[0] != 1 || second[0] != 1) return true;
  ++compared_rounds_;
  const auto number = [](const double* whose, std::size_t v, std::size_t i) {
    const double* const values = whose + 1 + 3 * v;
    return std::ldexp(values[i], static_cast<int>(values[0]));
  };
  // Use the smaller size, so that a wrong size cannot raise the bound.
  const auto size = [&](std::size_t v) { return std::min(number(first, v, 1), number(second, v, 1)); };
  double largest = 0;
  for (std::size_t v = 0; v < vectors; ++v) largest = std::max(largest, size(v));
  double worst = 1, mismatch = 0, explained = 0;
  for (std::size_t v = 0; v < vectors; ++v) {
    const auto [eps, count] = up_.call.audits[v];
    const double allowed = of_programs(eps) * size(v) + of_all * largest +
                           roundings * near_zero(eps) * std::sqrt(count);
    double off = 0;
    for (const std::size_t i : {1, 2}) off = std::max(off, std::abs(number(first, v, i) - number(second, v, i)));
    if (!(off > worst * allowed)) continue;
    worst = allowed > 0 ? off / allowed : std::numeric_limits<double>::infinity();
    const double larger = std::max(number(first, v, 1), number(second, v, 1));
    mismatch = off / larger;
    explained = allowed / larger;
  }
  if (worst <= 1) return true;
  std::string times;
  for (const Rank rank : both) {
    times += times.empty() ? "" : ", ";
    times += "rank " + std::to_string(rank) + ": " + std::to_string(++work_.differed[rank]);
  }
  return wrong("what " + listed(both) + " have computed of block " + std::to_string(*block) +
               " is not the same: it is off by " + percent(mismatch) + ", and rounding explains " +
               percent(explained) + " (how often each was one of two that differ, " + times + ")" + different);
}

}  // namespace jaxcoded
