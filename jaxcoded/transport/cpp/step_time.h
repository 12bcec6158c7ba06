// How long a rank works between its rounds.
#pragma once

#include <cstdint>
#include <limits>

namespace jaxcoded {

// The time of an event that has not happened.
constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

// What this rank knows about the speed of a rank.
struct StepTime {
  std::int64_t rank = 0;
  double work = unknown;  // median seconds from the end of a call to the next call, over rounds it took part in
  double silent = 0;      // seconds since its last message, while rounds continued
};

}  // namespace jaxcoded
