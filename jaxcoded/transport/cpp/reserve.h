// Memory put aside, so that a turn (one step of the engine's work) does not stop halfway for lack of memory.
//
// A turn takes little memory at a time, and can take it from this reserve. While the reserve is empty, rounds
// that begin fail. Vectors may be larger than the reserve. So code that takes memory for a vector changes
// nothing before it has the memory.
#pragma once

namespace jaxcoded::reserve {

// From now on, `new` takes memory from the reserve if there is no other. Any thread can take memory from the
// reserve while no other thread has a turn.
void keep();
// Fill the reserve again. Returns whether it is full.
bool fill() noexcept;

// A turn of this thread. Until it is destroyed, no other thread gets memory from the reserve.
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn&) = delete;
};

}  // namespace jaxcoded::reserve
