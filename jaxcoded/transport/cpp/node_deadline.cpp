// Deadlines: what a node does once it has waited long enough.
#include "node.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "readable.h"

namespace jaxcoded {
namespace {

// A median of fewer rounds is not used.
constexpr std::size_t fewest_rounds = 5;

}  // namespace

// Return the deadline in seconds from the beginning of a round of this call. `share`: this parent's share of
// the root's deadline.
double Node::deadline(double share, std::uint64_t fingerprint) const {
  if (limits_.deadline_seconds > 0) return limits_.deadline_seconds * share;
  const auto such = waits_.find(fingerprint);
  if (such != waits_.end() && such->second.size() >= fewest_rounds) {
    // between the usual time of this call's rounds and the root's deadline
    return such->second.median() * (1 + (limits_.deadline_rounds - 1) * share);
  }
  return std::numeric_limits<double>::infinity();
}

// Return when the round began: when its first message came, even if this rank itself is late.
double Node::began() const {
  double first = up_.started;
  for (const Child& child : children_) {
    if (child.offer.round == next_) first = std::min(first, child.offer.seen);
  }
  return first;
}

bool Node::waits_for_children() const {
  return up_.call.sums() && !children_.empty();
}

// Record how many seconds the round took, by call: a deadline is a multiple of the usual time of the same call.
// A program may sum a gradient, which takes long to compute, and then a single number.
void Node::waited(double seconds) {
  if (limits_.deadline_rounds <= 0 || !up_.in_time || !up_.call.sums()) return;
  if (waits_.size() >= Signatures::most && !waits_.contains(up_.call.fingerprint)) waits_.clear();
  waits_[up_.call.fingerprint].add(seconds);
}

double Node::wakes_at() const {
  return std::min({overdue_at(), uncalled_at(), shares_at(), sections_at(), losses_.due_at(), stuck_at()});
}

// Return when the call in progress will have waited long enough for the children.
double Node::overdue_at() const {
  const bool waits = calling() && waits_for_children() && !up_.overdue;
  return waits ? began() + deadline(limits_.deadline_share) : std::numeric_limits<double>::infinity();
}

// Return when the ranks below will have waited long enough for the root's program to call their round. The
// root's engine still answers them, so they have no reason to give the root up.
double Node::uncalled_at() const {
  double out = std::numeric_limits<double>::infinity();
  const bool called = calling() && next_ == frontier_;
  if (!root() || called || departures_.leaving() || limits_.on_deadline != OnDeadline::raise) return out;
  // ranks may have waited before the root's program could call this round
  const auto wait = [&](double since, double seconds) { out = std::min(out, std::max(since, ended_at_) + seconds); };
  for (const Child& child : children_) {
    if (child.offer.round != frontier_ || child.dead) continue;
    wait(child.offer.seen, deadline(limits_.deadline_share, child.offer.fingerprint));
  }
  // the programs of all children may be late, too, while ranks below them wait
  for (const auto& [rank, listener] : listeners_) {
    if (listener.called == frontier_ && !listener.gone) wait(listener.called_at, longest_deadline());
  }
  return out;
}

// Return the deadline of a call that is not known.
double Node::longest_deadline() const {
  double out = deadline(limits_.deadline_share, 0);
  for (const auto& [fingerprint, seconds] : waits_) {
    const double such = deadline(limits_.deadline_share, fingerprint);
    if (std::isfinite(such)) out = std::isfinite(out) ? std::max(out, such) : such;
  }
  return out;
}

// Fail the round at `uncalled_at`. The root's program learns of this when it calls, as on any late rank.
void Node::fail_uncalled() {
  const double at = uncalled_at();
  if (at == std::numeric_limits<double>::infinity() || wire_.now() < at) return;
  const auto first = std::ranges::find(children_, frontier_, [](const Child& child) { return child.offer.round; });
  const std::uint64_t fingerprint = first == children_.end() ? 0 : first->offer.fingerprint;
  const double seconds = fingerprint ? deadline(limits_.deadline_share, fingerprint) : longest_deadline();
  const std::string text = !alerts_.pending().empty()
                               ? alerts_.pending()
                               : too_late(frontier_, seconds) + "rank " + std::to_string(family_.rank) +
                                     ", the root, has not called it";
  alerts_.over();
  fail_round(frontier_, fingerprint, text);
}

// Act on a deadline that the missing children, or the root's own program, have missed.
void Node::miss_the_deadline() {
  if (!up_.call.shared && !own_ready(up_.decoded.pieces)) {
    if (root() && limits_.on_deadline == OnDeadline::raise) {
      decide_error(too_late(next_, deadline(limits_.deadline_share)) + "rank " +
                   std::to_string(family_.rank) + ", the root, has not called it to the end");
    }
    return;
  }
  const std::string words = lacking();
  if (words.empty() || approximates()) return;
  if (!root()) {
    if (up_.told_overdue) return;
    up_.told_overdue = true;
    tell_alert(next_, Flag::overdue, words);
  } else if (limits_.on_deadline == OnDeadline::raise) {
    decide_error(too_late(next_, deadline(limits_.deadline_share)) + words);
  }
}

std::string Node::too_late(Round round, double seconds) {
  char number[32];
  std::snprintf(number, sizeof number, "%.3g", seconds);
  return "DeadlineExceeded: round " + std::to_string(round) + " was not decided within " + number +
         " s: ";
}

// --- Children that do not answer ---

// Whether a message of this child is missing, in whole or in part.
bool Node::lacks(std::size_t child) const {
  if (up_.call.leaves_out(child)) return false;
  const std::uint32_t last = up_.incoming.size() - 1;
  for (std::size_t row = child * decoder_.parts(); row < (child + 1) * decoder_.parts(); ++row) {
    if (!usable(row, last)) return true;
  }
  return stalled(children_[child]);
}

// Whether a child is dead or seems frozen: it was asked before this round began, and has been silent since.
bool Node::silent(const Child& child) const {
  if (child.dead) return true;
  return child.asked != 0 && child.asked < began() &&
         wire_.now() - child.asked >= std::min(limits_.silent_seconds, deadline(limits_.deadline_share / 2));
}

// Halfway to the deadline, ask the missing children whether they are there. An engine answers at once, even while
// its program computes, so later rounds need not wait for silent children.
void Node::ask_children() {
  if (!approximates() || up_.all_decoded()) return;
  const double now = wire_.now();
  if (now < began() + deadline(limits_.deadline_share / 2)) return;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    Child& child = children_[i];
    if (child.asked != 0 || child.asked_round == next_ || child.retired || !lacks(i)) continue;
    ask_whether_it_is_there(child);
  }
}

void Node::ask_whether_it_is_there(Child& child) {
  wire_.send(child.rank, {header(Kind::ask, next_)});
  child.asked = wire_.now();
  child.asked_round = next_;
}

// Whether the child offers its whole message, although a rank below it is missing. No better message will come.
bool Node::offers_approximation(const Child& child) const {
  const Offer& offer = child.offer;
  return offer.round == next_ && !offer.withdrawn && offer.fingerprint == up_.call.fingerprint &&
         offer.exact < offer.ready && offer.ready == up_.of_child().size();
}

// Ask the children whose pieces did not come whether they are there, once in a round. Use the children that
// answer again, since the sum will lack other messages anyway.
void Node::hear_the_stalled() {
  for (Child& child : children_) {
    if (!stalled(child) || child.dead) continue;
    if (child.asked_round != next_) {
      ask_whether_it_is_there(child);
    } else if (!child.asked) {
      up_.stalled.erase(child.rank);
    }
  }
}

// Whether no missing child can be expected before the deadline.
bool Node::only_silent_lack() {
  if (!approximates() || up_.all_decoded()) return false;
  if (deals()) return only_silent_hold();
  if (too_few_left(needed(), true)) hear_the_stalled();
  bool some = false, skipped = false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    if (!lacks(i)) continue;
    if (child.retired && !sums_blocks()) continue;  // the sum may not need this child
    const bool best = offers_approximation(child) && !stalled(child);
    if (!best && !silent(child) && !child.retired) {
      if (!skips(child)) return false;
      skipped = true;
    }
    some = true;
  }
  return some && (!skipped || too_few_left(needed(), true));
}

// --- No answer from above ---

// Without the root no round is decided. Each rank that gets no answer from any rank above notices this by
// itself. The rank then tells the ranks below, which may wait even while its own program makes no call.
void Node::watch_above() {
  const double now = wire_.now();
  const bool own = calling() && next_ == frontier_;
  const auto silent = upstream_.forsaken(!root() && (own || awaited_below()), now);
  if (!silent) {
    up_.forsaken = false;
    return;
  }
  // a living rank above may have the result, and needs time to answer
  if (upstream_.all_dead() || (upstream_.rootless() && *silent >= limits_.silent_seconds)) {
    return decide_alone(without_a_root(frontier_));
  }
  const double seconds = deadline(1);
  const double since = own ? up_.started : upstream_.stuck_since();
  up_.forsaken = now - since >= seconds && *silent >= limits_.silent_seconds;
  if (up_.forsaken && limits_.on_deadline != OnDeadline::wait) {
    decide_alone(too_late(frontier_, seconds) + lacking());
  }
}

std::string Node::without_a_root(Round round) const {
  return "CodedError: round " + std::to_string(round) + " cannot be decided: the root, rank " +
         std::to_string(family_.ancestors.back()) +
         (root_ended_ ? ", has left the group, and its program is at its end: let it wait longer for late "
                        "ranks, with group.close(timeout=...)"
                      : ", is dead: go on with group.recovered()");
}

// Fail the round at the frontier at this rank, without the root. If the root decides the round nevertheless,
// other ranks know more than this rank and the ranks below; see `on_result`.
void Node::decide_alone(const std::string& text) {
  failed_alone_.add(frontier_);
  fail_round(frontier_, up_.call.fingerprint, text, true);
}

void Node::on_overdue(Child& child, const Message& message) {
  child.overdue_round = message.header.round;
  child.overdue = readable(message.text());
}

// From this piece on, sum only the messages that have arrived.
void Node::begin_approximating() {
  keep_own();
  up_.exact = up_.decoded;
  up_.approximating = true;
}

// Return the best sum of the messages that have arrived. All pieces that are not summed yet use the same
// messages, so the residual holds for every number in these pieces.
std::shared_ptr<const Decoding> Node::approximation(std::uint32_t piece) {
  if (!up_.approximating) begin_approximating();
  std::vector<bool> answered(decoder_.rows());
  for (std::size_t row = 0; row < answered.size(); ++row) {
    answered[row] = usable(row, piece) && !stalled(child_of_row(row));
  }
  return decoder_.approximate(answered);
}

// Whether the chosen messages can be fetched from ranks that answer.
bool Node::can_be_had() const {
  const auto answer = [&](const std::shared_ptr<const Decoding>& decoding) {
    return decoding &&
           std::ranges::none_of(decoding->rows, [&](std::size_t row) { return stalled(child_of_row(row)); });
  };
  return up_.delegated ? std::ranges::all_of(up_.delegated->decodings, answer) : answer(up_.decoding);
}

// Return which ranks this rank waits for, or why it cannot continue; empty if it can continue.
std::string Node::lacking() const {
  if (up_.forsaken) {
    return me() + " waits for " + listed(family_.ancestors) +
           (family_.ancestors.size() == 1 ? ", which does not answer" : ", which do not answer");
  }
  if (!calling() || !up_.call.up || up_.call.skipped || children_.empty()) return {};
  if (deals()) return lacking_blocks();
  if (up_.all_decoded() || can_be_had()) return {};
  std::vector<Rank> missing, silent;
  std::string overdue;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    if (up_.call.leaves_out(i)) continue;
    if (!lacks(i)) continue;
    if (skips(child)) {
      silent.push_back(child.rank);
    } else {
      missing.push_back(child.rank);
      if (child.overdue_round == next_) overdue += "; " + child.overdue;
    }
  }
  if (missing.empty()) return {};  // this rank waits for its own vectors
  std::string skipped;
  if (!silent.empty()) {
    skipped = "; " + listed(silent) + (silent.size() == 1 ? " has" : " have") + " nothing to contribute";
  }
  return me() + " waits for " + listed(missing) +
         (decoder_.parts() > 1 ? " or parts of theirs"
                               : "; it needs " +
                                     (awaits_all() ? "all" : std::to_string(decoder_.enough())) +
                                     " of its " + std::to_string(children_.size()) + " children") +
         skipped + overdue;
}

std::string Node::waiting_for() const {
  const std::string words = lacking();
  return words.empty() ? words : "round " + std::to_string(frontier_) + ": " + words;
}

std::string Node::waited_for() const {
  std::vector<Rank> ranks;
  for (const Child& child : children_) {
    const bool waits = child.offer.round == next_ && !child.offer.withdrawn && !child.dead;
    if (waits && !calling()) ranks.push_back(child.rank);
  }
  if (ranks.empty()) return {};
  return listed(ranks) + (ranks.size() == 1 ? " is" : " are") + " in round " + std::to_string(next_) +
         ", which rank " + std::to_string(family_.rank) + " has not called";
}

}  // namespace jaxcoded
