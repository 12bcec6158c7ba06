// The rounds that failed here without the root, and of which it has said nothing since. Until it has, this rank may have
// another state than the others.
#pragma once

#include "message.h"

namespace jaxcoded {

class FailedAlone {
 public:
  void add(Round round) {
    if (!first_) first_ = round;
    last_ = round;
  }
  Round first() const { return first_; }  // 0: there is none
  void clear() { first_ = 0; }

  // The root says something of a round: it is not among them, failed there too, or has a result
  // that others may have got.
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
