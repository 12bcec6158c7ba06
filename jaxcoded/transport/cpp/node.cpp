#include "node.h"

#include <algorithm>
#include <new>
#include <utility>

#include "attempts.h"
#include "readable.h"

namespace jaxcoded {
namespace {

// A stopped rank must be noticed even after a long wait, and after long rounds.
constexpr double longest_patience = 10;

}  // namespace

Node::Node(Family family, Decoder decoder, Limits limits, Wire& wire)
    : family_(std::move(family)),
      decoder_(std::move(decoder)),
      limits_(limits),
      wire_(wire),
      pool_(0, wire.memory()),
      telemetry_(limits.telemetry_rounds, family_.children.size()),
      columns_(family_.children),
      parent_heard_(wire.now()),
      upstream_(family_.ancestors) {
  for (Rank child : family_.children) {
    children_.push_back({.rank = child, .column = children_.size(), .heard = wire.now()});
    step_times_[child].rank = child;
  }
  for (Rank below : family_.descendants) listeners_[below];
}

Node::Child* Node::child_of(Rank rank) {
  for (Child& child : children_) {
    if (child.rank == rank) return &child;
  }
  return nullptr;
}

Header Node::header(Kind kind, Round round) const {
  return {.kind = kind, .round = round, .last = newest_, .done = done()};
}

// Return the first round whose result this rank or a rank below lacks, or about which this rank needs news from
// the root. A rank that has left needs no result once its parent knows that it has left.
Round Node::done() const {
  const Round unsure = unsure_of();
  return lacked_below(departures_.retired() && has_left() ? frontier_ : unsure ? std::min(unsure, next_) : next_);
}

// Return the first round whose result a child lacks, if it is before `round`; otherwise `round`.
Round Node::lacked_below(Round round) const {
  for (const Child& child : children_) {
    if (!needs_nothing(child)) round = std::min(round, child.done);
  }
  return round;
}

void Node::append_addresses(Message& message, const std::vector<std::byte*>& segments) {
  message.header.segments = static_cast<std::uint32_t>(segments.size());
  for (const std::byte* segment : segments) {
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(segment));
    message.append(&address, sizeof address);
  }
}

std::string Node::listed(const std::vector<Rank>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

// --- This rank's calls ---

void Node::submit(Call call) {
  try {
    begin(std::move(call));
  } catch (const std::bad_alloc&) {
    lack_memory();
  }
}

// Fail the round on all ranks. If other ranks have a result that this rank cannot keep, the round fails only at
// this rank. Before the program calls the round, nothing fails: the other ranks do not need this rank.
void Node::lack_memory(bool for_call) {
  if (!calling()) return;
  up_.call.lacks_memory |= for_call && !up_.call.complete;  // a complete call loses nothing
  const std::string text = me() + " has too little memory for this call";
  const Entry* entry = history_.find(next_);
  const bool has_result = entry && entry->complete();
  if (has_result && (entry->failed || !up_.call.lacks_memory)) {
    if (!root()) stop_contributing();  // there may be no memory for this rank's sum
    return hand_over(*entry);
  }
  if (root() && has_result) {  // other ranks may have the result: the next round reports this failure to them
    alerts_.add(next_ + 1, "CodedError: " + text + ", round " + std::to_string(next_) +
                               ", whose result others have: go on from a checkpoint, on all ranks");
    return finish(Outcome::failed, "CodedError: " + text);
  }
  if (root()) return decide_error("CodedError: " + text);
  if (is_over(next_)) {
    failed_alone_.add(next_);
    if (next_ == frontier_) skip_to(next_);  // the result may lie in the caller's memory
    return desynchronize(text + ", and ");
  }
  if (up_.told_little_memory) return;
  up_.call.lacks = me() + " (too little memory)";
  stop_contributing();
  alert(next_, "CodedError: " + text);
  up_.told_little_memory = true;
}

// Keep this rank's vectors, and sums that contain them, out of the round from now on.
void Node::stop_contributing() {
  if (up_.offering) withdraw(Object::What::message, next_ + 1);
  if (!std::exchange(up_.call.skipped, true)) abandon_sections();
}

// Once the root has the whole sum, the result may overwrite this rank's vectors. A rank that compares messages,
// this one or one above, must not take a partly overwritten vector for this rank's message. If messages are
// compared, the root announces no part of a sum before it has the whole sum.
void Node::stop_contributing_to_what_is_decided() {
  if (!root() && calling() && decoder_.checked() && newest_ >= next_) stop_contributing();
}

void Node::begin(Call call) {
  const double now = wire_.now();
  up_ = WayUp();
  up_.call = std::move(call);
  outcome_ = Outcome::pending;  // if memory runs out from here on, this call fails
  up_.started = up_.waiting_since = now;
  up_.in_time = newest_ < next_;
  if (lacks_state()) skip("it has not got what the root has");
  if (up_.call.shared) begin_share();
  error_.clear();
  // Ranks below may already wait for the result. Then this rank's call must not extend the time that the rank
  // above has to answer.
  awaited_below() ? upstream_.waits(now) : upstream_.moved(now);
  telemetry_.started(next_, now, up_.call.skipped, up_.call.shared,
                     up_.call.shared && !up_.call.lends());
  signatures_.learn(up_.call.fingerprint, up_.call.signature);
  if (lacks_what_it_computed()) skip("it computed nothing");

  const Entry* known = history_.find(next_);
  if (desynchronized_ || (!known && next_ < frontier_)) return desynchronize();
  if (known) {
    hand_over(*known);
    if (!calling()) return;
  }

  up_.lay_out(decoder_, piece_bytes(up_.call.total));
  if (up_.call.lacks_memory) return lack_memory();
  if (root()) {
    if (up_.call.up) up_.outgoing = laid_out(up_.call.message);  // sections need the message's length
    const std::string& reason = alerts_.pending().empty() ? up_.call.why_not : alerts_.pending();
    if (!reason.empty()) return decide_error(reason);
    if (lacks_state()) return decide_error(what_it_lacks());
    if (const std::string why = why_not_after_blocks(); !why.empty()) return decide_error(why);
    if (sums_blocks()) leave_out_the_others();
    if (const std::string why = why_not_as_before(); !why.empty()) return decide_error(why);
    Entry begun{.round = next_,
                .fingerprint = up_.call.fingerprint,
                .layout = up_.call.down ? laid_out(up_.call.total) : Layout()};
    if (up_.call.down) place(begun);
    Entry& entry = history_.add(std::move(begun));
    up_.sum_at = up_.call.down ? entry.at : up_.call.out;
    if (as_a_whole()) keep_own();
    if (!up_.call.up) {
      for (std::size_t s = 0; s < up_.call.own.size(); ++s) {
        const std::uint64_t size = up_.call.message[s].bytes();
        if (size) std::memcpy(up_.sum_at[s], up_.call.own[s], size);
      }
      decided(entry, entry.layout.size());
      if (!calling()) return;
    }
  } else if (up_.call.sums() && !up_.call.shared) {
    if (children_.empty()) {
      up_.sum_at.clear();
      for (const std::byte* own : up_.call.own) up_.sum_at.push_back(const_cast<std::byte*>(own));
      up_.sum_at.resize(up_.call.message.size());
    } else {
      up_.sum = pool_.take(up_.outgoing.bytes());
      up_.sum_at.clear();
      for (std::size_t s = 0; s < up_.call.message.size(); ++s) {
        up_.sum_at.push_back(up_.sum.data() + up_.outgoing.start(s));
      }
    }
  }
  check_offers();
  if (up_.call.shared) deals() ? begin_sharing() : tell_share();
}

// Keep the program's vectors out of the sum. `why` is the reason that other ranks get.
void Node::skip(const std::string& why) {
  up_.call.skipped = true;
  up_.call.lacks = me() + " (" + why + ")";
}

// Copy this rank's vectors if the sum overwrites them and may be formed more than once.
void Node::keep_own() {
  if (!root() || !up_.call.up || up_.call.down || up_.own_copy) return;
  up_.own_copy = pool_.take(up_.outgoing.bytes());
  for (std::size_t s = 0; s < up_.call.own.size(); ++s) {
    std::byte* copy = up_.own_copy.data() + up_.outgoing.start(s);
    if (const auto size = up_.call.message[s].bytes()) std::memcpy(copy, up_.call.own[s], size);
    up_.call.own[s] = copy;
  }
}

void Node::extend(const std::vector<const std::byte*>& own) {
  if (!calling()) return;
  const std::size_t known = up_.call.own.size();
  up_.call.own.insert(up_.call.own.end(), own.begin(), own.end());
  if (!children_.empty() || !up_.call.sums()) return;
  for (std::size_t s = known; s < up_.call.own.size(); ++s) {
    up_.sum_at[s] = const_cast<std::byte*>(up_.call.own[s]);
  }
}

void Node::complete(std::vector<std::byte*> out) {
  if (!calling()) return;
  up_.call.out = std::move(out);
  up_.call.complete = true;
  // without memory for the result, the call only waits for its arrival
  if (const Entry* entry = history_.find(next_)) hand_over(*entry);
}

void Node::break_off(Call call) {
  if (calling()) {
    if (up_.offering) withdraw(Object::What::message, next_ + 1);
    call.skipped = true;  // a rank that has fetched a part of the first call must not mix both calls
    try {
      call.lacks = me() + " (another call took the place of this one)";
      abandon_sections();
    } catch (const std::bad_alloc&) {
      end_sections();  // the other ranks do not learn of this, and still get the result
    }
  }
  submit(std::move(call));
}

void Node::replan(const std::vector<Rank>& children, Decoder decoder) {
  if (decoder.parity() && decoder_.parity()) decoder.parity()->remember(*decoder_.parity());
  decoder_ = std::move(decoder);
  rows_.clear();
  std::ranges::sort(children_, {}, [&](const Child& child) {
    return std::ranges::find(children, child.rank) - children.begin();
  });
  family_.children = children;
}

// Return why this rank's sums fail until it has the root's state. Until then even a sum of the other ranks must
// not change its state.
std::string Node::what_it_lacks() const {
  return "CodedError: rank " + std::to_string(family_.rank) +
         " has not got what the root has, as ranks have joined, or the root died and ranks had had the sums of "
         "different rounds: "
         "hand it on first, as params = jaxcoded.tree_bcast(params, group)";
}

void Node::finish(Outcome outcome, std::string error) {
  if (outcome != Outcome::desynchronized && lacks_state()) {
    outcome = Outcome::failed;
    error = what_it_lacks();
  }
  // if it stayed valid, the message might still be offered after a resync
  if (up_.offering) withdraw(Object::What::message, next_ + 1);
  if (!children_.empty()) withdraw(Object::What::own, next_ + 1);
  if (outcome == Outcome::done && !up_.call.down && !root()) {
    for (std::size_t s = 0; s < up_.call.out.size(); ++s) {
      if (const auto size = up_.call.total[s].bytes()) std::memset(up_.call.out[s], 0, size);
    }
  }
  const double started = began();
  error_ = std::move(error);
  outcome_ = outcome;
  // advance the round first: even if an allocation below fails, the next call belongs to the next round
  const Round round = outcome == Outcome::desynchronized ? next_ : next_++;
  if (up_.call.shared) telemetry_.worked(round, up_.busy, up_.blocks, own_of_computed());
  if (up_.call.shared && !up_.call.lends()) {
    work_.computed_round = 0;
    work_.computed = up_.share.blocks();
    work_.computed_round = round;
  }
  if (!root() && up_.delegated) end_sections();  // the memory of their sum is about to be freed
  up_.sum = {};
  up_.own_copy = {};
  for (Child& child : children_) child.offer.slots.clear();
  if (outcome == Outcome::desynchronized) return;
  if (outcome == Outcome::done && !up_.call.up) alike_ = true;
  const double now = ended_at_ = wire_.now();
  telemetry_.ended(round, now, static_cast<std::uint8_t>(outcome), bytes_of(up_.call.total));
  if (const RoundRecord* record = telemetry_.find(round); record && hook_) hook_(*record);
  if (now - told_step_times_ > limits_.step_times_seconds) tell_step_times();
  // deadlines must not grow with the rounds that miss them
  const bool done = outcome == Outcome::done;
  if (!up_.overdue || (done && limits_.on_deadline == OnDeadline::wait)) durations_.add(now - up_.started);
  if (!up_.overdue && done) waited(now - started);
  forget();
}

// `first_valid` never decreases, even if this rank goes back: objects that were announced before must not
// become valid again.
void Node::withdraw(Object::What what, Round first_valid) {
  Round& valid = first_valid_[static_cast<std::size_t>(what)];
  if (first_valid <= valid) return;
  valid = first_valid;
  wire_.withdraw(what, first_valid);
}

// Return how many seconds a rank that this rank relies on may be silent. The limit grows while nothing comes:
// networks may be slow, and a long wait should cost few questions. The limit is at least twice the time of
// recent answers.
double Node::patience(double stuck_since) const {
  const double usual = std::min(2 * durations_.median(), longest_patience);
  return std::max({limits_.orphan_seconds, usual, 2 * upstream_.answer_seconds(wire_.now()), share_of_wait(stuck_since)});
}

double Node::share_of_wait(double since) const { return std::min((wire_.now() - since) / 4, longest_patience); }

std::uint64_t Node::lag() const {
  const Round latest = decided();
  return latest < next_ ? 0 : latest - next_ + 1;
}

Round Node::decided() const {
  const Round latest = std::max(frontier_ - 1, newest_);
  return is_over(latest) ? latest : latest - 1;
}

// Whether some rank has the whole result of a round, or its error. Until then other ranks may have to
// contribute in place of a child that dies or leaves.
bool Node::is_over(Round round) const {
  if (round < frontier_ || round < newest_) return true;
  const auto announcement = announced_.find(round);
  if (announcement == announced_.end()) return false;
  const Announcement& news = announcement->second;
  return news.failed || news.ready == laid_out(news.segments).size();
}

bool Node::advance() {
  Attempts attempts;
  bool more = false;
  attempts.make([&] {
    stop_contributing_to_what_is_decided();
    tell_alerts();  // before the parent learns that this rank skips
    offer_what_is_held_back();
    return false;
  });
  for (const auto step : {&Node::form, &Node::gather, &Node::follow, &Node::follow_state}) {
    more |= attempts.make([&] { return (this->*step)(); });
  }
  for (const auto step : {&Node::answer_losses, &Node::fail_stuck, &Node::go_on_leaving, &Node::watch_for_stalls,
                          &Node::fail_uncalled, &Node::ask, &Node::watch_above, &Node::watch_children,
                          &Node::tell_all}) {
    attempts.make([&] {
      (this->*step)();
      return false;
    });
  }
  attempts.end();
  return more;
}

void Node::deliver(Rank from, const Message& message) {
  try {
    understand(from, message);
  } catch (const Damaged&) {
    garbled(from, "kind " + std::to_string(static_cast<int>(message.header.kind)) + ", round " +
                      std::to_string(message.header.round) + ", " + std::to_string(message.body.size()) + " bytes");
  }
}

void Node::garbled(Rank from, const std::string& which) {
  alert(std::max(newest_, next_), unreadable(from, which));
}

std::string Node::unreadable(Rank from, const std::string& which) const {
  return "CodedError: rank " + std::to_string(family_.rank) + " cannot read a message from rank " +
         std::to_string(from) + " (" + which + "): do all ranks run the same jaxcoded?";
}

void Node::understand(Rank from, const Message& message) {
  const Header& head = message.header;
  if (std::max({head.round, head.last, head.done}) > most_rounds) throw Damaged();
  const double now = wire_.now();
  Child* child = child_of(from);
  auto listener = listeners_.find(from);
  if (child) {
    child->done = std::max(child->done, head.done);
    child->asked = 0;
    child->heard = now;
  }
  upstream_.heard(from, head.kind == Kind::ask, now);
  if (!root() && from == upstream_.parent()) parent_heard_ = now;
  if (listener != listeners_.end()) listener->second.heard();
  switch (head.kind) {
    case Kind::offer:
      if (child) on_offer(*child, message);
      break;
    case Kind::want:
      if (listener != listeners_.end()) on_want(from, listener->second, head);
      break;
    case Kind::want_state:
      if (listener != listeners_.end()) listener->second.wants_state = true;
      break;
    case Kind::alert:
      if (head.flags & Flag::overdue) {
        if (child) on_overdue(*child, message);
      } else if (head.flags & not_finite) {
        if (child) {
          child->not_finite_round = head.round;
          tell_not_finite(head.round, readable(message.text()));
        }
      } else if (head.flags & closed) {
        refuse(head.round, readable(message.text()));
      } else {
        alert(head.round, readable(message.text()), head.flags);
      }
      break;
    case Kind::bye:
      if (child) on_bye(*child, message);
      check_offers();
      break;
    case Kind::result:
      if (!is_above(from)) break;
      newest_ = std::max({newest_, head.flags & alone ? 0 : head.round, head.last});
      on_result(from, message);
      break;
    case Kind::note:
      if (!is_above(from)) break;
      newest_ = std::max(newest_, head.last);
      if (head.flags & Flag::lost) {  // the rank above may have missed a question, or that this rank leaves
        asked_pieces_.clear();        // ask again; a piece may then come twice
        departures_.unheard();
        check_offers();
      }
      break;
    case Kind::gone:
      if (is_above(from)) on_gone(from, head.round, head.last);
      break;
    case Kind::state:
      on_state(from, message);
      break;
    case Kind::signature:
      signatures_.learn(head.fingerprint, readable(message.text()));
      break;
    case Kind::step_times:
      on_step_times(from, message);
      break;
    case Kind::ask: {
      Message answer{header(Kind::here, head.round)};
      answer.header.flags = in_program() ? 0 : calls;
      answer.header.last = next_;
      wire_.send(from, answer);
      break;
    }
    case Kind::here:
      if (!child) break;
      if (head.round) hear_where_it_is(*child, head);
      child->behind.answered = now;
      child->behind.in_program = !(head.flags & calls);
      child->behind.next = head.last;
      if (head.last) child->reported_round = std::max(child->reported_round, head.last - !(head.flags & calls));
      break;
    case Kind::order:
      if (!root() && from == upstream_.parent()) on_order(message);
      break;
    case Kind::will_ask:
      if (child) on_will_ask(static_cast<std::size_t>(child - children_.data()), head.round);
      break;
    case Kind::delegate:
      on_delegate(from, message);
      break;
    case Kind::formed:
      on_formed(from, message);
      break;
    case Kind::pull:
      break;  // the wire answers it
  }
  forget();
}

void Node::lost(Rank rank) {
  if (Child* child = child_of(rank)) child->dead = true;
  if (const auto listener = listeners_.find(rank); listener != listeners_.end()) listener->second.gone = true;
  upstream_.lost(rank);
  losses_.dead(rank);
  if (recovery_ && recovery_->lost(rank)) ask_next_state();
  say_bye();
  check_offers();
}

void Node::root_has_ended() {
  if (std::exchange(root_ended_, true)) return;
  try {
    lost(family_.ancestors.back());
  } catch (const std::bad_alloc&) {
    root_ended_ = false;  // the root asks again
    throw;
  }
}

void Node::arrived(Rank from, Object object, std::uint32_t piece, std::span<const std::byte> data) {
  // the child is there: its messages may only have waited behind this piece
  if (Child* child = child_of(from)) {
    child->asked = 0;
    child->heard = wire_.now();
  }
  if (term_arrived(from, object, piece, data)) return;
  if (object.what == Object::What::own) return;
  if (object.what == Object::What::section) return section_arrived(from, object, piece, data);
  if (object.what == Object::What::message) {
    Child* child = child_of(from);
    if (!child || !calling() || object.round != next_ || child->offer.round != next_) return;
    const auto slot = child->offer.slots.find(piece);
    if (slot == child->offer.slots.end() || slot->second.arrived) return;
    if (object.version != version_of(child->offer)) return;  // the piece was requested for an earlier version
    if (data.empty()) {
      child->offer.withdraw();
      return check_offers();
    }
    std::memcpy(slot->second.buffer.data(), data.data(), data.size());
    slot->second.arrived = true;
    up_.stalled.erase(from);
  } else if (object.what == Object::What::result) {
    if (object.round != frontier_) return;
    const auto source = announced_.find(frontier_);
    Entry* entry = history_.find(frontier_);
    if (source == announced_.end() || !entry || entry->complete()) return;
    if (data.empty()) {
      if (source->second.from == from) {  // a piece may arrive before the announcement of an error
        announced_.erase(source);
        asked_pieces_.clear();
        want(from);
      }
      return;
    }
    if (piece < entry->ready || piece >= entry->arrived.size() || entry->arrived[piece]) return;
    const Piece range = entry->layout[piece];
    std::memcpy(entry->at[range.segment] + range.offset, data.data(), data.size());
    entry->arrived[piece] = true;
    upstream_.moved(wire_.now());
  } else if (recovery_) {
    const auto progress = recovery_->arrived(from, object.round, piece, data, wire_.now());
    if (progress == Recovery::Progress::gone) ask_next_state();
  }
}

std::string Node::status() const {
  const auto number = [](auto value) { return std::to_string(value); };
  std::string out = "rank " + number(family_.rank) + (calling() ? " calls" : " will call") + " round " +
                    number(next_) + ", lacks " + number(frontier_) + ", knows of " +
                    number(newest_) + ", decoded " + number(up_.decoded.pieces) + " of " +
                    number(up_.incoming.size()) + " pieces, offered " +
                    (up_.offering ? number(up_.offered) : "nothing") +
                    (up_.held_back ? ", held back" : "") + (up_.lent ? ", lent" : "") +
                    (upstream_.unanswered() ? ", unanswered" : "") + ", asks rank " +
                    (root() ? "nobody" : number(upstream_.source())) + " up to " +
                    number(upstream_.wanted());
  for (const auto& [round, news] : announced_) {
    out += "; rank " + number(news.from) + " has " + number(news.ready) + " of " + number(round);
  }
  for (const Sections::Known& known : sections_.all) {
    const Section& section = known.section;
    out += "; rank " + number(section.maker) + " forms pieces " + number(section.first) + " to " +
           number(section.last) + ", formed before " + number(known.formed) + ", here before " +
           number(known.taken);
  }
  for (const Child& child : children_) {
    const Listener& listener = listeners_.at(child.rank);
    const Offer& offer = child.offer;
    out += "; child " + number(child.rank) + " offers " + number(offer.ready) + " of round " +
           number(offer.round) + (offer.withdrawn ? " (withdrawn)" : "") +
           (stalled(child) ? " (stalled)" : "") + (child.left ? " (left)" : "") + ", lacks " +
           number(child.done) + ", wants " + number(listener.first) + " to " + number(listener.last);
  }
  return out;
}

std::optional<std::span<const std::byte>> Node::read(Object object, std::uint32_t piece) const {
  const bool of_own = object.what == Object::What::own;
  if (of_own || object.what == Object::What::message) {
    if (!calling() || object.round != next_ || piece >= up_.outgoing.size()) return std::nullopt;
    if (first_valid_[static_cast<std::size_t>(object.what)] > object.round) return std::nullopt;
    const bool delegates = root() || up_.delegated;
    // the piece of the children's messages that goes into this piece
    const std::uint32_t with_it = std::min(piece / limits_.slices, up_.incoming.size() - 1);
    const bool offered = of_own ? delegates && adds_own() && own_ready(with_it) : up_.offering && piece < up_.offered;
    if (!offered) return std::nullopt;
    if (up_.call.shared && object.version != up_.share.version().number()) return std::nullopt;
    const Piece range = up_.outgoing[piece];
    const std::byte* from = of_own ? up_.call.own[range.segment] : up_.sum_at[range.segment];
    return std::span<const std::byte>{from + range.offset, range.bytes};
  }
  if (object.what == Object::What::result) {
    const Entry* entry = history_.find(object.round);
    if (!entry) return std::nullopt;
    if (piece >= (entry->failed ? entry->remains : entry->ready)) return std::nullopt;
    return std::span<const std::byte>{entry->data(piece), entry->layout[piece].bytes};
  }
  if (object.what == Object::What::section) {
    const Formed::Part* part = object.round == formed_.round ? formed_.find(object.version) : nullptr;
    if (!part || piece < part->section.first || piece >= part->end) return std::nullopt;
    return std::span<const std::byte>{formed_.at(*part, piece), formed_.layout[piece].bytes};
  }
  return snapshot_.read(object.round, piece);
}

}  // namespace jaxcoded
