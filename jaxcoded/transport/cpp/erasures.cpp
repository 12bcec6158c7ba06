#include "erasures.h"

#include <utility>

namespace jaxcoded {
namespace {

std::vector<Rank> missing_children(const Parent& parent, const std::vector<bool>& missing) {
  std::vector<Rank> out;
  for (const Rank child : parent.children) {
    if (missing[static_cast<std::size_t>(child)]) out.push_back(child);
  }
  return out;
}

std::string listed(const std::vector<Rank>& ranks) {
  std::string out = "[";
  for (const Rank rank : ranks) out += (out.size() > 1 ? ", " : "") + std::to_string(rank);
  return out + "]";
}

}  // namespace

const Erasures::Verdict& Erasures::judge(const std::vector<bool>& erased) {
  const auto entry = known_.find(erased);
  if (entry != known_.end()) return entry->second;
  if (known_.size() >= most_known) known_.clear();
  Verdict verdict{.missing = missing(erased), .why_not = {}};
  verdict.why_not = why_not(erased, verdict.missing);
  return known_[erased] = std::move(verdict);
}

// A parent that lacks too many children has no sum to send, and is missing itself.
std::vector<bool> Erasures::missing(const std::vector<bool>& erased) const {
  std::vector<bool> missing = erased;
  for (auto parent = parents_.rbegin(); parent != parents_.rend(); ++parent) {
    std::vector<bool> answered;
    for (const Rank child : parent->children) {
      answered.insert(answered.end(), parent->decoder.parts(),
                      !missing[static_cast<std::size_t>(child)]);
    }
    const auto rank = static_cast<std::size_t>(parent->rank);
    missing[rank] = missing[rank] || !parent->decoder.code().sufficient(answered);
  }
  return missing;
}

std::string Erasures::why_not(const std::vector<bool>& erased,
                              const std::vector<bool>& missing) const {
  const auto root = static_cast<std::size_t>(root_);
  if (!missing[root]) return {};
  std::string out = "TooManyErasures: rank " + std::to_string(root_);
  if (erased[root]) return out + " is the root, the one rank that cannot be left out";
  std::vector<bool> wanted(erased.size());  // ranks whose missing sum needs an explanation
  wanted[root] = true;
  for (const Parent& parent : parents_) {
    const auto rank = static_cast<std::size_t>(parent.rank);
    if (!wanted[rank] || !missing[rank]) continue;
    for (const Rank child : parent.children) {
      wanted[static_cast<std::size_t>(child)] = !erased[static_cast<std::size_t>(child)];
    }
    const std::string lacks = listed(missing_children(parent, missing));
    out += rank == root ? " cannot rebuild its sum without its children " + lacks
                        : ", nor rank " + std::to_string(rank) + " without " + lacks;
  }
  const Parent& first = parents_.front();
  return out + ": any " + std::to_string(first.decoder.tensor().stragglers) + " of the " +
         std::to_string(first.children.size()) + " children of rank " + std::to_string(root_) +
         " may be left out; make the group with more stragglers";
}

}  // namespace jaxcoded
