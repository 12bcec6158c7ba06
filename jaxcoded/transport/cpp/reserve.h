// Memory put aside, so that a turn that has begun does not stop halfway if there is no other memory.
//
// A turn takes little memory at a time, and can take it from this reserve. Once the reserve is empty, rounds
// fail instead of beginning. Vectors may be larger than the reserve. So code that takes memory for a vector
// changes nothing before it has the memory.
#pragma once

namespace jaxcoded::reserve {

// From now on, `new` takes memory from the reserve if there is no other. Any thread may, while no other thread
// has a turn.
void keep();
// Fill the reserve again. Returns whether it is full.
bool fill() noexcept;

// This thread has a turn. Until the turn ends, no other thread gets memory from the reserve.
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn&) = delete;
};

}  // namespace jaxcoded::reserve
