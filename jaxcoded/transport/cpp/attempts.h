// Steps of which each is tried, also where there was too little memory for one before it.
#pragma once

#include <new>

namespace jaxcoded {

class Attempts {
 public:
  // What the step returns, or false where there is too little memory for it.
  template <class Step>
  bool make(Step step) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      failed_ = true;
      return false;
    }
  }
  // Fails if one has.
  void end() const {
    if (failed_) throw std::bad_alloc();
  }

 private:
  bool failed_ = false;
};

}  // namespace jaxcoded
