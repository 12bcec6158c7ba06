// Where a rank stands, in words for its user; and children that are alive but stuck.
#include "node.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace jaxcoded {
namespace {

std::string seconds_in_words(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::max(seconds, 0.0));
  return text;
}

std::string named(Rank rank) { return "rank " + std::to_string(rank); }

std::string numbered(Round round) { return "round " + std::to_string(round); }

}  // namespace

std::string Node::standing() const {
  const double now = wire_.now();
  std::string out = named(family_.rank);
  if (in_program()) {
    out += calling()  ? " computes for "
           : watches_ ? " is in recovered or extended, before "
                      : " has not called ";
    out += numbered(next_);
    const double since = calling() ? up_.started : ended_at_;
    if (since > 0) out += ", for " + seconds_in_words(now - since);
    if (lag()) out += "; rounds up to " + std::to_string(next_ + lag() - 1) + " are decided";
  } else {
    out += " waits in " + numbered(next_) + ", for " + seconds_in_words(now - up_.started);
    if (const std::string words = lacking(); !words.empty()) {
      out += ": " + words;
    } else if (!root()) {
      out += ": " + named(upstream_.source()) + " has not sent the result";
    }
  }
  if (!root()) {
    out += "; its parent, " + named(upstream_.parent()) + ", was heard of " +
           seconds_in_words(now - parent_heard_) + " ago";
  }
  for (const Child& child : children_) {
    out += "; its child, " + named(child.rank) + ", ";
    if (child.dead) {
      out += "is dead";
    } else if (child.left) {
      out += "has left";
    } else {
      out += "was heard of " + seconds_in_words(now - child.heard) + " ago, and " +
             (child.called() ? "is known to have called " + numbered(child.called())
                             : "is not known to have called anything");
    }
  }
  return out;
}

// Whether the program computes or does something else, while the engine waits for the program.
bool Node::in_program() const {
  return !calling() || (!up_.call.complete && !up_.lent);
}

// Report once what is known of a child that makes no calls while rounds are decided without it. The child's
// engine answers even if its program is stuck, and reports its round. Report also a child that has left while
// this rank makes more calls: usually the child's program was set to make fewer steps.
void Node::watch_children() {
  for (Child& child : children_) {
    Child::Behind& behind = child.behind;
    const Round called = child.called();
    const bool leaves = child.left || child.retired;
    if (called >= newest_) {
      behind = {};
      continue;
    }
    const double now = wire_.now();
    if (!behind.since || called != behind.called) behind = {.called = called, .since = now};
    if (behind.reported) continue;
    const auto known = [&] {
      return (called ? "; the last call that is known is that of " + numbered(called)
                     : "; no call of it is known") +
             ", and rounds up to " + std::to_string(newest_) + " are decided";
    };
    const auto without = [&] {
      return "no call of " + named(child.rank) + " has come for " + seconds_in_words(now - behind.since) +
             known();
    };
    if (leaves) {
      behind.reported = true;
      const auto failure = departures_.failures().find(child.rank);
      const bool failed = failure != departures_.failures().end();
      news_.push_back(named(child.rank) + (failed ? " failed: " + failure->second : " has closed the group") +
                      known() + " without it");
    } else if (child.dead) {
      behind.reported = true;
      news_.push_back(named(child.rank) + " is dead, as MPI reports" + known());
    } else if (now - behind.since < limits_.stuck_seconds) {
      continue;
    } else if (behind.asked == 0) {
      wire_.send(child.rank, {header(Kind::ask, 0)});
      behind.asked = now;
    } else if (behind.answered >= behind.asked) {
      if (behind.in_program && behind.next <= newest_) {
        behind.reported = true;
        news_.push_back(without() + "; its process answers, so its program is busy or stuck at " +
                        numbered(behind.next) + "; a program that is only slow can skip: see group.lag()");
      } else {
        behind = {.called = called, .since = now};
      }
    } else if (now - behind.asked >= limits_.silent_seconds) {
      behind.reported = true;
      news_.push_back(without() + "; its process does not answer: it is stopped, dead or cut off, and was "
                                "heard of " + seconds_in_words(now - child.heard) + " ago");
    }
  }
}

std::vector<std::string> Node::take_news() { return std::exchange(news_, {}); }

}  // namespace jaxcoded
