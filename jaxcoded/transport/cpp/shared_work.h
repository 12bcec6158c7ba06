// What a rank keeps of work that is shared, from round to round.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "ledger.h"
#include "message.h"
#include "share.h"

namespace jaxcoded {

struct SharedWork {
  // Blocks of this rank.
  std::vector<Block> own = {};      // it begins with these,
  std::size_t owned = 0;            // so many, also where it does not begin with them
  std::vector<std::vector<Rank>> holders = {};  // of each block, its owner first
  bool asks_first = false;          // before it begins with its own
  Round computed_round = 0;         // the latest of blocks, and which it has computed
  std::vector<Block> computed = {};

  Round dealt = 0;         // the latest round whose blocks are in vectors that the next round sums,
  bool dealt_all = false;  // and whether they are all

  bool holds(Rank rank, Block block) const {
    return block < holders.size() && std::ranges::find(holders[block], rank) != holders[block].end();
  }

  // At the root.
  std::optional<Ledger> ledger = {};
  std::optional<std::map<Round, Dealt>> replayed = {};  // by whose divisions the work is shared
  std::function<void(const Dealt&)> hook = {};
  std::map<Rank, std::uint32_t> differed = {};  // in so many audits
};

}  // namespace jaxcoded
