// Faults that ranks report to the root. The root keeps the latest fault until a round has failed because of it.
#pragma once

#include <string>
#include <utility>

#include "message.h"

namespace jaxcoded {

class Alerts {
 public:
  // Add a reported fault. Returns false if a fault of this round or of a later round is already known, since
  // several ranks may notice one fault.
  bool add(Round round, const std::string& text) {
    if (round <= newest_) return false;
    pending_ = text;  // set first: if memory runs out here, the fault can be added again
    newest_ = round;
    return true;
  }
  // Return the error text of the next undecided round; empty if no fault is pending.
  const std::string& pending() const { return pending_; }
  // Record that a round has failed because of the pending fault.
  void over() { pending_.clear(); }

  // A fault that matters only if a round stays undecided.
  struct IfStuck {
    Round round = 0;
    std::string text;
    double until = 0;
  };
  // Keep the first such fault of the latest round.
  void if_stuck(IfStuck fault) {
    if (if_stuck_.round != fault.round) if_stuck_ = std::move(fault);
  }
  const IfStuck& if_stuck() const { return if_stuck_; }

  // Add a fault that matters only if the root leaves the group. Ranks may report such faults in each round. The
  // first report of the latest round is kept.
  void if_left(Round round, const std::string& text) {
    if (round > if_left_.first) if_left_ = {round, text};
  }
  // Called when the root leaves. Returns the fault that `if_left` has kept, with its round (0: none).
  std::pair<Round, std::string> left() { return std::exchange(if_left_, {}); }

 private:
  Round newest_ = 0;
  std::string pending_;
  std::pair<Round, std::string> if_left_ = {};
  IfStuck if_stuck_;
};

}  // namespace jaxcoded
