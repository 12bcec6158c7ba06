// The group of ranks that a world simulates, and what each rank contributes to a sum.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "decoder.h"
#include "ledger.h"
#include "node.h"

namespace jaxcoded {

// Thrown when a schedule shows a fault of the engine. The text describes the fault.
struct Finding {
  std::string text;
};

inline void check(bool right, const auto&... words) {
  if (right) return;
  std::string text;
  [[maybe_unused]] const auto append = [&text](const auto& word) {
    if constexpr (requires { std::to_string(word); }) {
      text += std::to_string(word);
    } else {
      text += word;
    }
    text += ' ';
  };
  (append(words), ...);
  throw Finding{text};
}

constexpr std::size_t examples = 9;  // examples in the batch from which contributions are made

struct Group {
  // What a rank adds to the sum of a round: `coefficients` × its examples, part by part and slice by slice.
  struct Shares {
    std::vector<std::size_t> held;
    std::vector<double> coefficients;  // examples × parts × slices
    std::size_t parts = 1, slices = 1;
  };
  // How a parent combines its children's messages.
  struct Combination {
    std::size_t slices = 0, parts = 1;   // of each child's message
    std::vector<double> coefficients = {};  // slices × (children · parts)
  };

  std::vector<Rank> parents;  // -1 at the root
  std::vector<int> hosts;
  std::vector<Family> families;
  std::vector<Family> delegating;  // the same families in a group that forms sums in sections
  std::vector<Decoder> decoders;
  std::vector<Decoder> comparing;  // the same decoders in a group whose parents compare messages; empty if they cannot
  std::vector<double> deadline_shares;
  std::vector<Shares> shares;
  std::vector<Combination> combinations;
  std::vector<std::size_t> tolerances;              // how many missing children each parent tolerates
  std::vector<std::vector<std::vector<bool>>> erasures;  // possible choices of the children that each rank leaves out
  double amplification = 1;
  std::uint64_t multiple = 1;               // the lengths of vectors are multiples of this number
  std::vector<std::vector<Rank>> holders;   // of each block of shared work; empty: no work is shared
  std::vector<std::size_t> starts;          // the first example of each block, then the end of the last block
  std::vector<bool> watched;                // whether a parent with all messages finds a mistake of this rank
  std::vector<Group> replanned;             // the same ranks with another plan, if some call replans

  std::size_t size() const { return parents.size(); }
  Rank root() const {
    Rank rank = 0;
    while (parents[static_cast<std::size_t>(rank)] >= 0) ++rank;
    return rank;
  }
};

}  // namespace jaxcoded
