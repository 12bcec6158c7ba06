// Schedules: what happens to a group of ranks. A seed determines all of it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "world.h"

namespace jaxcoded {

// What a schedule may do.
enum class Theme : std::uint8_t {
  calm,      // ranks stop, stay away and come back: every call must get its sum
  disorder,  // anything: deaths, lost messages, too little memory, other calls, ranks that leave
};

struct Schedule {
  std::uint64_t seed;
  Theme theme;
  std::size_t most_happenings = std::numeric_limits<std::size_t>::max();
  double damaged = 0, vanishing = 0;  // see `Settings`
};

struct Report {
  std::string finding = {};  // empty: no fault was found
  std::string happened = {};  // what happened, in words and in order
  std::size_t happenings = 0;
  Seen seen = {};
};

Report play(const Group& group, const Schedule& schedule, bool traced = false);

// Play rounds without late ranks, each a sum of `count` float32 numbers. Returns the cost of each rank.
std::vector<Cost> count_costs(const Group& group, std::size_t rounds, std::uint64_t count, bool sections);

}  // namespace jaxcoded
