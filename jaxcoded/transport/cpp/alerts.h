// What ranks tell the root that is wrong, until a round fails with it.
#pragma once

#include <string>
#include <utility>

#include "message.h"

namespace jaxcoded {

class Alerts {
 public:
  // False if as much was said of this round, or a later one, before: several ranks notice the same.
  bool add(Round round, const std::string& text) {
    if (round <= newest_) return false;
    newest_ = round;
    pending_ = text;
    return true;
  }
  // What the next undecided round fails with; empty if nothing is wrong.
  const std::string& pending() const { return pending_; }
  // A round has failed.
  void over() { pending_.clear(); }

  // What is wrong only if the root leaves the group. Ranks say it again in each round: the first word of the latest
  // round is kept, as nobody calls a round before the one before it is decided.
  void if_left(Round round, const std::string& text) {
    if (round > if_left_.first) if_left_ = {round, text};
  }
  // The root leaves: this is wrong, and in no round, 0, if nothing is.
  std::pair<Round, std::string> left() { return std::exchange(if_left_, {}); }

 private:
  Round newest_ = 0;
  std::string pending_;
  std::pair<Round, std::string> if_left_ = {};
};

}  // namespace jaxcoded
