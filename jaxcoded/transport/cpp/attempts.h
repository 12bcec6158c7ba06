// Runs every step, even if an earlier step has run out of memory.
#pragma once

#include <new>

namespace jaxcoded {

class Attempts {
 public:
  // Run a step. Returns the step's result, or false if the step runs out of memory.
  template <class Step>
  bool make(Step step) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      failed_ = true;
      return false;
    }
  }
  // Throw `std::bad_alloc` if a step has run out of memory.
  void end() const {
    if (failed_) throw std::bad_alloc();
  }

 private:
  bool failed_ = false;
};

}  // namespace jaxcoded
