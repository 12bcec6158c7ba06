// Which ranks have left the group: this rank, and ranks below.
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
  // This rank makes no more calls: after `failure` or, if that is empty, as planned. False if it has said so before.
  bool leave(Rank self, const std::string& failure) {
    if (std::exchange(leaving_, true)) return false;
    closed({self});
    if (!failure.empty()) failed(self, failure);
    return true;
  }
  bool leaving() const { return leaving_; }
  // Ranks that left after a failure, here or below, and the words of the failure.
  void failed(Rank rank, const std::string& words) { failures_.emplace(rank, words); }
  const std::map<Rank, std::string>& failures() const { return failures_; }
  // How a rank has left, in words.
  std::string how(Rank rank) const {
    const auto failure = failures_.find(rank);
    return "rank " + std::to_string(rank) +
           (failure == failures_.end() ? " closed the group" : " failed: " + failure->second);
  }

  // The kind of error if these ranks do not make a call: one of them, or the caller, is mistaken, unless all have
  // failed.
  std::string kind(const std::vector<Rank>& ranks) const {
    const auto failed = [&](Rank rank) { return failures_.contains(rank); };
    return std::ranges::all_of(ranks, failed) ? "CodedError: " : "GroupMismatch: ";
  }

  // Ranks that make no more calls, here or below.
  void closed(const std::vector<Rank>& ranks) { append(closed_, ranks); }
  const std::vector<Rank>& closed() const { return closed_; }
  // Ranks below that were given up, here or below.
  void given_up(const std::vector<Rank>& ranks) { append(absent_, ranks); }
  const std::vector<Rank>& absent() const { return absent_; }

  // The parent has been told that no more offers will come.
  void retire() { retired_ = true; }
  bool retired() const { return retired_; }
  // The parent has been told that no rank needs anything, here or below.
  void said_bye() { gone_ = true; }
  bool gone() const { return gone_; }
  // The parent may not have got the message with one of these: they are told again.
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
