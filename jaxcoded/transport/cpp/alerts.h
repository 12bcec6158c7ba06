// Faults that ranks report to the root, until a round fails with them.
#pragma once

#include <string>
#include <utility>

#include "message.h"

namespace jaxcoded {

class Alerts {
 public:
  // Add a reported fault. Returns false if a fault of this round or a later one is already known: several ranks
  // notice the same fault.
  bool add(Round round, const std::string& text) {
    if (round <= newest_) return false;
    newest_ = round;
    pending_ = text;
    return true;
  }
  // The text with which the next undecided round fails; empty if nothing is wrong.
  const std::string& pending() const { return pending_; }
  // A round has failed with the pending fault.
  void over() { pending_.clear(); }

  // Add a fault that counts only if the root leaves the group. Ranks report it again in each round. The first
  // report of the latest round is kept: no rank calls a round before the previous one is decided.
  void if_left(Round round, const std::string& text) {
    if (round > if_left_.first) if_left_ = {round, text};
  }
  // The root leaves. Returns the fault that `if_left` has kept, and its round; round 0 if there is none.
  std::pair<Round, std::string> left() { return std::exchange(if_left_, {}); }

 private:
  Round newest_ = 0;
  std::string pending_;
  std::pair<Round, std::string> if_left_ = {};
};

}  // namespace jaxcoded
