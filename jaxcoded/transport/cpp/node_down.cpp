// A node on the way down: results from above, for this rank and the ranks below.
#include "node.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "readable.h"

namespace jaxcoded {
namespace {

constexpr Round rounds_ahead = 8;  // how many results a late rank requests at a time
constexpr std::size_t most_announced = 64;

}  // namespace

// Give an entry memory of its own.
void Node::place(Entry& entry) {
  entry.buffer = pool_.take(entry.layout.bytes());
  entry.at.clear();
  for (std::size_t s = 0; s < entry.layout.segments().size(); ++s) {
    entry.at.push_back(entry.buffer.data() + entry.layout.start(s));
  }
}

// Record that the first `ready` pieces of the newest result have arrived.
void Node::decided(Entry& entry, std::uint32_t ready) {
  if (ready == entry.ready) return;
  entry.ready = ready;
  if (!entry.alone) newest_ = std::max(newest_, entry.round);
  if (entry.complete()) {
    frontier_ = entry.round + 1;
    announced_.erase(announced_.begin(), announced_.lower_bound(frontier_));
    upstream_.advanced();
    asked_pieces_.clear();
    end_sections();  // this may run out of memory
    if (formed_.round < entry.round) drop_formed();
  }
  upstream_.moved(wire_.now());
  if (entry.complete()) spread(entry);
  tell_all();
  hand_over(entry);
}

void Node::on_result(Rank from, const Message& message) {
  const Header& head = message.header;
  const bool by_root = !(head.flags & alone);
  // the round may still fail while only a part of its result is known
  const bool settled = (head.flags & (failed | inlined)) || head.round != failed_alone_.first() ||
                       head.ready == laid_out(segments_of(message)).size();
  if (by_root && settled && !desynchronized_) {
    const auto heard = failed_alone_.heard(head.round, (head.flags & failed) != 0);
    if (heard == FailedAlone::Heard::confirmed) {  // the round failed for all ranks
      if (Entry* entry = history_.find(head.round)) entry->alone = false;
      for (const Child& child : children_) wire_.send(child.rank, message);
    } else if (heard == FailedAlone::Heard::contradicted) {
      take_back();
    }
  }
  if (head.round < frontier_) return;
  // A rank further up was asked for this result while a nearer rank was silent. The nearer rank has sent
  // something since. If all ranks below fetched from further up, they would crowd each other out.
  if (!(head.flags & failed) && !upstream_.may_use(height(from))) return;
  // The rank has announced the result before it lost it. It may be nearer than the ranks that have the result.
  if (!(head.flags & failed) && head.round == frontier_ && upstream_.gone_from(from)) return;
  const auto known = announced_.find(head.round);
  if (known == announced_.end() && announced_.size() >= most_announced) return;
  if (known != announced_.end()) {
    if (known->second.failed) return;  // the round stays failed, even if other ranks announce pieces
    // Fetch from the nearest rank that has the result.
    const bool better = from == known->second.from ? head.ready > known->second.ready
                                                   : height(from) < height(known->second.from);
    if (!better && !(head.flags & failed)) return;
    if (from != known->second.from && head.round == frontier_) asked_pieces_.clear();
  }
  Announcement news;
  news.from = from;
  news.ready = head.ready;
  news.failed = (head.flags & failed) != 0;
  news.alone = news.failed && !by_root;
  news.fingerprint = head.fingerprint;
  if (news.failed) {
    news.body = message.body;
  } else {
    read_announcement(news, message);
    check_sections(head);
  }
  announced_[head.round] = std::move(news);
}

std::vector<Segment> Node::segments_of(const Message& message) {
  const std::size_t count = message.header.segments;
  const auto table = message.values<std::uint64_t>(0, 2 * count);
  std::vector<Segment> out;
  std::uint64_t bytes = 0;
  for (std::size_t s = 0; s < count; ++s) {
    if (table[2 * s] > static_cast<std::uint64_t>(DType::float64)) throw Damaged();
    if (table[2 * s + 1] > most_bytes()) throw Damaged();
    out.push_back({static_cast<DType>(table[2 * s]), table[2 * s + 1]});
    bytes += out.back().bytes();
    if (bytes > most_bytes()) throw Damaged();
  }
  return out;
}

// Read from a message where a result lies in the memory of a rank above, or the result itself.
void Node::read_announcement(Announcement& news, const Message& message) const {
  const Header& head = message.header;
  news.segments = segments_of(message);
  const Entry* begun = history_.find(head.round);
  if (begun && begun->layout.segments() != news.segments) throw Damaged();
  const bool in_sections = sections_.round == head.round && sections_.purpose != Purpose::message;
  if (in_sections && sections_.layout.segments() != news.segments) throw Damaged();
  const Layout fresh = begun ? Layout() : laid_out(news.segments);
  const Layout& layout = begun ? begun->layout : fresh;
  const std::size_t start = 2 * head.segments * sizeof(std::uint64_t);
  if (head.flags & inlined) {
    news.body.assign(message.body.begin() + static_cast<std::ptrdiff_t>(start), message.body.end());
    if (news.body.size() < layout.bytes()) throw Damaged();
  } else {
    news.addresses = message.values<std::uint64_t>(start, head.segments);
  }
  if (news.ready > layout.size()) throw Damaged();
}

// Return the entry of the round at the frontier, which is made if necessary; null if the entry must wait.
Entry* Node::entry_at_frontier(const Announcement& news) {
  const std::string error =
      news.failed ? readable({reinterpret_cast<const char*>(news.body.data()), news.body.size()})
                  : std::string();
  if (Entry* entry = history_.find(frontier_)) {
    return entry->failed == news.failed ? entry
                                        : &fail_newest(news.fingerprint, error, news.alone);
  }
  Entry entry{.round = frontier_,
              .fingerprint = news.fingerprint,
              .failed = news.failed,
              .error = error,
              .alone = news.alone,
              .layout = laid_out(news.segments)};
  const bool own_call = calling() && next_ == frontier_;
  // the program will fetch the result at once
  const bool comes = own_call && up_.call.shared && !up_.call.complete && !up_.call.lacks_memory;
  if (comes && listeners_.empty()) return nullptr;
  const bool in_place = own_call && !up_.call.out.empty() && up_.call.complete && listeners_.empty() && up_.call.down &&
                        !news.failed && news.fingerprint == up_.call.fingerprint &&
                        news.segments == up_.call.total;
  // A leaf keeps only the first results that it needs for its own calls. The ranks above keep the later results.
  if (!own_call && listeners_.empty() && !history_.empty() &&
      history_.bytes() + entry.layout.bytes() > limits_.ahead_bytes) {
    return nullptr;
  }
  if (in_place) {
    entry.at = up_.call.out;
  } else if (!news.segments.empty()) {
    place(entry);
  }
  return &history_.add(std::move(entry));
}

// Turn the newest result into an error, although some of its pieces may be known. These pieces stay in place,
// as other ranks may be reading them.
Entry& Node::fail_newest(std::uint64_t fingerprint, const std::string& error, bool alone) {
  Entry& entry = history_.newest();
  entry.fingerprint = fingerprint;
  entry.failed = true;
  entry.error = error;
  entry.alone = alone;
  entry.remains = std::exchange(entry.ready, 0);
  history_.account(entry);
  for (auto& [rank, listener] : listeners_) listener.changed(entry.round);
  return entry;
}

bool Node::follow() {
  if (root()) return false;
  // the result may soon overwrite this rank's own vector
  if (up_.delegated && announced_.contains(frontier_)) abandon_sections();
  const auto announcement = announced_.find(frontier_);
  const bool known = announcement != announced_.end();
  if (known && !announcement->second.alone && failed_alone_.first() && !desynchronized_) {
    take_back();  // the root had announced the result before the round failed here
    return true;
  }
  if (const auto more = follow_sections()) return *more;
  if (!known) return false;
  const Announcement& news = announcement->second;
  Entry* entry = entry_at_frontier(news);
  if (!entry) return false;
  if (news.failed) {
    if (news.alone) failed_alone_.add(frontier_);
    decided(*entry, entry->layout.size());
    return true;
  }
  if (!news.body.empty()) {
    for (std::uint32_t p = entry->ready; p < entry->layout.size(); ++p) {
      const Piece piece = entry->layout[p];
      if (piece.bytes == 0) continue;
      std::memcpy(entry->at[piece.segment] + piece.offset,
                  news.body.data() + entry->layout.start(piece.segment) + piece.offset, piece.bytes);
    }
    decided(*entry, entry->layout.size());
    return true;
  }
  entry->arrived.resize(entry->layout.size());
  // a result in a buffer is fetched by ranks below; otherwise it goes to the program
  const Copy how = entry->buffer ? Copy::cached : for_program(entry->layout.bytes());
  const std::uint32_t ahead = wire_.direct(news.from) ? 1 : pieces_ahead;
  std::uint64_t bytes = 0;
  std::uint32_t ready = entry->ready;
  while (ready < news.ready && bytes < limits_.announced_bytes) {
    for (std::uint32_t p = ready; p < std::min(news.ready, ready + ahead); ++p) {
      const Piece piece = entry->layout[p];
      if (entry->arrived[p] || asked_pieces_.contains(p)) continue;
      if (piece.bytes == 0) {
        entry->arrived[p] = true;
        continue;
      }
      fetched_bytes_ += piece.bytes;
      switch (wire_.fetch(news.from, {Object::What::result, frontier_}, p,
                          news.addresses[piece.segment] + piece.offset,
                          entry->at[piece.segment] + piece.offset, piece.bytes, how)) {
        case Wire::Fetch::done:
          entry->arrived[p] = true;
          break;
        case Wire::Fetch::pending:
          asked_pieces_.insert(p);
          break;
        case Wire::Fetch::gone:
          lost_source();
          return true;
      }
    }
    if (!entry->arrived[ready]) break;
    bytes += entry->layout[ready].bytes;
    ++ready;
  }
  const bool more = ready < news.ready && (entry->arrived[ready] || !asked_pieces_.contains(ready));
  const bool last = ready == entry->layout.size();
  decided(*entry, ready);
  return more || (last && announced_.contains(frontier_));
}

// Act on the news that the rank that announced the result at the frontier no longer has it.
void Node::lost_source() {
  const Rank from = announced_.at(frontier_).from;
  announced_.erase(frontier_);
  asked_pieces_.clear();
  on_gone(from, frontier_, 0);
}

// Copy the result of the call in progress to the caller, as far as its pieces have arrived.
void Node::hand_over(const Entry& entry) {
  if (!calling() || entry.round != next_) return;
  if (entry.failed) {
    if (root() && up_.call.shared && !up_.call.lends()) dealt(false);
    return finish(Outcome::failed, entry.error);
  }
  if (up_.call.lacks_memory) return lack_memory();
  if (!up_.call.complete) return;
  if (entry.fingerprint != up_.call.fingerprint) {
    if (!entry.complete()) return;  // this rank still has to fetch the rest of the result
    const std::string text = clash(family_.rank, up_.call.fingerprint, entry.round,
                                   family_.ancestors.back(), entry.fingerprint);
    alert(entry.round, text);
    if (calling()) finish(Outcome::failed, text);
    return;
  }
  if (!root() && up_.call.down && entry.layout.segments() != up_.call.total) {
    const std::string text = unreadable(upstream_.source(), "a result of other lengths");
    alert(entry.round, text);
    if (calling()) finish(Outcome::failed, text);
    return;
  }
  if (up_.call.down && (entry.buffer || up_.call.feed)) {
    // ranks below may not know yet that no section is formed from this rank's own vector any more
    if (up_.given < entry.ready && !children_.empty()) withdraw(Object::What::own, next_ + 1);
    for (; up_.given < entry.ready; ++up_.given) {
      const Piece piece = entry.layout[up_.given];
      if (!piece.bytes) continue;
      if (entry.buffer && !up_.call.out.empty()) {
        copy(up_.call.out[piece.segment] + piece.offset, entry.data(up_.given), piece.bytes,
             for_program(entry.layout.bytes()));
      }
      if (up_.call.feed) give(entry.layout, up_.given);
    }
  }
  if (entry.complete()) finish(Outcome::done);
}

// Tell the feed which bytes are in place, in order. The pieces of slices alternate, so with slices the feed is
// told of a vector only once the whole vector is in place.
void Node::give(const Layout& layout, std::uint32_t piece) {
  const Piece range = layout[piece];
  if (limits_.slices == 1) return up_.call.feed->given(range.segment, range.offset, range.bytes);
  if (piece + 1 < layout.first(range.segment + 1)) return;
  up_.call.feed->given(range.segment, 0, layout.segments()[range.segment].bytes());
}

// Return how far above this rank an ancestor is; 0 for the parent.
std::size_t Node::height(Rank ancestor) const {
  return static_cast<std::size_t>(std::ranges::find(family_.ancestors, ancestor) -
                                  family_.ancestors.begin());
}

// Whether a rank is above this rank. Siblings exchange sections with this rank, but know no results for it.
bool Node::is_above(Rank rank) const { return height(rank) < family_.ancestors.size(); }

bool Node::awaited_below() const {
  const auto waits = [&](const Listener& listener) { return !listener.gone && listener.called >= frontier_; };
  return std::ranges::any_of(listeners_ | std::views::values, waits);
}

// Ask above for decided results. If a result does not come, ask another rank for it.
void Node::ask() {
  if (root() || left()) return;
  // an announced result of shared work is not late: it waits for this rank's program
  const bool is_announced = up_.call.shared && !up_.call.complete && announced_.contains(frontier_);
  const bool own_call = calling() && next_ == frontier_ && !is_announced;
  const bool decided = newest_ >= frontier_;
  // an offer that is held back until the root sends something does not ask for the result
  const bool unsure = own_call && unsure_of() && upstream_.may_ask(upstream_.source());
  if (((decided || unsure) && upstream_.wanted() < frontier_) ||
      (own_call && upstream_.stand_in_unasked(frontier_))) {
    want(upstream_.source());
  }
  if (!own_call && !watches_ && !awaited_below()) return;
  // The rank that has the result, or will have it, may only be slow. Ask whether it is there, and give it up if
  // it stays silent. A rank that has not answered is not asked again.
  const auto source = announced_.find(frontier_);
  const bool announced = source != announced_.end();
  const Rank silent = announced ? source->second.from : upstream_.source();
  const double quiet = wire_.now() - upstream_.silent_since();
  const bool patient = quiet < limits_.orphan_seconds || quiet < patience(upstream_.stuck_since());
  if (patient && !upstream_.dead(silent)) return;
  if (upstream_.may_ask(silent)) return want(silent);
  if (announced) {
    announced_.erase(source);
    asked_pieces_.clear();
  }
  if (const auto next = upstream_.next()) return want(*next);
  // All ranks have been asked. If a rank has answered that the result is gone, the silent ranks will hardly
  // have it.
  if (upstream_.gone_somewhere()) lose_frontier();
}

void Node::want(Rank rank) {
  const bool own_call = calling() && next_ == frontier_;
  Message message{header(Kind::want, frontier_)};
  const bool one = own_call && rank == upstream_.parent();
  message.header.last = one ? frontier_ : frontier_ + rounds_ahead - 1;
  message.header.fingerprint = desynchronized_ ? 0 : unsure_of();
  if (own_call || awaited_below()) message.header.flags = calls;
  wire_.send(rank, message);
  upstream_.asked(rank, frontier_, message.header.last, wire_.now());
}

void Node::on_gone(Rank from, Round round, Round oldest) {
  if (unsure_of() && round <= unsure_of() && !desynchronized_) return take_back();
  if (round != frontier_) return;
  // forget what that rank announced earlier, so that this rank accepts a rank further away, or with less of the
  // result
  if (const auto known = announced_.find(round); known != announced_.end() && known->second.from == from) {
    announced_.erase(known);
    asked_pieces_.clear();
  }
  upstream_.gone(from, std::max(oldest, frontier_ + 1));
  if (const auto next = upstream_.next()) return want(*next);
  if (upstream_.gone_everywhere()) lose_frontier();
}

// No rank has the result at the frontier any more. Continue to relay from a later round.
void Node::lose_frontier() {
  skip_to(upstream_.oldest());
  desynchronize();
}

// Forget all results, and continue with this round.
void Node::skip_to(Round round) {
  end_sections();
  // If the frontier goes back, results of the same rounds will lie at other addresses. So the addresses that
  // ranks below know are no longer valid. These ranks must get the results from another rank.
  withdraw(Object::What::result, history_.empty() ? round : std::max(round, history_.last() + 1));
  history_.clear();
  frontier_ = round;
  announced_.erase(announced_.begin(), announced_.lower_bound(round));
  upstream_.restart();
  asked_pieces_.clear();
}

// Other ranks may have the result of a round that failed at this rank alone. Ranks below must not copy this
// failure: they get this result, and later ones, from the ranks above.
void Node::take_back() {
  skip_to(failed_alone_.first());
  for (const Child& child : children_) tell_gone(child.rank, frontier_, frontier_);
  desynchronize();
}

// Make this rank's calls fail until it has fetched a snapshot. If the root is dead, no snapshot helps: then the
// calls fail as on the other ranks.
void Node::desynchronize(const std::string& why) {
  desynchronized_ = true;
  if (!calling()) return;
  const bool rootless = upstream_.rootless();
  finish(Outcome::desynchronized,
         rootless ? without_a_root(next_)
         : failed_alone_.first()
             ? why + "round " + std::to_string(failed_alone_.first()) +
                   " failed at this rank alone, and others may have its result: call group.resync"
             : why + "the results that this rank lacks are no longer kept anywhere: call group.resync");
  if (rootless) outcome_ = Outcome::failed;
}

void Node::tell_gone(Rank rank, Round round, Round oldest) {
  Message message{header(Kind::gone, round)};
  message.header.last = oldest;
  wire_.send(rank, message);
}

// Announce to a rank below the results that it wants and does not know of.
void Node::tell(Rank rank, Listener& listener) {
  while (listener.first <= listener.last) {
    const Entry* entry = history_.find(listener.first);
    if (!entry) {
      const Round oldest = history_.empty() ? frontier_ : history_.first();
      if (listener.first >= oldest) return;
      tell_gone(rank, listener.first, oldest);
      return listener.want_nothing();
    }
    const bool small = !entry->failed && entry->layout.bytes() <= wire_.inline_bytes(rank);
    if (entry->ready == listener.known_pieces) return;
    if (!entry->complete() && (small || will_spread_to(rank, *entry))) return;
    if (!entry->failed) introduce(rank, listener.introduced, entry->fingerprint);
    Message message{header(Kind::result, entry->round)};
    message.header.fingerprint = entry->fingerprint;
    message.header.ready = entry->ready;
    if (entry->failed) {
      message.header.flags = entry->alone ? failed | alone : failed;
      message.append(entry->error.data(), entry->error.size());
    } else {
      message.header.done = entry->sections;
      message.header.segments = static_cast<std::uint32_t>(entry->layout.segments().size());
      for (const Segment& segment : entry->layout.segments()) {
        const std::uint64_t row[2] = {static_cast<std::uint64_t>(segment.dtype), segment.count};
        message.append(row, sizeof row);
      }
      if (small) {
        message.header.flags = inlined;
        if (entry->buffer) message.append(entry->buffer.data(), entry->layout.bytes());
        message.body.resize(std::max<std::size_t>(message.body.size(), 1));
      } else {
        append_addresses(message, entry->at);
      }
    }
    wire_.send(rank, message);
    if (!entry->complete()) {
      listener.known_pieces = entry->ready;
      return;
    }
    listener.next();
  }
}

void Node::tell_all() {
  for (auto& [rank, listener] : listeners_) {
    tell(rank, listener);
    if (listener.wants_state) tell_state(rank, listener);
  }
  if (history_.empty()) return;
  const Round newest = std::min(newest_, history_.last() - (history_.find(history_.last())->ready == 0));
  for (const Child& child : children_) {
    if (child.left || child.offer.round >= newest) continue;
    if (listeners_[child.rank].note(newest)) note(child.rank, newest);
  }
}

void Node::note(Rank rank, Round newest, std::uint8_t flags) {
  Message message{header(Kind::note, newest)};
  message.header.last = newest;
  message.header.flags = flags;
  wire_.send(rank, message);
}

void Node::on_want(Rank rank, Listener& listener, const Header& head) {
  Round first = head.fingerprint ? std::min(head.fingerprint, head.round) : head.round;
  const auto alone = [&](const Entry* entry) { return entry && entry->alone; };  // the root did not decide this
  while (first < head.round && alone(history_.find(first))) ++first;
  listener.want(first, head.last);
  if (head.flags & calls) {
    const bool own_call = calling() && next_ == frontier_;
    if (!own_call && !awaited_below()) upstream_.waits(wire_.now());
    if (std::exchange(listener.called, head.round) != head.round) listener.called_at = wire_.now();
  }
  if (root() && departures_.leaving()) refuse_called(rank, listener);
  tell(rank, listener);
  // Tell a rank that asks that this rank is there, even if there is no result yet.
  const bool answered = listener.first > head.round || listener.known_pieces || !listener.last;
  if (!answered) note(rank, newest_);
}

bool Node::over_budget(std::uint64_t bytes, std::size_t rounds) const {
  return bytes > limits_.history_bytes &&
         (rounds > limits_.history_rounds || (bytes > limits_.history_most && rounds > limits_.history_least));
}

// Drop the results that no rank lacks any more, and the oldest ones if they take too much memory. The root
// keeps the results of its own next calls, which it can get from no other rank.
void Node::forget() {
  const Round needed = lacked_below(desynchronized_ || has_left() ? frontier_ : next_);
  const auto drop = [&] {
    withdraw(Object::What::result, history_.first() + 1);
    history_.drop_oldest();
  };
  while (!history_.empty() && history_.oldest().complete() && history_.first() < needed) drop();
  while (history_.rounds() > 1 && history_.oldest().complete() && !listeners_.empty() &&
         !(root() && history_.first() >= next_) &&
         over_budget(history_.bytes(), history_.rounds())) {
    drop();
  }
  // the call in progress, which still lacks parts, has lost its result
  if (calling() && next_ < frontier_ && !history_.find(next_)) desynchronize();
}

}  // namespace jaxcoded
