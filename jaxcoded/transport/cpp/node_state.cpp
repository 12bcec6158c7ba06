// Snapshots of the user's state: kept here, and fetched from above.
#include "node.h"

#include <algorithm>

namespace jaxcoded {

void Node::keep_state(Round round, std::span<const std::byte> state) {
  Buffer copy = pool_.take(state.size());
  if (!state.empty()) std::memcpy(copy.data(), state.data(), state.size());
  withdraw(Object::What::state, ++snapshot_);
  state_ = std::move(copy);
  state_layout_ = Layout({{DType::bytes, state.size()}}, limits_.piece_bytes);
  state_kept_ = round;
}

void Node::tell_state(Rank rank, Listener& listener) {
  listener.wants_state = false;
  // A snapshot is of use while the rounds after it can be had.
  const bool useful = state_kept_ >= frontier_ || history_.find(state_kept_);
  Message message{header(Kind::state, useful ? state_kept_ : 0)};
  const std::uint64_t where[3] = {state_layout_.segments().front().bytes(),
                                  reinterpret_cast<std::uintptr_t>(state_.data()), snapshot_};
  message.append(where, sizeof where);
  wire_.send(rank, message);
}

void Node::ask_state() {
  fetched_state_ = {};
  fetched_state_.wanted = true;
  fetched_state_.wanted_since = wire_.now();
  ask_next_state();
}

// Ask the nearest ancestor that has not been asked.
void Node::ask_next_state() {
  State& state = fetched_state_;
  state.round = 0;
  state.fetched = state.asked = 0;
  state.asked_at = wire_.now();
  for (const Rank rank : family_.ancestors) {
    if (!state.asked_ranks.insert(rank).second) continue;
    return wire_.send(rank, {header(Kind::want_state, 0)});
  }
  state.missing = state.without.size() == family_.ancestors.size();
}

void Node::on_state(Rank from, const Message& message) {
  State& state = fetched_state_;
  if (!state.wanted || state.round) return;
  // One of a round whose result is gone leads back to where this rank is stuck.
  if (message.header.round == 0 || (desynchronized_ && message.header.round <= next_)) {
    state.without.insert(from);
    return ask_next_state();
  }
  const auto where = message.values<std::uint64_t>(0, 3);
  if (where[0] > most_elements) throw Damaged();
  state.from = from;
  state.round = message.header.round;
  state.bytes = where[0];
  state.address = where[1];
  state.number = where[2];
  state.layout = Layout({{DType::bytes, state.bytes}}, limits_.piece_bytes);
  state.buffer = pool_.take(state.bytes);
  state.here.assign(state.layout.size(), false);
}

bool Node::follow_state() {
  State& state = fetched_state_;
  if (!state.wanted || state.complete || state.missing) return false;
  if (wire_.now() - state.asked_at > patience(state.wanted_since)) {
    // Nothing comes: ask somebody else, and in the end all those again that may have one.
    if (state.asked_ranks.size() == family_.ancestors.size()) state.asked_ranks = state.without;
    ask_next_state();
    return false;
  }
  if (!state.round) return false;
  const bool direct = wire_.direct(state.from);
  std::uint64_t bytes = 0;
  while (state.asked < state.layout.size() && bytes < limits_.announced_bytes &&
         (direct || state.asked < state.fetched + pieces_ahead)) {
    const Piece& it = state.layout[state.asked];
    const Wire::Fetch fetch =
        it.bytes == 0 ? Wire::Fetch::done
                      : wire_.fetch(state.from, {Object::What::state, state.number}, state.asked,
                                    state.address + it.offset, state.buffer.data() + it.offset,
                                    it.bytes);
    if (fetch == Wire::Fetch::gone) {  // a newer snapshot has taken its place
      state.asked_ranks.erase(state.from);
      ask_next_state();
      return true;
    }
    ++state.asked;
    bytes += it.bytes;
    if (fetch == Wire::Fetch::done && !state.here[state.asked - 1]) {
      state.here[state.asked - 1] = true;
      ++state.fetched;
    }
    state.asked_at = wire_.now();
  }
  state.complete = state.fetched == state.layout.size();
  return direct && state.asked < state.layout.size();
}

void Node::resume() {
  const Round round = fetched_state_.round;
  fetched_state_ = {};
  desynchronized_ = false;
  alone_ = 0;
  outcome_ = Outcome::done;
  next_ = round;
  if (round != frontier_ && !history_.find(round)) skip_to(round);
}

}  // namespace jaxcoded
