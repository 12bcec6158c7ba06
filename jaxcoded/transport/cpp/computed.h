// How many blocks a rank has computed in a round with shared work.
#pragma once

#include <cstdint>

namespace jaxcoded {

struct Computed {
  std::uint32_t own = 0;      // in the sum: of its own,
  std::uint32_t others = 0;   // and of others
  std::uint32_t unused = 0;   // begun but not in the sum, as far as the root knows
};

}  // namespace jaxcoded
