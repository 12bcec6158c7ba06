// How long a rank works between its rounds.
#pragma once

#include <cstdint>
#include <limits>

namespace jaxcoded {

// A time at which something happened that has not.
constexpr double never = std::numeric_limits<double>::quiet_NaN();

// How fast a rank is, as far as is known here.
struct StepTime {
  std::int64_t rank = 0;
  double work = never;  // median seconds from one call to the next, of rounds it took part in
  double silent = 0;    // seconds for which it has not been heard of while rounds went on
};

}  // namespace jaxcoded
