// Steps that are each tried, even if there was too little memory for an earlier one.
#pragma once

#include <new>

namespace jaxcoded {

class Attempts {
 public:
  // Returns what the step returns, or false if there is too little memory for it.
  template <class Step>
  bool make(Step step) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      failed_ = true;
      return false;
    }
  }
  // Fails if a step has.
  void end() const {
    if (failed_) throw std::bad_alloc();
  }

 private:
  bool failed_ = false;
};

}  // namespace jaxcoded
