// A node at the end of its group: this rank leaves, or a rank below has left.
#include "node.h"

#include <algorithm>
#include <charconv>
#include <ranges>
#include <utility>

#include "readable.h"

namespace jaxcoded {

void Node::leave(const std::string& failure) {
  if (!departures_.leave(family_.rank, failure)) return;
  leave_call();
  // other ranks must not wait for a section that this rank no longer forms
  if (copied_.round) tell_unformed(copied_.round, copied_.index, copied_.version, copied_.members);
  if (!may_leave()) retire();
  for (Child& child : children_) check_offer(child);
  if (const auto [round, text] = alerts_.left(); round) refuse(round, text);
  if (root()) {
    for (const auto& [rank, listener] : listeners_) refuse_called(rank, listener);
  }
  say_bye();
}

void Node::on_bye(Child& child, const Message& message) {
  const std::uint8_t flags = message.header.flags;
  if (flags & ended) child.offer.withdraw();
  if (child.left) return;
  const auto ranks = message.values<Rank>(0, message.header.ready);
  const auto known = [&](Rank rank) { return std::ranges::count(family_.descendants, rank) > 0; };
  if (!std::ranges::all_of(ranks, known)) throw Damaged();
  learn_failures(message.text().substr(ranks.size() * sizeof(Rank)));
  if (flags & relays) {
    departures_.closed(ranks);
  } else {
    departures_.given_up(ranks);
    for (const Rank rank : ranks) listeners_[rank].gone = true;
    if (!child.retired) departures_.closed({child.rank});
    child.left = true;
    listeners_[child.rank].want_nothing();
    listeners_[child.rank].gone = true;
  }
  child.reported_round = std::max(child.called(), message.header.last);
  child.retired = true;
  say_bye();
}

// `last`: the latest round that this rank has called. The parent may not know of calls whose results already
// existed.
Message Node::bye(Round round) const {
  Message message{header(Kind::bye, round)};
  message.header.last = calling() ? next_ : next_ - 1;
  return message;
}

// Tell the parent that no more offers will come, and which ranks have closed the group.
void Node::retire() {
  if (root() || departures_.retired()) return;
  Message message = bye(0);
  message.header.flags = relays;
  append_departed(message, departures_.closed());
  wire_.send(family_.ancestors.front(), message);
  departures_.retire();
}

std::vector<std::pair<Rank, std::string>> Node::departed() const {
  std::vector<std::pair<Rank, std::string>> out;
  const auto& failures = departures_.failures();
  for (const Rank rank : departures_.closed()) {
    if (rank == family_.rank) continue;
    const auto failure = failures.find(rank);
    out.emplace_back(rank, failure == failures.end() ? "" : failure->second);
  }
  return out;
}

// Append these ranks, and a line of text for each rank that failed.
void Node::append_departed(Message& message, const std::vector<Rank>& ranks) const {
  message.header.ready = static_cast<std::uint32_t>(ranks.size());
  message.append(ranks.data(), ranks.size() * sizeof(Rank));
  for (const auto& [rank, words] : departures_.failures()) {
    const std::string line = std::to_string(rank) + ' ' + words.substr(0, words.find('\n')) + '\n';
    message.append(line.data(), line.size());
  }
}

void Node::learn_failures(std::string_view lines) {
  while (!lines.empty()) {
    const std::size_t space = lines.find(' '), end = lines.find('\n');
    Rank rank = 0;
    const char* const digits_end = lines.data() + std::min(space, lines.size());
    const auto [after, error] = std::from_chars(lines.data(), digits_end, rank);
    const bool known = std::ranges::find(family_.descendants, rank) != family_.descendants.end();
    if (space > end || end == lines.npos || error != std::errc() || after != digits_end || !known) throw Damaged();
    departures_.failed(rank, readable(lines.substr(space + 1, end - space - 1)));
    lines.remove_prefix(end + 1);
  }
}

// A dead child needs nothing, but ranks below it may.
bool Node::needs_nothing(const Child& child) const {
  if (child.left || !child.dead) return child.left;
  return std::ranges::find(family_.leaves, child.rank) != family_.leaves.end();
}

void Node::give_up(Child& child) {
  departures_.given_up({child.rank});
  child.left = true;
}

bool Node::all_left() const { return std::ranges::all_of(children_, &Child::left); }

// Whether this rank may leave. If its latest started round is not over, it first waits for that round's result.
bool Node::may_leave() const {
  const bool waits = !root() && calling() && up_.call.complete;
  return !waits && all_left();
}

void Node::say_bye(bool at_once) {
  if (!departures_.leaving() || departures_.gone()) return;
  for (Child& child : children_) {
    if (!child.left && needs_nothing(child)) give_up(child);
  }
  if (at_once ? !all_left() : !may_leave()) return;
  if (!root()) {
    Message message = bye(0);
    append_departed(message, absent());
    wire_.send(family_.ancestors.front(), message);
  }
  departures_.said_bye();
}

// Called in each turn, as an earlier turn may have run out of memory.
void Node::go_on_leaving() {
  if (!departures_.leaving() || left()) return;
  if (!root() && losses_.waits(upstream_.parent())) return;  // MPI would lose the next bye, too
  if (!may_leave()) retire();
  say_bye();
}

void Node::give_up() {
  for (Child& child : children_) {
    if (!child.left) give_up(child);
  }
  say_bye(true);
}

std::vector<Rank> Node::end() {
  leave();
  say_bye(true);
  std::vector<Rank> out = absent();
  for (const Child& child : children_) {
    if (!child.left) out.push_back(child.rank);
  }
  if (root()) end_round();
  if (root() || !calling() || !up_.offering) return out;
  Message message = bye(next_);
  // Ranks below may still be ending their rounds with results from ranks above, which must wait for them.
  message.header.flags = left() ? ended : ended | relays;
  wire_.send(family_.ancestors.front(), message);
  return out;
}

// Fail the round in which the root leaves.
void Node::end_round() {
  if (!calling() || is_over(next_)) return;
  decide_error(departures_.kind({family_.rank}) + departures_.how(family_.rank) + " before round " +
               std::to_string(next_) + " was over");
}

// --- Calls after the end ---

// Return in words which ranks send nothing any more, and the errors of the ranks that failed.
std::string Node::who_left() const {
  std::vector<Rank> others = departures_.closed();
  std::erase_if(others, [&](Rank rank) { return departures_.failures().contains(rank); });
  std::string out = others.empty() ? "" : listed(others) + " closed the group";
  for (const Rank rank : departures_.failures() | std::views::keys) {
    out += (out.empty() ? "" : ", and ") + departures_.how(rank);
  }
  return out;
}

// Refuse a call that can never be answered if the root has left the group. Only the root knows whether it has
// left, and why.
void Node::refuse(Round round, const std::string& text) {
  if (!root()) {
    // If the parent is silent, a rank that waits asks ranks further up. So the root learns of the call.
    return tell_alert(round, closed, text);
  }
  if (!departures_.leaving()) {  // the root has not left yet
    alerts_.if_left(round, text);
  } else if (round >= frontier_ && !calling()) {
    next_ = frontier_;  // the rounds that the root's program never called have failed
    up_.call = {};
    outcome_ = Outcome::pending;
    decide_error(departures_.kind({family_.rank}) + text + ", but " +
                 departures_.how(family_.rank));
  }
}

// Refuse the call of a rank that asks for its result, since the root has left.
void Node::refuse_called(Rank rank, const Listener& listener) {
  if (listener.called < next_) return;
  refuse(listener.called, "rank " + std::to_string(rank) + " or one below it called round " +
                              std::to_string(listener.called));
}

}  // namespace jaxcoded
