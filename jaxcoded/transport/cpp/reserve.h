// Memory put aside, so that a turn that has begun does not end half done where there is no other.
//
// What a turn takes piece by piece is small: it gets it from here, and once there is nothing aside any more, rounds fail
// instead of being begun. Vectors may be larger than this; whoever takes memory for one changes nothing before it is there.
#pragma once

namespace jaxcoded::reserve {

// From now on `new` of this process falls back on it, on any thread while no other one has a turn.
void keep();
// Put as much aside again as was used. Whether that is there.
bool fill() noexcept;

// This thread has a turn: meanwhile what is aside is for it alone.
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn&) = delete;
};

}  // namespace jaxcoded::reserve
