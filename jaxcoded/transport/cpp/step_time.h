// How long a rank works between its rounds.
#pragma once

#include <cstdint>
#include <limits>

namespace jaxcoded {

// The time of something that has not happened.
constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

// How fast a rank is, as far as this rank knows.
struct StepTime {
  std::int64_t rank = 0;
  double work = unknown;  // median seconds from one call to the next, over rounds it took part in
  double silent = 0;      // seconds since its last message, while rounds continued
};

}  // namespace jaxcoded
