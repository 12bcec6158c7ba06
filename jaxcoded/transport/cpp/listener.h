// A rank below: which results it wants, and what this rank has told it.
#pragma once

#include <cstdint>

#include "message.h"
#include "signatures.h"

namespace jaxcoded {

struct Listener {
  Round first = 1, last = 0;  // the results that the rank wants and does not know of yet
  std::uint32_t known_pieces = 0;  // pieces of the result of `first` that the rank knows of
  Round called = 0;                // the round that the rank, or a rank below it, waits for in a call
  double called_at = 0;            // when this rank heard so
  bool gone = false;               // the rank has left, or is dead: it waits for nothing
  bool wants_state = false;
  Signatures::Known introduced = {};

  void want(Round from, Round to) {
    first = from;
    last = to;
    known_pieces = 0;
  }
  void want_nothing() { last = 0; }
  // Record that the result of a round has changed: the rank knows no piece of the new result.
  void changed(Round round) {
    if (first == round) known_pieces = 0;
  }
  // Record that the rank knows all of the result of `first`.
  void next() {
    ++first;
    known_pieces = 0;
  }

  // Record that the rank has sent something.
  void heard() { noted_ = false; }
  // Whether to tell the rank that this round is decided, although the rank has not asked. The rank is told once
  // about a round, and about no later round until it has sent something.
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
