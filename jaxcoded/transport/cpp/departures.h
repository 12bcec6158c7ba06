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
  // This rank makes no more calls: after `failure` or, if `failure` is empty, as planned. Returns false if this
  // rank has already left.
  bool leave(Rank self, const std::string& failure) {
    if (std::exchange(leaving_, true)) return false;
    closed({self});
    if (!failure.empty()) failed(self, failure);
    return true;
  }
  bool leaving() const { return leaving_; }
  // A rank left after a failure: this rank, or one below it. `words` describe the failure.
  void failed(Rank rank, const std::string& words) { failures_.emplace(rank, words); }
  const std::map<Rank, std::string>& failures() const { return failures_; }
  // How a rank has left, in words.
  std::string how(Rank rank) const {
    const auto failure = failures_.find(rank);
    return "rank " + std::to_string(rank) +
           (failure == failures_.end() ? " closed the group" : " failed: " + failure->second);
  }

  // The kind of error if these ranks do not make a call. If all of them have failed, no program is mistaken.
  // Otherwise one of them, or the caller, is.
  std::string kind(const std::vector<Rank>& ranks) const {
    const auto failed = [&](Rank rank) { return failures_.contains(rank); };
    return std::ranges::all_of(ranks, failed) ? "CodedError: " : "GroupMismatch: ";
  }

  // These ranks make no more calls: this rank, or ranks below it.
  void closed(const std::vector<Rank>& ranks) { append(closed_, ranks); }
  const std::vector<Rank>& closed() const { return closed_; }
  // These ranks below were given up, by this rank or by one below it.
  void given_up(const std::vector<Rank>& ranks) { append(absent_, ranks); }
  const std::vector<Rank>& absent() const { return absent_; }

  // This rank has told its parent that no more offers will come.
  void retire() { retired_ = true; }
  bool retired() const { return retired_; }
  // This rank has told its parent that neither it nor any rank below needs anything.
  void said_bye() { gone_ = true; }
  bool gone() const { return gone_; }
  // The parent may have missed one of these two messages, so both are sent again.
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
