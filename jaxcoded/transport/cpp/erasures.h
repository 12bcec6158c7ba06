// Which ranks a round can do without.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "decoder.h"
#include "message.h"

namespace jaxcoded {

// A parent, its children in the order of its code's rows, and that code.
struct Parent {
  Rank rank = 0;
  std::vector<Rank> children = {};
  Decoder decoder = Decoder();
};

// Computes what `jaxcoded.Plan.missing` and `Plan.why_not` return, for the whole tree.
class Erasures {
 public:
  // `parents`: each parent before the parents below it.
  explicit Erasures(Rank root = 0, std::vector<Parent> parents = {})
      : root_(root), parents_(std::move(parents)) {}

  // The outcome of a round without some ranks.
  struct Verdict {
    std::vector<bool> missing;  // the erased ranks, and parents that lack too many children
    std::string why_not;        // why the round must fail, in words; empty if it need not
  };
  const Verdict& judge(const std::vector<bool>& erased);

 private:
  std::vector<bool> missing(const std::vector<bool>& erased) const;
  std::string why_not(const std::vector<bool>& erased, const std::vector<bool>& missing) const;

  static constexpr std::size_t most_known = 4096;

  Rank root_;
  std::vector<Parent> parents_;
  std::map<std::vector<bool>, Verdict> known_;
};

}  // namespace jaxcoded
