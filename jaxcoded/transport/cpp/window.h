// Determines how many pieces may be on their way at a time.
//
// The answer to a request waits behind earlier answers, and so does every other message of the rank that
// answers. With too many pieces on their way, a living rank with a slow port would seem dead. So fewer pieces
// are requested if they take long, as in congestion control by delay (LEDBAT, RFC 6817).
#pragma once

#include <algorithm>
#include <cstddef>

namespace jaxcoded {

class Window {
 public:
  Window(std::size_t least, std::size_t most)
      : least_(static_cast<double>(least)), most_(static_cast<double>(most)), pieces_(most_) {}

  std::size_t pieces() const { return static_cast<std::size_t>(pieces_); }
  // Record that a piece has come, this many seconds after it was requested.
  void arrived(double seconds) {
    pieces_ = std::clamp(seconds > slow ? pieces_ * shrink : pieces_ + grow, least_, most_);
  }

 private:
  static constexpr double slow = 0.15;  // seconds
  static constexpr double shrink = 0.95, grow = 0.25;
  double least_, most_, pieces_;
};

}  // namespace jaxcoded
