// The rounds that failed at this rank without the root, and about which the root has sent nothing since. Until
// the root sends news of them, this rank's state may differ from the other ranks' state.
#pragma once

#include "message.h"

namespace jaxcoded {

class FailedAlone {
 public:
  void add(Round round) {
    if (!first_) first_ = round;
    last_ = round;
  }
  Round first() const { return first_; }  // 0: none
  void clear() { first_ = 0; }

  // Record news from the root about a round. unrelated: the round did not fail at this rank alone. confirmed:
  // the round failed at the root, too. contradicted: other ranks may have a result of a round that failed here.
  enum class Heard { unrelated, confirmed, contradicted };
  Heard heard(Round round, bool failed) {
    if (!first_ || round < first_) return Heard::unrelated;
    if (round > first_ || !failed) return Heard::contradicted;
    first_ = first_ < last_ ? first_ + 1 : 0;
    return Heard::confirmed;
  }

 private:
  Round first_ = 0, last_ = 0;
};

}  // namespace jaxcoded
