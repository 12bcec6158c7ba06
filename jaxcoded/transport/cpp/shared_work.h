// What a rank keeps about shared work from round to round.
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
  // This rank's own blocks:
  std::vector<Block> own = {};      // the blocks with which it begins
  std::size_t owned = 0;            // how many blocks it owns, even if it does not begin with them
  std::vector<std::vector<Rank>> holders = {};  // of each block, its owner first
  bool asks_first = false;          // this rank asks before it begins with its own blocks
  Round computed_round = 0;         // the latest round with blocks; then the blocks that this rank computed in it
  std::vector<Block> computed = {};

  Round dealt = 0;         // the latest round whose blocks are in vectors that the next round sums
  bool dealt_all = false;  // whether all blocks of that round are in these vectors

  bool holds(Rank rank, Block block) const {
    return block < holders.size() && std::ranges::find(holders[block], rank) != holders[block].end();
  }

  // At the root.
  std::optional<Ledger> ledger = {};
  std::optional<std::map<Round, Dealt>> replayed = {};  // recorded rounds, whose divisions are used again
  std::function<void(const Dealt&)> hook = {};
  std::map<Rank, std::uint32_t> differed = {};  // in how many audits each rank differed
};

}  // namespace jaxcoded
