// A rank below: which results it wants, and what it has been told.
#pragma once

#include <cstdint>

#include "message.h"
#include "signatures.h"

namespace jaxcoded {

struct Listener {
  Round first = 1, last = 0;  // the results that it wants and does not know of
  std::uint32_t told = 0;     // pieces of `first` that it knows of
  Round called = 0;           // a round that it waits for in a call
  bool wants_state = false;
  Signatures::Known introduced = {};

  void want(Round from, Round to) {
    first = from;
    last = to;
    told = 0;
  }
  void want_nothing() { last = 0; }
  // The result of a round has become another one.
  void changed(Round round) {
    if (first == round) told = 0;
  }
  // It knows all of `first`.
  void next() {
    ++first;
    told = 0;
  }

  // It has sent something.
  void heard() { noted_ = false; }
  // Whether to tell it that this round is decided, although it has not asked. It hears this once for each round,
  // and about no other round until it has sent something.
  bool note(Round newest) {
    if (noted_ || last >= newest || noted_round_ >= newest) return false;
    noted_ = true;
    noted_round_ = newest;
    return true;
  }

 private:
  bool noted_ = false;
  Round noted_round_ = 0;
};

}  // namespace jaxcoded
