// How many pieces are on their way at a time.
//
// What is asked for waits behind what was asked for before it, and so does every word of whoever sends it:
// with too much on its way from slow ports, living ranks seem to be dead. So it is less where pieces take
// long, as in congestion control by delay (LEDBAT, RFC 6817).
#pragma once

#include <algorithm>
#include <cstddef>

namespace jaxcoded {

class Window {
 public:
  Window(std::size_t least, std::size_t most)
      : least_(static_cast<double>(least)), most_(static_cast<double>(most)), pieces_(most_) {}

  std::size_t pieces() const { return static_cast<std::size_t>(pieces_); }
  // One has come, so long after it was asked for.
  void arrived(double seconds) {
    pieces_ = std::clamp(seconds > slow ? pieces_ * shrink : pieces_ + grow, least_, most_);
  }

 private:
  static constexpr double slow = 0.15;  // seconds
  static constexpr double shrink = 0.95, grow = 0.25;
  double least_, most_, pieces_;
};

}  // namespace jaxcoded
