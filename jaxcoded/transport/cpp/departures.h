// Which ranks have left the group: this rank, and ranks below it.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "message.h"

namespace jaxcoded {

class Departures {
 public:
  // Record that this rank makes no more calls: because of `failure` or, if `failure` is empty, as planned.
  // Returns false if this rank has already left.
  bool leave(Rank self, const std::string& failure) {
    if (leaving_) return false;
    closed({self});
    if (!failure.empty()) failed(self, failure);
    return leaving_ = true;  // last, as the lines above may run out of memory
  }
  bool leaving() const { return leaving_; }
  // Record that a rank (this rank or a rank below it) left because of a failure. `words` describe the failure.
  void failed(Rank rank, const std::string& words) { failures_.emplace(rank, words); }
  const std::map<Rank, std::string>& failures() const { return failures_; }
  // Describe how a rank has left.
  std::string how(Rank rank) const {
    const auto failure = failures_.find(rank);
    return "rank " + std::to_string(rank) +
           (failure == failures_.end() ? " closed the group" : " failed: " + failure->second);
  }

  // Return the kind of error to raise if these ranks do not make a call. If all of them have failed, no program
  // has made a wrong call. If not, one of these ranks or the caller has made a wrong call.
  std::string kind(const std::vector<Rank>& ranks) const {
    const auto failed = [&](Rank rank) { return failures_.contains(rank); };
    return std::ranges::all_of(ranks, failed) ? "CodedError: " : "GroupMismatch: ";
  }

  // Record that these ranks (this rank or ranks below it) make no more calls.
  void closed(const std::vector<Rank>& ranks) { append(closed_, ranks); }
  const std::vector<Rank>& closed() const { return closed_; }
  // Record that these ranks below were given up, by this rank or by a rank below it.
  void given_up(const std::vector<Rank>& ranks) { append(absent_, ranks); }
  const std::vector<Rank>& absent() const { return absent_; }

  // Record that this rank has told its parent that no more offers will come.
  void retire() { retired_ = true; }
  bool retired() const { return retired_; }
  // Record that this rank has told its parent that neither this rank nor any rank below needs anything.
  void said_bye() { gone_ = true; }
  bool gone() const { return gone_; }
  // Forget what this rank has told its parent about its end, since the parent may have missed it.
  void unheard() { retired_ = gone_ = false; }

 private:
  static void append(std::vector<Rank>& all, const std::vector<Rank>& ranks) {
    for (const Rank rank : ranks) {  // a message may come twice
      if (std::ranges::find(all, rank) == all.end()) all.push_back(rank);
    }
  }

  bool leaving_ = false, retired_ = false, gone_ = false;
  std::map<Rank, std::string> failures_;
  std::vector<Rank> closed_, absent_;
};

}  // namespace jaxcoded
