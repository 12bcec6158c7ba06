// Memory put aside, so that a turn that has begun does not stop halfway if there is no other memory.
//
// A turn takes little memory at a time, and gets it from here. Once nothing is left here, rounds fail instead of
// being begun. Vectors may be larger than this: code that takes memory for one changes nothing before it has it.
#pragma once

namespace jaxcoded::reserve {

// From now on `new` of this process falls back on it, on any thread while no other thread has a turn.
void keep();
// Put aside again as much as was used. Returns whether all of it is there.
bool fill() noexcept;

// This thread has a turn: meanwhile the memory put aside is for it alone.
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn&) = delete;
};

}  // namespace jaxcoded::reserve
