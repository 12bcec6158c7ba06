#include "node.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

constexpr Round rounds_ahead = 8;       // that a late rank asks for at a time
constexpr std::uint32_t pieces_ahead = 8;  // fetched at a time where fetching takes time
constexpr std::size_t most_announced = 64;
constexpr std::size_t durations_kept = 31;
constexpr std::size_t most_words = 1024;

std::vector<std::uint64_t> addresses_of(const std::vector<std::byte*>& pointers) {
  std::vector<std::uint64_t> out;
  for (const std::byte* pointer : pointers) out.push_back(reinterpret_cast<std::uintptr_t>(pointer));
  return out;
}

std::string listed(const std::vector<Rank>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

}  // namespace

Node::Node(Family family, Decoder decoder, Limits limits, Wire& wire)
    : family_(std::move(family)),
      decoder_(std::move(decoder)),
      limits_(limits),
      wire_(wire),
      pool_(limits.history_bytes) {
  for (Rank child : family_.children) children_.push_back({.rank = child});
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

// The first round whose result this rank, or one below it, still lacks.
Round Node::done() const {
  Round out = next_;
  for (const Child& child : children_) {
    if (!child.left) out = std::min(out, child.done);
  }
  return out;
}

// --- This rank's calls ---

void Node::submit(Call call) {
  call_ = std::move(call);
  outcome_ = Outcome::pending;
  error_.clear();
  started_ = asked_at_ = waiting_since_ = wire_.now();
  decoded_ = offered_ = given_ = 0;
  offering_ = held_back_ = false;
  decoding_.reset();
  for (Child& child : children_) child.stalled = false;
  if (words_.size() >= most_words) words_.clear();
  words_[call_.fingerprint] = call_.words;

  const Entry* known = history_.find(next_);
  if (!known && (desynchronized_ || next_ < frontier_)) return desynchronize();
  if (known) {
    hand_over(*known);
    if (!calling()) return;
  }

  outgoing_ = Layout(call_.message, limits_.piece_bytes);
  std::vector<Segment> parts = call_.message;
  for (Segment& part : parts) part.count /= decoder_.slices();
  incoming_ = Layout(std::move(parts), limits_.piece_bytes);
  decoded_elements_.assign(call_.message.size(), 0);

  if (root()) {
    const std::string& reason = pending_error_.empty() ? call_.refusal : pending_error_;
    if (!reason.empty()) return decide_error(std::string(reason));
    Entry& entry = history_.add(
        {.round = next_,
         .fingerprint = call_.fingerprint,
         .layout = call_.down ? Layout(call_.total, limits_.piece_bytes) : Layout()});
    if (call_.down) place(entry);
    sum_at_ = call_.down ? entry.at : call_.out;
    if (!call_.up) {
      for (std::size_t s = 0; s < call_.own.size(); ++s) {
        std::memcpy(sum_at_[s], call_.own[s], call_.message[s].bytes());
      }
      decided(entry, entry.layout.size());
      if (!calling()) return;
    }
  } else if (call_.up && !call_.skipped && call_.refusal.empty()) {
    if (children_.empty()) {
      sum_at_.clear();
      for (const std::byte* own : call_.own) sum_at_.push_back(const_cast<std::byte*>(own));
    } else {
      sum_ = pool_.take(outgoing_.bytes());
      sum_at_.clear();
      for (std::size_t s = 0; s < call_.message.size(); ++s) {
        sum_at_.push_back(sum_.data() + outgoing_.start(s));
      }
    }
  }
  check_offers();
}

void Node::finish(Outcome outcome, std::string error) {
  withdraw(Object::What::message, next_ + 1);
  if (outcome == Outcome::done && !call_.down && !root()) {
    for (std::size_t s = 0; s < call_.out.size(); ++s) {
      std::memset(call_.out[s], 0, call_.total[s].bytes());
    }
  }
  outcome_ = outcome;
  error_ = std::move(error);
  sum_ = {};
  for (Child& child : children_) child.slots.clear();
  if (outcome == Outcome::desynchronized) return;
  const double duration = wire_.now() - started_;
  if (durations_.size() < durations_kept) {
    durations_.push_back(duration);
  } else {
    durations_[next_ % durations_kept] = duration;
  }
  ++next_;
  forget();
}

// Never goes back, also where this rank does: what others have heard of before must not be valid
// again.
void Node::withdraw(Object::What what, Round first_valid) {
  Round& valid = first_valid_[static_cast<std::size_t>(what)];
  if (first_valid <= valid) return;
  valid = first_valid;
  wire_.withdraw(what, first_valid);
}

double Node::patience() const {
  if (durations_.empty()) return limits_.orphan_seconds;
  std::vector<double> sorted = durations_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return std::max(limits_.orphan_seconds, 4 * *middle);
}

std::uint64_t Node::lag() const {
  const Round decided = std::max(frontier_ - 1, newest_);
  return decided < next_ ? 0 : decided - next_ + 1;
}

bool Node::advance() {
  const bool more_up = gather();
  const bool more_down = follow();
  const bool more_state = follow_state();
  watch_for_stalls();
  ask();
  tell_all();
  return more_up || more_down || more_state;
}

void Node::deliver(Rank from, const Message& message) {
  const Header& head = message.header;
  Child* child = child_of(from);
  auto listener = listeners_.find(from);
  if (child) child->done = std::max(child->done, head.done);
  asked_ranks_.erase(from);  // it answers
  if (listener != listeners_.end()) listener->second.noted = false;
  if (!root() && from == family_.ancestors.front()) {
    unanswered_ = false;
    upstream_ = 0;
    if (held_back_) {
      held_back_ = false;
      offer();
    }
  }
  switch (head.kind) {
    case Kind::offer:
      if (child) on_offer(*child, message);
      break;
    case Kind::want:
      if (listener != listeners_.end()) {
        listener->second.first = head.round;
        listener->second.last = head.last;
        listener->second.told = 0;
        if (head.flags & calls) listener->second.called = head.round;
        if (root() && leaving_) refuse_called(from, listener->second);
      }
      break;
    case Kind::want_state:
      if (listener != listeners_.end()) listener->second.wants_state = true;
      break;
    case Kind::complaint:
      if (head.flags & closed) {
        refuse(head.round, std::string(message.text()));
      } else {
        complain(head.round, std::string(message.text()));
      }
      break;
    case Kind::bye:
      if (child && !child->left) {
        const auto ranks = message.values<Rank>(0, message.body.size() / sizeof(Rank));
        std::vector<Rank>& known = head.flags & relays ? closed_ : absent_;
        known.insert(known.end(), ranks.begin(), ranks.end());
        if (!child->retired && !(head.flags & relays)) closed_.push_back(from);
        child->retired = true;
        child->left = !(head.flags & relays);
        if (child->left) listeners_[from].last = 0;
        check_offers();
        say_bye();
      }
      break;
    case Kind::result:
      newest_ = std::max({newest_, head.round, head.last});
      on_result(from, message);
      break;
    case Kind::note:
      newest_ = std::max(newest_, head.last);
      break;
    case Kind::gone:
      on_gone(from, head.round, head.last);
      break;
    case Kind::state:
      on_state(from, message);
      break;
    case Kind::words:
      if (words_.size() >= most_words) words_.clear();
      words_[head.fingerprint] = message.text();
      break;
    case Kind::pull:
      break;  // the wire answers it
  }
  forget();
}

// --- The way up ---

void Node::on_offer(Child& child, const Message& message) {
  const Header& head = message.header;
  if (head.round < child.round || (head.round == child.round && head.ready < child.ready)) return;
  if (head.round > child.round) {
    child.order = ++offers_seen_;
    child.withdrawn = child.stalled = false;
    child.slots.clear();
    child.round = head.round;
    child.fingerprint = head.fingerprint;
    Listener& listener = listeners_[child.rank];
    listener.first = listener.last = head.round;
    listener.told = 0;
  }
  child.ready = head.ready;
  child.addresses.clear();
  child.body.clear();
  if (head.flags & inlined) {
    child.body = message.body;
  } else {
    child.addresses = message.values<std::uint64_t>(0, head.segments);
  }
  check_offer(child);
}

bool Node::usable(const Child& child, std::uint32_t piece) const {
  const auto row = static_cast<std::size_t>(&child - children_.data());
  return child.round == next_ && child.ready > piece && !child.withdrawn &&
         child.fingerprint == call_.fingerprint && (call_.erased.empty() || !call_.erased[row]);
}

// The children to decode a piece from: those in use as long as they deliver, otherwise the first
// that sufficed.
std::shared_ptr<const Decoding> Node::choose(std::uint32_t piece) {
  if (decoding_ && std::ranges::all_of(decoding_->rows, [&](std::size_t row) {
        return usable(children_[row], piece) && !children_[row].stalled;
      })) {
    return decoding_;
  }
  std::vector<std::size_t> rows(children_.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::ranges::sort(rows, {}, [&](std::size_t row) { return children_[row].order; });
  const std::vector<bool> possible = may_offer(piece);
  for (const bool with_stalled : {false, true}) {
    std::vector<bool> answered(children_.size());
    if (auto found = decoder_.decode(answered, possible)) return decoding_ = found;  // of nobody
    for (std::size_t row : rows) {
      if (!usable(children_[row], piece) || (children_[row].stalled && !with_stalled)) continue;
      answered[row] = true;
      if (auto found = decoder_.decode(answered, possible)) return decoding_ = found;
    }
  }
  decoding_.reset();
  return nullptr;
}

// A piece of a child's message, if it is here. Otherwise it is on its way, or the child has
// withdrawn its offer.
const std::byte* Node::bring(Child& child, std::uint32_t piece) {
  static const std::byte nothing[1] = {};
  const Piece& it = incoming_[piece];
  if (it.bytes == 0) return nothing;
  if (!child.body.empty()) return child.body.data() + incoming_.start(it.segment) + it.offset;
  const std::uint32_t ahead = wire_.direct(child.rank) ? 1 : pieces_ahead;
  for (std::uint32_t p = piece; p < std::min(child.ready, piece + ahead); ++p) {
    const auto [slot, added] = child.slots.try_emplace(p);
    if (!added) continue;
    const Piece& wanted = incoming_[p];
    slot->second.buffer = pool_.take(wanted.bytes);
    fetched_bytes_ += wanted.bytes;
    switch (wire_.fetch(child.rank, {Object::What::message, next_}, p,
                        child.addresses[wanted.segment] + wanted.offset,
                        slot->second.buffer.data(), wanted.bytes)) {
      case Wire::Fetch::done:
        slot->second.here = true;
        break;
      case Wire::Fetch::pending:
        break;
      case Wire::Fetch::gone:
        child.withdrawn = true;
        child.slots.clear();
        return nullptr;
    }
  }
  const Child::Slot& slot = child.slots[piece];
  return slot.here ? slot.buffer.data() : nullptr;
}

bool Node::gather() {
  if (!calling() || !call_.up || !call_.refusal.empty()) {
    if (calling() && !root() && !offering_) offer();
    return false;
  }
  if (!root() && (call_.skipped || children_.empty())) {
    if (!offering_ && !call_.skipped) decoded_ = incoming_.size();
    if (!offering_) offer();
    return false;
  }
  std::uint64_t bytes = 0;
  while (decoded_ < incoming_.size()) {
    // What is decided is not needed any more, and may lie where this rank's own vector was.
    if (const Entry* entry = root() ? nullptr : history_.find(next_);
        entry && entry->ready > decoded_ &&
        entry->layout.segments() == incoming_.segments()) {
      skip_piece();
      continue;
    }
    const auto decoding = choose(decoded_);
    if (!decoding) return false;
    std::vector<const std::byte*> inputs;
    for (std::size_t row : decoding->rows) {
      const std::byte* input = bring(children_[row], decoded_);
      if (input) inputs.push_back(input);
    }
    if (inputs.size() < decoding->rows.size()) {
      if (std::ranges::any_of(decoding->rows,
                              [&](std::size_t row) { return children_[row].withdrawn; })) {
        continue;
      }
      return false;
    }
    bytes += incoming_[decoded_].bytes;
    decode(*decoding, inputs);
    waiting_since_ = wire_.now();
    if (bytes >= limits_.announced_bytes || decoded_ == incoming_.size()) {
      announce_sum();
      if (!calling()) return false;
      return decoded_ < incoming_.size();
    }
  }
  announce_sum();
  return false;
}

void Node::decode(const Decoding& decoding, std::span<const std::byte* const> inputs) {
  const Piece& piece = incoming_[decoded_];
  if (piece.count) {
    const Segment& part = incoming_.segments()[piece.segment];
    for (std::size_t u = 0; u < decoder_.slices(); ++u) {
      const std::uint64_t offset = u * part.bytes() + piece.offset;
      combine(part.dtype, sum_at_[piece.segment] + offset,
              call_.skipped ? nullptr : call_.own[piece.segment] + offset, inputs,
              decoding.coefficients[u], piece.count);
    }
  }
  skip_piece();
}

void Node::skip_piece() {
  const Piece& piece = incoming_[decoded_];
  if (piece.count) decoded_elements_[piece.segment] += piece.count;
  for (Child& child : children_) child.slots.erase(decoded_);
  ++decoded_;
}

// The pieces of this rank's message, or of the result at the root, that are summed: all before
// this one.
std::uint32_t Node::summed(const Layout& layout) const {
  if (decoded_ == incoming_.size()) return layout.size();
  std::uint32_t piece = 0;
  for (; piece < layout.size(); ++piece) {
    const Piece& it = layout[piece];
    if (!it.count) break;
    const std::uint64_t part = incoming_.segments()[it.segment].count;
    const std::uint64_t known = decoded_elements_[it.segment];
    const std::uint64_t last = it.first + it.count - 1;
    if (known < part && (it.first / part != last / part || last % part >= known)) break;
  }
  return piece;
}

void Node::announce_sum() {
  if (!root()) return offer();
  Entry& entry = *history_.find(next_);
  if (call_.down) {
    decided(entry, summed(entry.layout));
  } else if (decoded_ == incoming_.size()) {
    decided(entry, entry.layout.size());
  }
}

// Offer this rank's message to its parent, as far as it is summed.
void Node::offer() {
  if (!calling() || root()) return;
  const Rank parent = family_.ancestors.front();
  const bool empty = !call_.up || call_.skipped || !call_.refusal.empty();
  const std::uint32_t ready = empty ? 0 : summed(outgoing_);
  const bool complete = empty || ready == outgoing_.size();
  const bool small = !empty && outgoing_.bytes() <= wire_.inline_bytes(parent);
  if (small && !complete) return;
  if (!empty && ready == offered_) return;
  if (!offering_) {
    // A parent that has not answered to an earlier round's offer gets no second one.
    if (unanswered_) {
      held_back_ = true;
      return;
    }
    introduce(parent, introduced_, call_.fingerprint);
  }
  Message message{header(Kind::offer, next_)};
  message.header.fingerprint = call_.fingerprint;
  message.header.ready = ready;
  if (small) {
    message.header.flags = inlined;
    message.body.resize(std::max<std::uint64_t>(outgoing_.bytes(), 1));
    for (std::size_t s = 0; s < sum_at_.size(); ++s) {
      std::memcpy(message.body.data() + outgoing_.start(s), sum_at_[s], call_.message[s].bytes());
    }
  } else if (!empty) {
    const auto addresses = addresses_of(sum_at_);
    message.header.segments = static_cast<std::uint16_t>(addresses.size());
    message.append(addresses.data(), addresses.size() * sizeof addresses[0]);
  }
  wire_.send(parent, message);
  offered_ = ready;
  unanswered_ |= !offering_;
  offering_ = true;
  wanted_ = next_;  // which replaces what was asked for before
}

// A child whose pieces do not come while others' could be used instead.
void Node::watch_for_stalls() {
  if (!calling() || !decoding_ || decoded_ == incoming_.size()) return;
  const double now = wire_.now();
  if (now - waiting_since_ < std::max(limits_.stall_seconds, waiting_since_ - started_)) return;
  waiting_since_ = now;
  for (std::size_t row : decoding_->rows) {
    const auto slot = children_[row].slots.find(decoded_);
    if (slot != children_[row].slots.end() && !slot->second.here) children_[row].stalled = true;
  }
}

void Node::arrived(Rank from, Object object, std::uint32_t piece, std::span<const std::byte> data) {
  if (object.what == Object::What::message) {
    Child* child = child_of(from);
    if (!child || !calling() || object.round != next_ || child->round != next_) return;
    const auto slot = child->slots.find(piece);
    if (slot == child->slots.end() || slot->second.here) return;
    if (data.empty()) {
      child->withdrawn = true;
      child->slots.clear();
      return;
    }
    std::memcpy(slot->second.buffer.data(), data.data(), data.size());
    slot->second.here = true;
    child->stalled = false;
  } else if (object.what == Object::What::result) {
    if (object.round != frontier_) return;
    const auto source = announced_.find(frontier_);
    Entry* entry = history_.find(frontier_);
    if (source == announced_.end() || !entry || entry->complete()) return;
    if (data.empty()) {
      if (source->second.from == from) lost_source();
      return;
    }
    if (piece < entry->ready || piece >= entry->here.size() || entry->here[piece]) return;
    const Piece& it = entry->layout[piece];
    std::memcpy(entry->at[it.segment] + it.offset, data.data(), data.size());
    entry->here[piece] = true;
    asked_at_ = wire_.now();
  } else if (fetched_state_.wanted && object.round == fetched_state_.round &&
             from == fetched_state_.from) {
    if (data.empty()) {
      fetched_state_.asked_ranks.erase(from);
      return ask_next_state();
    }
    const Piece& it = fetched_state_.layout[piece];
    std::memcpy(fetched_state_.buffer.data() + it.offset, data.data(), data.size());
    fetched_state_.asked_at = wire_.now();
    fetched_state_.fetched += !fetched_state_.here[piece];
    fetched_state_.here[piece] = true;
  }
}

// --- The way down ---

// Memory of its own for an entry.
void Node::place(Entry& entry) {
  entry.buffer = pool_.take(entry.layout.bytes());
  history_.account(entry);
  entry.at.clear();
  for (std::size_t s = 0; s < entry.layout.segments().size(); ++s) {
    entry.at.push_back(entry.buffer.data() + entry.layout.start(s));
  }
}

// So many pieces of the newest result are here.
void Node::decided(Entry& entry, std::uint32_t ready) {
  if (ready == entry.ready) return;
  entry.ready = ready;
  newest_ = std::max(newest_, entry.round);
  if (entry.complete()) {
    frontier_ = entry.round + 1;
    announced_.erase(announced_.begin(), announced_.lower_bound(frontier_));
    gone_from_.clear();
    asked_pieces_.clear();
  }
  asked_at_ = wire_.now();
  tell_all();
  hand_over(entry);
}

void Node::on_result(Rank from, const Message& message) {
  const Header& head = message.header;
  if (head.round < frontier_) return;
  const auto known = announced_.find(head.round);
  if (known == announced_.end() && announced_.size() >= most_announced) return;
  if (known != announced_.end()) {
    // Another rank's news are as good: this one may have stopped.
    const bool better = from == known->second.from ? head.ready > known->second.ready
                                                   : head.ready >= known->second.ready;
    if (!better && !(head.flags & failed)) return;
    if (from != known->second.from && head.round == frontier_) asked_pieces_.clear();
  }
  Announcement news;
  news.from = from;
  news.ready = head.ready;
  news.failed = (head.flags & failed) != 0;
  news.fingerprint = head.fingerprint;
  if (news.failed) {
    news.body = message.body;
  } else {
    const auto table = message.values<std::uint64_t>(0, 2 * std::size_t{head.segments});
    for (std::size_t s = 0; s < head.segments; ++s) {
      news.segments.push_back({static_cast<DType>(table[2 * s]), table[2 * s + 1]});
    }
    const std::size_t start = table.size() * sizeof table[0];
    if (head.flags & inlined) {
      news.body.assign(message.body.begin() + static_cast<std::ptrdiff_t>(start),
                       message.body.end());
    } else {
      news.addresses = message.values<std::uint64_t>(start, head.segments);
    }
  }
  announced_[head.round] = std::move(news);
}

// The entry of the round at the frontier, made if need be; null where there is no room for it yet.
Entry* Node::entry_at_frontier(const Announcement& news) {
  if (Entry* entry = history_.find(frontier_)) {
    if (entry->failed == news.failed) return entry;
    history_.drop_newest();  // pieces of a round that has failed since
  }
  Entry entry{.round = frontier_,
              .fingerprint = news.fingerprint,
              .failed = news.failed,
              .error = news.failed ? std::string(reinterpret_cast<const char*>(news.body.data()),
                                                 news.body.size())
                                   : std::string(),
              .layout = Layout(news.segments, limits_.piece_bytes)};
  const bool mine = calling() && next_ == frontier_;
  const bool in_place = mine && listeners_.empty() && call_.down && !news.failed &&
                        news.fingerprint == call_.fingerprint && news.segments == call_.total;
  // Without anybody below, results are kept for this rank alone: the first it needs, not the last.
  // Those above keep the rest.
  if (!mine && listeners_.empty() && !history_.empty() &&
      history_.bytes() + entry.layout.bytes() > limits_.ahead_bytes) {
    return nullptr;
  }
  Entry& added = history_.add(std::move(entry));
  if (in_place) {
    added.at = call_.out;
  } else if (!news.segments.empty()) {
    place(added);
  }
  return &added;
}

bool Node::follow() {
  if (root()) return false;
  const auto found = announced_.find(frontier_);
  if (found == announced_.end()) return false;
  const Announcement& news = found->second;
  Entry* entry = entry_at_frontier(news);
  if (!entry) return false;
  if (news.failed) {
    decided(*entry, entry->layout.size());
    return true;
  }
  if (!news.body.empty()) {
    for (std::uint32_t p = entry->ready; p < entry->layout.size(); ++p) {
      const Piece& it = entry->layout[p];
      if (it.bytes == 0) continue;
      std::memcpy(entry->at[it.segment] + it.offset,
                  news.body.data() + entry->layout.start(it.segment) + it.offset, it.bytes);
    }
    decided(*entry, entry->layout.size());
    return true;
  }
  entry->here.resize(entry->layout.size());
  const std::uint32_t ahead = wire_.direct(news.from) ? 1 : pieces_ahead;
  std::uint64_t bytes = 0;
  std::uint32_t ready = entry->ready;
  while (ready < news.ready && bytes < limits_.announced_bytes) {
    for (std::uint32_t p = ready; p < std::min(news.ready, ready + ahead); ++p) {
      const Piece& piece = entry->layout[p];
      if (entry->here[p] || asked_pieces_.contains(p)) continue;
      if (piece.bytes == 0) {
        entry->here[p] = true;
        continue;
      }
      fetched_bytes_ += piece.bytes;
      switch (wire_.fetch(news.from, {Object::What::result, frontier_}, p,
                          news.addresses[piece.segment] + piece.offset,
                          entry->at[piece.segment] + piece.offset, piece.bytes)) {
        case Wire::Fetch::done:
          entry->here[p] = true;
          break;
        case Wire::Fetch::pending:
          asked_pieces_.insert(p);
          break;
        case Wire::Fetch::gone:
          lost_source();
          return true;
      }
    }
    if (!entry->here[ready]) break;
    bytes += entry->layout[ready].bytes;
    ++ready;
  }
  const bool more = ready < news.ready && !asked_pieces_.contains(ready);
  const bool last = ready == entry->layout.size();
  decided(*entry, ready);
  return more || (last && announced_.contains(frontier_));
}

// Whoever announced the result at the frontier has lost it.
void Node::lost_source() {
  const Rank from = announced_.at(frontier_).from;
  announced_.erase(frontier_);
  asked_pieces_.clear();
  on_gone(from, frontier_, 0);
}

// Copy what is here of the result of the call in progress to the caller.
void Node::hand_over(const Entry& entry) {
  if (!calling() || entry.round != next_) return;
  if (entry.failed) return finish(Outcome::failed, entry.error);
  if (entry.fingerprint != call_.fingerprint) {
    if (!entry.complete()) return;  // this rank still has to fetch the rest of it
    const std::string text = clash(family_.rank, call_.fingerprint, entry.round,
                                   family_.ancestors.back(), entry.fingerprint);
    complain(entry.round, text);
    if (calling()) finish(Outcome::failed, text);
    return;
  }
  if (call_.down && entry.buffer) {
    for (; given_ < entry.ready; ++given_) {
      const Piece& it = entry.layout[given_];
      if (it.bytes) std::memcpy(call_.out[it.segment] + it.offset, entry.data(given_), it.bytes);
    }
  }
  if (entry.complete()) finish(Outcome::done);
}

// Ask above for the results that are decided, and elsewhere for one that does not come.
void Node::ask() {
  if (root() || said_bye_) return;
  const bool mine = calling() && next_ == frontier_;
  const bool decided = newest_ >= frontier_;
  // An offer asks for its result too; but not where it could not be made, or a stand-in answers.
  const bool orphan = mine && upstream_ > 0;
  if ((wanted_ < frontier_ && decided) ||
      (orphan && asked_for_ < frontier_ &&
       !asked_ranks_.contains(family_.ancestors[upstream_]))) {
    want(upstream_);
  }
  if (!mine) return;
  const double waited = wire_.now() - asked_at_;
  if (waited < limits_.orphan_seconds || waited < patience()) return;
  // Give up whoever announced it, and ask somebody else. Who has not answered is not asked again.
  Rank silent = family_.rank;
  if (const auto source = announced_.find(frontier_); source != announced_.end()) {
    silent = source->second.from;
    announced_.erase(source);
    asked_pieces_.clear();
  }
  for (const bool any : {false, true}) {
    for (std::size_t a = 0; a < family_.ancestors.size(); ++a) {
      const Rank rank = family_.ancestors[a];
      if (asked_ranks_.contains(rank) || gone_from_.contains(rank)) continue;
      if ((a == 0 && unanswered_) || (rank == silent && !any)) continue;
      return want(a);
    }
  }
  // All have been asked. If it is gone where an answer came from, silence elsewhere is no hope.
  if (!gone_from_.empty()) lose_frontier();
}

void Node::want(std::size_t ancestor) {
  const bool mine = calling() && next_ == frontier_;
  upstream_ = ancestor;
  const Rank rank = family_.ancestors[ancestor];
  Message message{header(Kind::want, frontier_)};
  message.header.last = mine && ancestor == 0 ? frontier_ : frontier_ + rounds_ahead - 1;
  if (mine) message.header.flags = calls;
  wire_.send(rank, message);
  wanted_ = message.header.last;
  asked_ranks_.insert(rank);
  asked_for_ = frontier_;
  asked_at_ = wire_.now();
}

void Node::on_gone(Rank from, Round round, Round oldest) {
  if (round != frontier_) return;
  gone_from_.insert(from);
  oldest_ = std::max({oldest, oldest_, frontier_ + 1});
  for (std::size_t a = 0; a < family_.ancestors.size(); ++a) {
    const Rank rank = family_.ancestors[a];
    if (!gone_from_.contains(rank) && !asked_ranks_.contains(rank) && (a || !unanswered_)) {
      return want(a);
    }
  }
  if (gone_from_.size() == family_.ancestors.size()) lose_frontier();
}

// The result at the frontier can be had nowhere. Go on relaying from a later round.
void Node::lose_frontier() {
  skip_to(oldest_);
  desynchronize();
}

// Forget all results, and go on with this one.
void Node::skip_to(Round round) {
  // Where they go back, results of the same rounds will lie elsewhere: those below must get them
  // from somebody else, for what they know of them is no longer true.
  withdraw(Object::What::result, history_.empty() ? round : std::max(round, history_.last() + 1));
  history_.clear();
  frontier_ = round;
  announced_.erase(announced_.begin(), announced_.lower_bound(round));
  gone_from_.clear();
  asked_pieces_.clear();
  wanted_ = asked_for_ = oldest_ = 0;
}

// This rank's calls fail from now on, until it has fetched a snapshot.
void Node::desynchronize() {
  desynchronized_ = true;
  if (calling()) {
    finish(Outcome::desynchronized,
           "the results that this rank lacks are no longer kept anywhere: call group.resync");
  }
}

// Tell a rank below of the results that it wants and does not know of.
void Node::tell(Rank rank, Listener& listener) {
  while (listener.first <= listener.last) {
    const Entry* entry = history_.find(listener.first);
    if (!entry) {
      const Round oldest = history_.empty() ? frontier_ : history_.first();
      if (listener.first >= oldest) return;
      Message message{header(Kind::gone, listener.first)};
      message.header.last = oldest;
      listener.last = 0;
      return wire_.send(rank, message);
    }
    const bool small = !entry->failed && entry->layout.bytes() <= wire_.inline_bytes(rank);
    if (entry->ready == listener.told || (small && !entry->complete())) return;
    if (!entry->failed) introduce(rank, listener.introduced, entry->fingerprint);
    Message message{header(Kind::result, entry->round)};
    message.header.fingerprint = entry->fingerprint;
    message.header.ready = entry->ready;
    if (entry->failed) {
      message.header.flags = failed;
      message.append(entry->error.data(), entry->error.size());
    } else {
      message.header.segments = static_cast<std::uint16_t>(entry->layout.segments().size());
      for (const Segment& segment : entry->layout.segments()) {
        const std::uint64_t row[2] = {static_cast<std::uint64_t>(segment.dtype), segment.count};
        message.append(row, sizeof row);
      }
      if (small) {
        message.header.flags = inlined;
        if (entry->buffer) message.append(entry->buffer.data(), entry->layout.bytes());
        message.body.resize(std::max<std::size_t>(message.body.size(), 1));
      } else {
        const auto addresses = addresses_of(entry->at);
        message.append(addresses.data(), addresses.size() * sizeof addresses[0]);
      }
    }
    wire_.send(rank, message);
    if (!entry->complete()) {
      listener.told = entry->ready;
      return;
    }
    ++listener.first;
    listener.told = 0;
  }
}

void Node::tell_all() {
  for (auto& [rank, listener] : listeners_) {
    tell(rank, listener);
    if (listener.wants_state) tell_state(rank, listener);
  }
  if (history_.empty()) return;
  const Round newest = history_.last() - (history_.find(history_.last())->ready == 0);
  for (const Child& child : children_) {
    Listener& listener = listeners_[child.rank];
    if (child.left || listener.noted || listener.last >= newest || child.round >= newest ||
        listener.noted_round >= newest) {
      continue;
    }
    Message message{header(Kind::note, newest)};
    message.header.last = newest;
    listener.noted = true;
    listener.noted_round = newest;
    wire_.send(child.rank, message);
  }
}

bool Node::over_budget(std::uint64_t bytes, std::size_t rounds) const {
  return bytes > limits_.history_bytes &&
         (rounds > limits_.history_rounds || bytes > limits_.history_most);
}

// Drop the results that nobody lacks any more, and the oldest ones where memory is short.
void Node::forget() {
  Round needed = desynchronized_ ? frontier_ : next_;
  for (const Child& child : children_) {
    if (!child.left) needed = std::min(needed, child.done);
  }
  const auto drop = [&] {
    withdraw(Object::What::result, history_.first() + 1);
    history_.drop_oldest();
  };
  while (!history_.empty() && history_.oldest().complete() && history_.first() < needed) drop();
  while (history_.rounds() > 1 && history_.oldest().complete() && !listeners_.empty() &&
         !(calling() && history_.first() == next_) &&
         over_budget(history_.bytes(), history_.rounds())) {
    drop();
  }
}

// --- Calls that do not fit ---

void Node::introduce(Rank to, std::set<std::uint64_t>& known, std::uint64_t fingerprint) {
  if (known.size() >= most_words) known.clear();
  if (!words_.contains(fingerprint) || !known.insert(fingerprint).second) return;
  Message message{header(Kind::words, 0)};
  message.header.fingerprint = fingerprint;
  message.append(words_[fingerprint].data(), words_[fingerprint].size());
  wire_.send(to, message);
}

std::string Node::words_of(std::uint64_t fingerprint) const {
  const auto found = words_.find(fingerprint);
  return found == words_.end() ? "something else" : found->second;
}

std::string Node::clash(Rank one, std::uint64_t its, Round round, Rank other,
                        std::uint64_t others) const {
  return "GroupMismatch: ranks called different things in the same round; rank " +
         std::to_string(one) + ": round " + std::to_string(round) + ", " + words_of(its) +
         "; rank " + std::to_string(other) + ": round " + std::to_string(round) + ", " +
         words_of(others);
}

void Node::check_offer(Child& child) {
  if (child.withdrawn || child.round == 0) return;
  std::uint64_t expected = child.fingerprint;
  Rank other = family_.rank;
  if (calling() && child.round == next_) {
    expected = call_.fingerprint;
  } else if (const Entry* entry = history_.find(child.round); entry && !entry->failed) {
    expected = entry->fingerprint;
    if (!root()) other = family_.ancestors.back();
  }
  if (expected != child.fingerprint) {
    child.withdrawn = true;
    complain(child.round, clash(child.rank, child.fingerprint, child.round, other, expected));
  } else if (leaving_ && child.round >= next_ && !calling()) {
    child.withdrawn = true;
    refuse(child.round, "GroupMismatch: rank " + std::to_string(child.rank) + " called " +
                            words_of(child.fingerprint) + ", but rank " +
                            std::to_string(root() ? family_.rank : family_.ancestors.back()) +
                            " closed the group");
  }
}

void Node::check_offers() {
  for (Child& child : children_) check_offer(child);
  if (!calling() || !call_.up || call_.skipped || children_.empty() || !call_.refusal.empty()) return;
  // With too many children gone for good, waiting would never end.
  const std::vector<bool> possible = may_offer(decoded_);
  if (closed_.empty() || decoder_.decode(possible, possible)) return;
  if (!root() && call_.erased.empty()) return retire();
  const std::string text = "GroupMismatch: rank " + std::to_string(family_.rank) + " called " +
                           call_.words + ", but " + listed(closed_) + " closed the group";
  if (root()) {
    decide_error(text);
  } else {  // in other rounds it may offer
    complain(next_, text);
  }
}

// The children whose message this rank has, or may get in this round.
std::vector<bool> Node::may_offer(std::uint32_t piece) const {
  std::vector<bool> out(children_.size());
  for (std::size_t row = 0; row < children_.size(); ++row) {
    const Child& child = children_[row];
    const bool erased = !call_.erased.empty() && call_.erased[row];
    out[row] = !erased && (!child.retired || usable(child, piece));
  }
  return out;
}

// Tell the parent that there will be no more offers; why is in `closed_`.
void Node::retire() {
  if (retired_ || root()) return;
  retired_ = true;
  Message message{header(Kind::bye, 0)};
  message.header.flags = relays;
  message.append(closed_.data(), closed_.size() * sizeof(Rank));
  wire_.send(family_.ancestors.front(), message);
}

// A call that can never be answered, since the root has closed the group. If it has.
void Node::refuse(Round round, const std::string& text) {
  if (!root()) {
    Message message{header(Kind::complaint, round)};
    message.header.flags = closed;
    message.append(text.data(), text.size());
    return wire_.send(family_.ancestors.front(), message);
  }
  if (!leaving_) {  // not yet
    refused_.emplace(round, text);
  } else if (round >= next_ && !calling()) {
    call_ = {};
    outcome_ = Outcome::pending;
    decide_error(text);
  }
}

// A rank asks for the result of a round that it has called, but the root has left.
void Node::refuse_called(Rank rank, const Listener& listener) {
  if (listener.called < next_) return;
  refuse(listener.called, "GroupMismatch: rank " + std::to_string(rank) + " called round " +
                              std::to_string(listener.called) + ", but rank " +
                              std::to_string(family_.rank) + " closed the group");
}

// Let the root fail this round, or its next one, on every rank.
void Node::complain(Round round, const std::string& text) {
  if (!root()) {
    Message message{header(Kind::complaint, round)};
    message.append(text.data(), text.size());
    return wire_.send(family_.ancestors.front(), message);
  }
  if (round <= complained_) return;  // several ranks notice the same
  complained_ = round;
  pending_error_ = text;
  const Entry* entry = history_.find(next_);
  if (calling() && (!entry || entry->ready == 0)) decide_error(text);
}

void Node::decide_error(const std::string& text) {
  const std::string error = text;  // `text` may be `pending_error_`
  pending_error_.clear();
  if (!history_.empty() && history_.last() == next_) history_.drop_newest();
  for (auto& [rank, listener] : listeners_) {
    if (listener.first == next_) listener.told = 0;  // of a result that is none
  }
  Entry& entry = history_.add(
      {.round = next_, .fingerprint = call_.fingerprint, .failed = true, .error = error});
  decided(entry, entry.layout.size());
}

// --- Snapshots ---

void Node::keep_state(Round round, std::span<const std::byte> state) {
  Buffer copy = pool_.take(state.size());
  if (!state.empty()) std::memcpy(copy.data(), state.data(), state.size());
  withdraw(Object::What::state, round);
  state_ = std::move(copy);
  state_bytes_ = state.size();
  state_kept_ = round;
}

void Node::tell_state(Rank rank, Listener& listener) {
  listener.wants_state = false;
  // A snapshot is of use while the rounds after it can be had.
  const bool useful = state_kept_ >= frontier_ || history_.find(state_kept_);
  Message message{header(Kind::state, useful ? state_kept_ : 0)};
  const std::uint64_t where[2] = {state_bytes_, reinterpret_cast<std::uintptr_t>(state_.data())};
  message.append(where, sizeof where);
  wire_.send(rank, message);
}

void Node::ask_state() {
  fetched_state_ = {};
  fetched_state_.wanted = true;
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
  const auto where = message.values<std::uint64_t>(0, 2);
  state.from = from;
  state.round = message.header.round;
  state.bytes = where[0];
  state.address = where[1];
  state.layout = Layout({{DType::bytes, state.bytes}}, limits_.piece_bytes);
  state.buffer = pool_.take(state.bytes);
  state.here.assign(state.layout.size(), false);
}

bool Node::follow_state() {
  State& state = fetched_state_;
  if (!state.wanted || state.complete || state.missing) return false;
  if (wire_.now() - state.asked_at > patience()) {
    // Nothing comes: ask somebody else, and in the end all those again that may have one.
    if (state.asked_ranks.size() == family_.ancestors.size()) state.asked_ranks = state.without;
    ask_next_state();
    return false;
  }
  if (!state.round) return false;
  const bool direct = wire_.direct(state.from);
  while (state.asked < state.layout.size() &&
         (direct || state.asked < state.fetched + pieces_ahead)) {
    const Piece& it = state.layout[state.asked];
    const Wire::Fetch fetch =
        it.bytes == 0 ? Wire::Fetch::done
                      : wire_.fetch(state.from, {Object::What::state, state.round}, state.asked,
                                    state.address + it.offset, state.buffer.data() + it.offset,
                                    it.bytes);
    if (fetch == Wire::Fetch::gone) {  // a newer snapshot has taken its place
      state.asked_ranks.erase(state.from);
      ask_next_state();
      return true;
    }
    ++state.asked;
    if (fetch == Wire::Fetch::done && !state.here[state.asked - 1]) {
      state.here[state.asked - 1] = true;
      ++state.fetched;
    }
    state.asked_at = wire_.now();
  }
  state.complete = state.fetched == state.layout.size();
  return false;
}

void Node::resume() {
  const Round round = fetched_state_.round;
  fetched_state_ = {};
  desynchronized_ = false;
  outcome_ = Outcome::done;
  next_ = round;
  if (round != frontier_ && !history_.find(round)) skip_to(round);
}

// --- The end ---

void Node::leave() {
  leaving_ = true;
  closed_.push_back(family_.rank);
  if (!std::ranges::all_of(children_, &Child::left)) retire();
  for (Child& child : children_) check_offer(child);
  for (const auto& [round, text] : std::exchange(refused_, {})) refuse(round, text);
  if (root()) {
    for (const auto& [rank, listener] : listeners_) refuse_called(rank, listener);
  }
  say_bye();
}

void Node::say_bye() {
  if (!leaving_ || said_bye_) return;
  if (!std::ranges::all_of(children_, &Child::left)) return;
  said_bye_ = true;
  if (root()) return;
  Message message{header(Kind::bye, 0)};
  message.append(absent_.data(), absent_.size() * sizeof(Rank));
  wire_.send(family_.ancestors.front(), message);
}

std::vector<Rank> Node::not_left() const {
  std::vector<Rank> out;
  for (const Child& child : children_) {
    if (!child.left) out.push_back(child.rank);
  }
  return out;
}

void Node::give_up() {
  for (Child& child : children_) {
    if (child.left) continue;
    child.left = true;
    absent_.push_back(child.rank);
  }
  say_bye();
}

std::string Node::waiting_for() const {
  if (!calling() || !call_.up || call_.skipped || children_.empty() || decoding_) return {};
  std::vector<Rank> missing;
  for (const Child& child : children_) {
    if (!usable(child, decoded_)) missing.push_back(child.rank);
  }
  if (missing.empty()) return {};
  return "round " + std::to_string(next_) + ": rank " + std::to_string(family_.rank) +
         " waits for " + listed(missing) + "; it needs " + std::to_string(decoder_.enough()) +
         " of its " + std::to_string(children_.size()) + " children";
}

std::string Node::status() const {
  const auto number = [](auto value) { return std::to_string(value); };
  std::string out = "rank " + number(family_.rank) + (calling() ? " calls" : " will call") + " round " +
                    number(next_) + ", lacks " + number(frontier_) + ", knows of " +
                    number(newest_) + ", decoded " + number(decoded_) + " of " +
                    number(incoming_.size()) + " pieces, offered " +
                    (offering_ ? number(offered_) : "nothing") + (held_back_ ? ", held back" : "") +
                    (unanswered_ ? ", unanswered" : "") + ", asks rank " +
                    (root() ? "nobody" : number(family_.ancestors[upstream_])) + " up to " +
                    number(wanted_);
  for (const auto& [round, news] : announced_) {
    out += "; rank " + number(news.from) + " has " + number(news.ready) + " of " + number(round);
  }
  for (const Child& child : children_) {
    const Listener& listener = listeners_.at(child.rank);
    out += "; child " + number(child.rank) + " offers " + number(child.ready) + " of round " +
           number(child.round) + (child.withdrawn ? " (withdrawn)" : "") +
           (child.stalled ? " (stalled)" : "") + (child.left ? " (left)" : "") + ", lacks " +
           number(child.done) + ", wants " + number(listener.first) + " to " + number(listener.last);
  }
  return out;
}

std::optional<std::span<const std::byte>> Node::read(Object object, std::uint32_t piece) const {
  if (object.what == Object::What::message) {
    if (!calling() || object.round != next_ || !offering_ || piece >= offered_) return std::nullopt;
    const Piece& it = outgoing_[piece];
    return std::span<const std::byte>{sum_at_[it.segment] + it.offset, it.bytes};
  }
  if (object.what == Object::What::result) {
    const Entry* entry = history_.find(object.round);
    if (!entry || entry->failed || piece >= entry->ready) return std::nullopt;
    return std::span<const std::byte>{entry->data(piece), entry->layout[piece].bytes};
  }
  if (object.round != state_kept_) return std::nullopt;
  const Layout layout({{DType::bytes, state_bytes_}}, limits_.piece_bytes);
  if (piece >= layout.size()) return std::nullopt;
  return std::span<const std::byte>{state_.data() + layout[piece].offset, layout[piece].bytes};
}

}  // namespace jaxcoded
