// How a node handles snapshots of the user's state: which ranks it tells of its snapshot, and which ranks it
// asks for their snapshots.
#include "node.h"

#include <new>
#include <string>

namespace jaxcoded {

State Node::keep_state(Round round, State state) {
  Layout layout({{DType::bytes, state.bytes()}}, limits_.piece_bytes);  // if memory runs out, nothing has changed
  withdraw(Object::What::state, snapshot_.number() + 1);
  return snapshot_.keep(round, std::move(state), std::move(layout));
}

void Node::tell_state(Rank rank, Listener& listener) {
  // A snapshot is useful while the rounds after it are available, and if other ranks had the same rounds before
  // it.
  const bool alike = !failed_alone_.first() || snapshot_.round() <= failed_alone_.first();
  const bool useful = alike && (snapshot_.round() >= frontier_ || history_.find(snapshot_.round()));
  Message message{header(Kind::state, useful ? snapshot_.round() : 0)};
  snapshot_.describe(message);
  wire_.send(rank, message);
  listener.wants_state = false;
}

void Node::ask_state() {
  recovery_.emplace(family_.ancestors, wire_.now());
  for (const Rank rank : family_.ancestors) {
    if (upstream_.dead(rank)) recovery_->lost(rank);
  }
  ask_next_state();
}

void Node::ask_next_state() {
  if (const auto rank = recovery_->next(wire_.now())) {
    wire_.send(*rank, {header(Kind::want_state, 0)});
  }
}

void Node::on_state(Rank from, const Message& message) {
  if (!recovery_ || recovery_->round()) return;
  // A snapshot from before a round whose result is gone does not help: this rank would be stuck there again.
  // The other ranks keep the results that this rank needs: from the first round on that failed at this rank
  // alone.
  const Round lost = failed_alone_.first() ? failed_alone_.first() - 1 : next_;
  if (message.header.round <= (desynchronized_ ? lost : 0)) {
    recovery_->without(from);
    return ask_next_state();
  }
  try {
    recovery_->begin(from, message, limits_.piece_bytes);
  } catch (const std::bad_alloc&) {  // later messages must not wait until there is memory
    news_.push_back(me() + " has too little memory for the snapshot of rank " +
                    std::to_string(from) + ", " + std::to_string(message.values<std::uint64_t>(0, 1)[0]) +
                    " bytes: free some, and call group.resync again");
    recovery_->without(from);
    ask_next_state();
  }
}

bool Node::follow_state() {
  if (!recovery_ || recovery_->complete() || recovery_->missing()) return false;
  if (recovery_->stuck(wire_.now(), patience(recovery_->since()))) {
    ask_next_state();
    return false;
  }
  if (!recovery_->round()) return false;
  const auto progress = recovery_->fetch(wire_, limits_.announced_bytes, pieces_ahead);
  if (progress == Recovery::Progress::gone) ask_next_state();
  return progress != Recovery::Progress::waits;
}

void Node::resume() {
  const Round round = state_round();
  recovery_.reset();
  desynchronized_ = false;
  alike_ = true;  // only a rank with the root's state has kept a snapshot
  const Round failed = failed_alone_.first();
  if (failed && snapshot_.round() > failed) keep_state(0, {});
  failed_alone_.clear();
  outcome_ = Outcome::done;
  next_ = round;
  if (failed || (round != frontier_ && !history_.find(round))) skip_to(round);
}

}  // namespace jaxcoded
