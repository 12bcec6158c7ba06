// Try every step, even if an earlier one had too little memory.
#pragma once

#include <new>

namespace jaxcoded {

class Attempts {
 public:
  // Returns what the step returns, or false if the step had too little memory.
  template <class Step>
  bool make(Step step) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      failed_ = true;
      return false;
    }
  }
  // Throw `std::bad_alloc` if a step had too little memory.
  void end() const {
    if (failed_) throw std::bad_alloc();
  }

 private:
  bool failed_ = false;
};

}  // namespace jaxcoded
