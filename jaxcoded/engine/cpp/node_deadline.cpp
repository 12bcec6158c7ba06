// A node that has waited for its children for long enough.
#include "node.h"

#include <algorithm>
#include <cstdio>
#include <limits>

namespace jaxcoded {
namespace {

// A median of fewer rounds says nothing.
constexpr std::size_t fewest_rounds = 5;

}  // namespace

// Seconds from the beginning of a round.
double Node::deadline() const {
  const double share = limits_.deadline_share;
  if (limits_.deadline_seconds > 0) return limits_.deadline_seconds * share;
  const auto such = waits_.find(call_.fingerprint);
  if (such != waits_.end() && such->second.size() >= fewest_rounds) {
    // between what such a round takes as a rule and the root's deadline
    return such->second.median() * (1 + (limits_.deadline_rounds - 1) * share);
  }
  return std::numeric_limits<double>::infinity();
}

// The round has begun when its first message was there, also where this rank is late itself.
double Node::began() const {
  double first = started_;
  for (const Child& child : children_) {
    if (child.round == next_) first = std::min(first, child.seen);
  }
  return first;
}

bool Node::waits_for_children() const {
  return call_.up && !call_.skipped && call_.refusal.empty() && !children_.empty();
}

// The round is over after so many seconds. A deadline is a multiple of what the same call takes as
// a rule: a program may sum a gradient, which waits for who computes it, and then a single number.
void Node::waited(double seconds) {
  if (limits_.deadline_rounds <= 0 || !in_time_ || !waits_for_children()) return;
  if (waits_.size() >= most_words && !waits_.contains(call_.fingerprint)) waits_.clear();
  waits_[call_.fingerprint].add(seconds);
}

double Node::wakes_at() const {
  const bool waits = calling() && waits_for_children() && !overdue_;
  return waits ? began() + deadline() : std::numeric_limits<double>::infinity();
}

// The children that lack have had their time.
void Node::miss_the_deadline() {
  const std::string words = lacking();
  if (words.empty() || limits_.on_deadline == OnDeadline::approximate) return;
  if (!root()) {
    if (told_overdue_) return;
    told_overdue_ = true;
    Message message{header(Kind::complaint, next_)};
    message.header.flags = Flag::overdue;
    message.append(words.data(), words.size());
    wire_.send(family_.ancestors.front(), message);
  } else if (limits_.on_deadline == OnDeadline::raise) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g", deadline());
    decide_error("DeadlineExceeded: round " + std::to_string(next_) + " was not decided within " +
                 seconds + " s: " + words);
  }
}

void Node::on_overdue(Child& child, const Message& message) {
  child.overdue_round = message.header.round;
  child.overdue = message.text();
}

// The best sum that can be formed from what has come. All of it, as far as it is not summed yet,
// is of the same messages: what is said of how good it is holds for every number in it.
std::shared_ptr<const Decoding> Node::approximation(std::uint32_t piece) {
  if (!approximating_) {
    approximating_ = true;
    exact_ = decoded_;
    exact_elements_ = decoded_elements_;
    keep_own();
  }
  std::vector<bool> answered(decoder_.rows());
  for (std::size_t row = 0; row < answered.size(); ++row) {
    answered[row] = usable(row, piece) && !child_of_row(row).stalled;
  }
  return decoder_.approximate(answered);
}

// Whom this rank waits for; empty if it lacks nobody's message.
std::string Node::lacking() const {
  if (!calling() || !call_.up || call_.skipped || children_.empty() || decoding_) return {};
  if (decoded_ == incoming_.size()) return {};
  std::vector<Rank> missing;
  std::string theirs;
  for (std::size_t row = 0; row < decoder_.rows(); ++row) {
    const Child& child = children_[row / decoder_.parts()];
    const bool listed = !missing.empty() && missing.back() == child.rank;
    if (listed || (usable(row, decoded_) && !child.stalled)) continue;
    missing.push_back(child.rank);
    if (child.overdue_round == next_) theirs += "; " + child.overdue;
  }
  if (missing.empty()) return {};
  return "rank " + std::to_string(family_.rank) + " waits for " + listed(missing) +
         (decoder_.parts() > 1 ? " or parts of theirs"
                               : "; it needs " +
                                     (decoder_.checked() ? "all" : std::to_string(decoder_.enough())) +
                                     " of its " + std::to_string(children_.size()) + " children") +
         theirs;
}

std::string Node::waiting_for() const {
  const std::string words = lacking();
  return words.empty() ? words : "round " + std::to_string(next_) + ": " + words;
}

}  // namespace jaxcoded
