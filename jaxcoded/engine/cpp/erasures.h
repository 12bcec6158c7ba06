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

// What `jaxcoded.Plan.refusal` says, of the whole tree.
class Erasures {
 public:
  // `parents`: each before those below it.
  explicit Erasures(Rank root = 0, std::vector<Parent> parents = {})
      : root_(root), parents_(std::move(parents)) {}

  // Why a round without these ranks must fail, in words; empty if it need not.
  const std::string& refusal(const std::vector<bool>& erased);

 private:
  std::string reason(const std::vector<bool>& erased) const;

  static constexpr std::size_t most_known = 4096;

  Rank root_;
  std::vector<Parent> parents_;
  std::map<std::vector<bool>, std::string> known_;
};

}  // namespace jaxcoded
