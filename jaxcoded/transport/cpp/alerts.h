// What ranks tell the root that is wrong, until a round fails with it.
#pragma once

#include <map>
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

  // What is wrong only if the root leaves the group,
  void if_left(Round round, const std::string& text) { if_left_.emplace(round, text); }
  // which it does.
  std::map<Round, std::string> left() { return std::exchange(if_left_, {}); }

 private:
  Round newest_ = 0;
  std::string pending_;
  std::map<Round, std::string> if_left_;
};

}  // namespace jaxcoded
