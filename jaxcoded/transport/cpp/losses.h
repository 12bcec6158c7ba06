// Messages that MPI has lost, by its own report, on the links to living ranks.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "message.h"

namespace jaxcoded {

// A node answers a loss with messages over the same link, which may be lost, too. So after an answer, further
// losses on this link wait for a while, until the link has lost nothing for longer.
class Losses {
 public:
  static constexpr double wait = 5;  // in seconds

  // Whether the node may answer a loss on the link to this rank now. If not, the loss waits.
  bool may_answer(Rank rank, double now) {
    const auto link = links_.find(rank);
    if (link == links_.end() || now >= link->second.calm) return true;
    if (!link->second.waits_until) link->second.waits_until = now + wait;
    return false;
  }
  // Record that the node has answered the losses on the link to this rank. For so many seconds, further losses wait.
  void answered(Rank rank, double now, double calm) { links_[rank] = {now + calm, std::nullopt}; }
  // Record that this rank is dead: nothing needs to be answered.
  void dead(Rank rank) { links_.erase(rank); }

  // Whether a loss on the link to this rank waits.
  bool waits(Rank rank) const {
    const auto link = links_.find(rank);
    return link != links_.end() && link->second.waits_until;
  }
  // Return a rank on whose link losses have waited long enough.
  std::optional<Rank> due(double now) const {
    for (const auto& [rank, link] : links_) {
      if (link.waits_until && now >= *link.waits_until) return rank;
    }
    return std::nullopt;
  }
  // Return when `due` will return a rank.
  double due_at() const {
    double out = std::numeric_limits<double>::infinity();
    for (const auto& [rank, link] : links_) out = std::min(out, link.waits_until.value_or(out));
    return out;
  }

 private:
  struct Link {
    double calm = 0;  // from then on, a loss is answered at once
    std::optional<double> waits_until = {};
  };
  std::map<Rank, Link> links_;
};

}  // namespace jaxcoded
