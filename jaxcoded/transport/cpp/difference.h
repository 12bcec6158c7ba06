// Where two calls differ, in words. `agreement.py` does the same for ranks without an engine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "readable.h"

namespace jaxcoded {

// Split a call into its name and the texts between the commas that are outside brackets.
inline std::vector<std::string_view> items(std::string_view call) {
  std::vector<std::string_view> out;
  std::size_t start = 0;
  bool named = false;
  int depth = 0;
  for (std::size_t i = 0; i < call.size(); ++i) {
    if (std::string_view("[({").find(call[i]) != std::string_view::npos) ++depth;
    if (std::string_view("])}").find(call[i]) != std::string_view::npos) --depth;
    const bool name = !named && call.substr(i).starts_with(" of ");
    if (depth || !(name || call.substr(i).starts_with(", "))) continue;
    out.push_back(call.substr(start, i - start));
    start = i + (name ? 4 : 2);
    named |= name;
  }
  out.push_back(call.substr(start));
  return out;
}

// Return the first item in which two calls differ, from each call; "nothing" for a call that lacks the item.
inline std::pair<std::string_view, std::string_view> difference(std::string_view one,
                                                                std::string_view other) {
  const auto a = items(one), b = items(other);
  const auto first = static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  std::size_t last = 0;  // number of items at the end that are equal
  while (first + last < std::min(a.size(), b.size()) && a.rbegin()[last] == b.rbegin()[last]) ++last;
  const auto left = [&](const auto& of) {
    return first + last < of.size() ? of[first] : std::string_view("nothing");
  };
  return {left(a), left(b)};
}

// Cut the middle out of a long call: the two ends show which call it is.
inline std::string shortened(std::string_view call) {
  constexpr std::size_t first = 120, last = 60;
  if (call.size() <= first + last) return std::string(call);
  return readable(call.substr(0, first)) + " ... " + readable(call.substr(call.size() - last));
}

}  // namespace jaxcoded
