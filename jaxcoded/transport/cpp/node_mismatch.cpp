// Calls that do not match: a node turns them into an error in words, the same on every rank.
#include "node.h"

#include <algorithm>
#include <utility>

#include "difference.h"

namespace jaxcoded {

void Node::introduce(Rank to, Signatures::Known& known, std::uint64_t fingerprint) {
  const std::string* words = signatures_.news(fingerprint, known);
  if (!words) return;
  Message message{header(Kind::signature, 0)};
  message.header.fingerprint = fingerprint;
  message.append(words->data(), words->size());
  wire_.send(to, message);
}

std::string Node::clash(Rank one, std::uint64_t fingerprint, Round round, Rank other,
                        std::uint64_t other_fingerprint) const {
  const std::string call = signatures_.of(fingerprint), another = signatures_.of(other_fingerprint);
  const std::string name = "rank " + std::to_string(one), other_name = "rank " + std::to_string(other);
  const std::string at = ": round " + std::to_string(round) + ", ";
  const auto [item, other_item] = difference(call, another);
  return "GroupMismatch: " + std::string(item) + " at " + name + ", " + std::string(other_item) + " at " +
         other_name + ": ranks called different things in the same round, "
         "but all ranks must make the same calls in the same order; " + name + at + shortened(call) +
         "; " + other_name + at + shortened(another);
}

void Node::check_offer(Child& child) {
  Offer& offer = child.offer;
  if (offer.withdrawn || offer.round == 0) return;
  std::uint64_t expected = offer.fingerprint;
  Rank other = family_.rank;
  if (calling() && offer.round == next_) {
    expected = up_.call.fingerprint;
  } else if (const Entry* entry = history_.find(offer.round); entry && !entry->failed) {
    expected = entry->fingerprint;
    if (!root()) other = family_.ancestors.back();
  }
  if (expected != offer.fingerprint) {
    offer.withdrawn = true;
    alert(offer.round, clash(child.rank, offer.fingerprint, offer.round, other, expected));
  } else if (calling() && offer.round == next_ && up_.laid_out() && !offer.fits(up_.of_child())) {
    offer.withdrawn = true;
    garbled(child.rank, "an offer of " + std::to_string(offer.ready) + " pieces");
  } else if (departures_.leaving() && offer.round >= next_ && !calling()) {
    offer.withdrawn = true;
    refuse(offer.round,
           "rank " + std::to_string(child.rank) + " called " + shortened(signatures_.of(offer.fingerprint)));
  }
}

void Node::check_offers() {
  for (Child& child : children_) check_offer(child);
  if (!calling() || !waits_for_children() || up_.all_decoded()) return;  // this rank waits for no child
  if (up_.call.shared) return;  // other ranks compute the blocks of children that have left
  // A child may leave between the parts of its message. What it has offered suffices at most for the first
  // pieces.
  const std::uint32_t last = up_.incoming.size() - 1;
  if (sums_blocks()) {
    if (approximates()) return;  // this rank continues without the children that have left
    for (std::size_t i = 0; i < children_.size(); ++i) {
      const Child& child = children_[i];
      if (up_.call.leaves_out(i) || usable(i, last)) continue;
      if (!child.retired && !child.dead) continue;
      return decide_error("CodedError: rank " + std::to_string(child.rank) +
                          " has left with what it had computed of the batch: repeat the step");
    }
    return;
  }
  // If too many children have left, waiting would never end.
  if (departures_.closed().empty() || (awaits_all() && all_may_come())) return;
  const std::vector<bool> possible = may_offer(last);
  std::vector<std::size_t> rows;
  for (std::size_t row : rows_in_order()) {
    if (possible[row]) rows.push_back(row);
  }
  if (!awaits_all() && decoder_.decode(rows, possible)) return;
  if (!root() && up_.call.erased.empty()) return retire();
  const std::string text = departures_.kind(departures_.closed()) + "rank " +
                           std::to_string(family_.rank) + " called " + up_.call.signature +
                           ", but " + who_left();
  if (root()) {
    decide_error(text);
  } else {  // this rank does not retire: it may offer its message in other rounds
    alert(next_, text);
  }
}

// Return which messages this rank has, or may still get in this round.
std::vector<bool> Node::may_offer(std::uint32_t piece) const {
  std::vector<bool> out(decoder_.rows());
  for (std::size_t row = 0; row < out.size(); ++row) {
    const std::size_t child = row / decoder_.parts();
    const bool erased = up_.call.leaves_out(child);
    out[row] = !erased && (!children_[child].retired || usable(row, piece));
  }
  return out;
}

// Make the root fail this round, or its next one, on every rank.
void Node::alert(Round round, const std::string& text, std::uint8_t flags) {
  if (!root()) return tell_alert(round, flags, text);
  if (flags & if_stuck) return alerts_.if_stuck({undecided(), text, wire_.now() + losses_wait()});
  if (flags & undated) round = std::max(round, undecided());
  if (!alerts_.add(round, text)) return;
  const Entry* entry = history_.find(next_);
  if (entry && entry->complete()) return;  // other ranks may have its result, although this rank's call is not over
  // without the reporting rank, pieces of this round may never come
  if (calling() && (!entry || entry->ready == 0 || round == next_)) decide_error(text);
}

// Send an alert to the parent, without piling up alerts if the parent is stopped.
void Node::tell_alert(Round round, std::uint8_t flags, const std::string& text) {
  Message message{header(Kind::alert, round)};
  message.header.flags = flags;
  message.append(text.data(), text.size());
  upstream_.alert(std::move(message));
  tell_alerts();
}

// Send waiting alerts. If this rank has failed rounds without the root, the root may be in an earlier round,
// which the alert must not fail. A desynchronized rank relays the alerts of ranks below.
void Node::tell_alerts() {
  if (unsure_of() && !desynchronized_) return;
  upstream_.send_alerts([&](const Message& message) { wire_.send(upstream_.parent(), message); });
}

// Return the first round that can still fail, as far as this rank knows. The root drops alerts of earlier rounds.
Round Node::undecided() const { return std::max(next_, decided() + 1); }

void Node::alarm(const std::string& why, std::uint8_t flags) {
  alert(undecided(), "CodedError: rank " + std::to_string(family_.rank) + ": " + why, undated | flags);
}

void Node::lost_message(Rank other) {
  if (!root() && other == upstream_.parent()) departures_.unheard();
  if (is_above(other)) asked_pieces_.clear();  // it may have been the note of a lost request
  if (losses_.may_answer(other, wire_.now())) answer_loss(other, 0);
}

std::string Node::lost_words(Rank other) const {
  return "MPI has lost a message to or from rank " + std::to_string(other) +
         ": look for errors of the network with jaxcoded doctor";
}

void Node::answer_losses() {
  while (const auto other = losses_.due(wire_.now())) answer_loss(*other, if_stuck);
}

// The lost message may have been an offer, without which a round may never be decided. Or it may have been a question
// or an answer.
void Node::answer_loss(Rank other, std::uint8_t alarm_flags) {
  const Child* child = child_of(other);
  const bool has_left = departures_.leaving() && may_leave();
  if (!has_left && !(child && child->left)) {
    alarm(lost_words(other), alarm_flags);
    upstream_.lost_message(other);
    // the other rank asks again when it learns that this rank is there
    if (listeners_.contains(other)) note(other, newest_, Flag::lost);
  }
  losses_.answered(other, wire_.now(), calm_waits * losses_wait());
}

// If MPI loses messages on one link again and again, a code usually decides a round without them in this time.
double Node::losses_wait() const { return std::max(Losses::wait, 2 * durations_.median()); }

// Return when the root's call will have waited long enough for messages that MPI may have lost.
double Node::stuck_at() const {
  const Alerts::IfStuck& fault = alerts_.if_stuck();
  if (!calling() || fault.round != undecided() || fault.round != next_) return std::numeric_limits<double>::infinity();
  return std::max(fault.until, up_.started + losses_wait());
}

void Node::fail_stuck() {
  if (wire_.now() < stuck_at()) return;
  alert(undecided(), alerts_.if_stuck().text);
  alerts_.if_stuck({});
}

void Node::decide_error(std::string text) {
  alerts_.over();
  fail_round(next_, up_.call.fingerprint, std::move(text));
}

void Node::fail_round(Round round, std::uint64_t fingerprint, std::string text, bool alone) {
  const bool begun = !history_.empty() && history_.last() == round;
  Entry& entry = begun ? fail_newest(fingerprint, text, alone)
                       : history_.add({.round = round,
                                       .fingerprint = fingerprint,
                                       .failed = true,
                                       .error = std::move(text),
                                       .alone = alone});
  decided(entry, entry.layout.size());
}

}  // namespace jaxcoded
