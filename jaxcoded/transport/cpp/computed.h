// How many blocks a rank has computed in a round with shared work.
#pragma once

#include <cstdint>

namespace jaxcoded {

struct Computed {
  std::uint32_t own = 0;      // the rank's own blocks that are in the sum
  std::uint32_t others = 0;   // blocks of other ranks that it computed and that are in the sum
  std::uint32_t unused = 0;   // blocks that it began and that are not in the sum, as far as the root knows
};

}  // namespace jaxcoded
