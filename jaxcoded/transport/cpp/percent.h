// A fraction as a percentage, in words.
#pragma once

#include <cstdio>
#include <string>

namespace jaxcoded {

inline std::string percent(double share) {
  char out[32];
  std::snprintf(out, sizeof out, "%.3g %%", 100 * share);
  return out;
}

}  // namespace jaxcoded
