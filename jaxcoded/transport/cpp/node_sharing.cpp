// A round of shared work: blocks of the batch go to the ranks that have time for them.
//
// The root's ledger determines which rank computes which block. A rank's vector belongs to its program, which
// lends the vector to other ranks while the program waits for its next block. Once the vectors hold every block
// exactly once, the root sums all vectors. Only then do programs learn that the round is over.
#include "node.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace jaxcoded {

void Node::share_blocks(const std::vector<std::vector<Rank>>& holders) {
  work_.own.clear();
  work_.holders = holders;
  for (Block block = 0; block < holders.size(); ++block) {
    if (holders[block].front() == family_.rank) work_.own.push_back(block);
  }
  work_.owned = work_.own.size();
  if (!root()) return;
  std::vector<std::vector<std::size_t>> members;
  for (const auto& ranks : holders) {
    auto& of_block = members.emplace_back();
    for (const Rank rank : ranks) {
      const auto child = std::ranges::find(children_, rank, &Child::rank);
      // the first member is this rank itself
      of_block.push_back(rank == family_.rank ? 0 : static_cast<std::size_t>(child - children_.begin()) + 1);
    }
  }
  work_.ledger.emplace(std::move(members), children_.size() + 1, limits_.orphan_seconds,
                       limits_.waits_for_all);
}

void Node::replay(const std::vector<Dealt>& rounds) {
  work_.own.clear();  // the root decides which rank computes which block
  work_.replayed.emplace();
  for (const Dealt& dealt : rounds) work_.replayed->emplace(dealt.round, dealt);
}

// --- The program and its blocks ---

// Begin with this rank's own blocks, unless it must ask first or the round is already over.
void Node::begin_share() {
  const bool claims = up_.in_time && !work_.asks_first;
  up_.share = Share(up_.call.lends(), claims ? work_.own : std::vector<Block>());
  up_.added_at = up_.started;
  if (up_.call.skipped) up_.share.leave();
  const auto block = audited();
  up_.audits = claims && block && auditor(*block) == family_.rank;
}

void Node::come_for_block(const std::vector<const std::byte*>& own) {
  if (!calling()) return;
  if (const auto block = up_.share.computes()) {
    ++up_.blocks;
    up_.cost += cost_of(*block);
    up_.busy += wire_.now() - up_.computing_since;
  }
  const bool tells = up_.share.done() || root() || up_.share.sealed();
  up_.added_at = wire_.now();
  up_.call.own = own;
  up_.lent = true;
  if (!root()) {
    up_.sum_at.clear();
    for (const std::byte* vector : own) up_.sum_at.push_back(const_cast<std::byte*>(vector));
  }
  if (tells) tell_share();
}

// Return what a block of the call costs, in units of a usual block.
double Node::cost_of(Block block) const {
  return block < up_.call.costs.size() ? up_.call.costs[block] : 1;
}

std::optional<Work> Node::take_block() {
  if (no_more_blocks()) {
    // another rank, late in this round, may still form a section from these vectors; the end of a call withdraws them
    if (calling()) withdraw(Object::What::message, next_ + 1);
    stop_lending();
    return std::nullopt;
  }
  const bool fresh = up_.share.fresh();
  const auto audit = audited();
  if (std::exchange(up_.audits, false)) {
    stop_lending();
    return Work{*audit, fresh, Audit::only_told};
  }
  const auto block = up_.share.take();
  if (!block) return std::nullopt;
  up_.computing_since = wire_.now();
  stop_lending();
  return Work{*block, fresh, block == audit ? Audit::told : Audit::none};
}

void Node::stop_lending() {
  up_.lent = false;
  up_.call.own.clear();
  up_.offered = 0;
}

void Node::leave_call() {
  if (!calling() || up_.call.complete) return;
  if (!up_.call.shared) {
    if (root()) return end_round();
    stop_contributing();
    return complete({});
  }
  // other ranks may be fetching its vectors right now
  for (const auto what : {Object::What::message, Object::What::own}) withdraw(what, next_ + 1);
  stop_lending();
  up_.share.leave();
  up_.call.complete = true;  // set first, as telling other ranks may run out of memory
  tell_share();
  complete({});
}

// --- Progress and orders ---

Progress Node::progress() { return up_.share.progress(wire_.now() - up_.added_at); }

// Report this rank's progress. If its vectors hold all blocks that they will have, offer them.
void Node::tell_share() {
  if (newest_ >= next_) return;
  if (root()) {
    if (work_.ledger) work_.ledger->heard(0, progress(), wire_.now());
    return;
  }
  const Rank parent = family_.ancestors.front();
  if (!begin_offer()) return;
  const bool ready = !up_.call.skipped && up_.lent && up_.share.sealed() && up_.share.version().blocks;
  Message message{header(Kind::offer, next_)};
  message.header.fingerprint = up_.call.fingerprint;
  message.header.flags = shares;
  message.header.ready = ready ? up_.outgoing.size() : 0;
  progress().append_to(message);
  if (ready) append_vectors(message, up_.outgoing.bytes() <= wire_.inline_bytes(parent));
  send_offer(message);
}

void Node::on_order(const Message& message) {
  const Header& head = message.header;
  if (static_cast<Order::Kind>(head.ready) == Order::Kind::hold) {
    work_.asks_first = true;
    wire_.send(family_.ancestors.front(), Message{header(Kind::will_ask, next_ + calling())});
    return;
  }
  // An order for another call is out of date: the root gives orders only to calls that it knows.
  if (!calling() || !up_.call.shared || head.round != next_ || head.last <= up_.orders) return;
  up_.orders = head.last;
  auto blocks = message.values<Block>(0, head.segments);
  // no program can compute a block whose data it does not hold
  for (const Block block : blocks) {
    if (!work_.holds(family_.rank, block)) throw Damaged();
  }
  follow_order({.member = 0,
                .kind = static_cast<Order::Kind>(head.ready),
                .blocks = std::move(blocks),
                .generation = static_cast<std::uint32_t>(head.fingerprint)});
}

void Node::follow_order(const Order& order) {
  switch (order.kind) {
    case Order::Kind::grant:
      work_.asks_first = false;
      up_.share.grant(order.blocks);
      return;  // the number of computed blocks acknowledges the grant
    case Order::Kind::recall:
      up_.share.recall(order.blocks);
      break;
    case Order::Kind::drop:
      up_.share.drop(order.generation);
      break;
    default:
      throw Damaged();
  }
  tell_share();
}

// --- The root ---

// Handle a child's report of its progress, or the call of a late child.
void Node::hear_share(std::size_t child) {
  const Offer& offer = children_[child].offer;
  if (!deals() || offer.round != next_ || offer.fingerprint != up_.call.fingerprint) return;
  work_.ledger->arrived(child + 1, offer.progress.claims, wire_.now());
  try {
    work_.ledger->heard(child + 1, offer.progress, wire_.now());
  } catch (const Damaged&) {
    garbled(children_[child].rank, "about its blocks");
  }
}

// Return why a replay cannot divide this call's work as recorded; empty if it can, or if there is no replay.
std::string Node::why_not_as_before() const {
  const Call& call = up_.call;
  if (!work_.replayed || !call.shared) return {};
  const std::string round = "CodedError: round " + std::to_string(next_);
  const auto recorded = work_.replayed->find(next_);
  if (recorded != work_.replayed->end()) {
    if (recorded->second.call == call.signature) return {};
    return round + " is not the recorded one: ranks called " + call.signature +
           ", the record has " + recorded->second.call + "; replay= needs the same program";
  }
  const Round last = work_.replayed->empty() ? 0 : work_.replayed->rbegin()->first;
  return round + " cannot be replayed: the record " +
         (next_ > last ? "ends with round " + std::to_string(last)
                       : "does not have it (it failed then, or shared no work)") +
         "; go on in a group without replay=";
}

// Record that a child asks before it begins, from this round on.
void Node::on_will_ask(std::size_t child, Round from) {
  if (deals() && from <= next_) work_.ledger->will_ask(child + 1);
}

void Node::begin_sharing() {
  const Progress own = progress();
  const double now = wire_.now();
  if (work_.replayed) work_.ledger.emplace(work_.replayed->at(next_).division, limits_.orphan_seconds);
  work_.ledger->begin(now, up_.call.costs);
  work_.ledger->arrived(0, own.claims, now);
  work_.ledger->heard(0, own, now);
  for (std::size_t i = 0; i < children_.size(); ++i) hear_share(i);
}

// Whether this rank decides which rank computes which block of its call.
bool Node::deals() const {
  return root() && work_.ledger && calling() && up_.call.shared && !up_.all_decoded();
}

// Give each rank something to compute. Returns whether all blocks are computed.
bool Node::deal() {
  const double now = wire_.now();
  if (up_.overdue && approximates()) work_.ledger->close(now);
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    const bool in_round = child.offer.round == next_;
    if (child.dead || (child.retired && !(in_round && !child.offer.withdrawn))) {
      work_.ledger->lost(i + 1);
    } else if ((in_round && child.offer.withdrawn) || does_not_answer(child)) {
      work_.ledger->will_ask(i + 1);  // matters if the child is expected and has not come yet
      work_.ledger->give_up(i + 1, now);
    }
  }
  for (auto orders = work_.ledger->orders(now); !orders.empty(); orders = work_.ledger->orders(now)) {
    for (const Order& order : orders) {
      if (order.member == 0) {
        follow_order(order);
        continue;
      }
      Message message{header(Kind::order, next_)};
      message.header.ready = static_cast<std::uint32_t>(order.kind);
      message.header.segments = static_cast<std::uint32_t>(order.blocks.size());
      message.header.fingerprint = order.generation;
      message.header.last = ++up_.orders;
      message.append(order.blocks.data(), order.blocks.size() * sizeof(Block));
      wire_.send(children_[order.member - 1].rank, message);
    }
  }
  if (const auto orphans = work_.ledger->orphans(); !orphans.empty() && !approximates()) {
    std::string lacks;
    for (const Child& child : children_) {
      if (!child.dead && !child.retired) continue;
      lacks += ", rank " + std::to_string(child.rank) + (child.dead ? is_dead : ", which has left the group");
    }
    const bool dead = std::ranges::any_of(children_, &Child::dead);
    const bool left = !dead && !lacks.empty();
    decide_error((work_.replayed || left ? "CodedError: round " : "TooManyErasures: round ") +
                 std::to_string(next_) + ": nobody who is left " +
                 (work_.replayed ? "may compute" : "holds") + " the " + std::to_string(orphans.size()) +
                 " blocks from " + std::to_string(orphans.front()) + " on" +
                 (lacks.empty() ? "" : "; it lacks" + lacks.substr(1)) + ": " +
                 (work_.replayed ? "replay= needs every rank that computed in the recorded round"
                            : dead ? "go on with group.recovered(), or give each to more ranks with "
                                     "replicas="
                            : left ? "all ranks are to make the same calls before they close the group"
                                   : "give each to more ranks with replicas="));
    return false;
  }
  return work_.ledger->settled();
}

// Whether a child was present when all blocks were computed. If its vector is summed in a later round, no other
// rank can stand in for it then.
bool Node::is_there(Child& child) {
  if (child.confirmed_round == next_) return true;
  if (child.asked_round != next_) ask_whether_it_is_there(child);
  return false;
}

// Handle an answer that says where a child is. If the round failed at the child alone, the child may have
// continued. The child then no longer has its vector, although the round may still get a result.
void Node::hear_where_it_is(Child& child, const Header& head) {
  if (head.last == head.round) {
    child.confirmed_round = head.round;
  } else if (head.round == next_ && deals() && !up_.call.lends()) {
    const auto member = static_cast<std::size_t>(&child - children_.data()) + 1;
    work_.ledger->give_up(member, wire_.now());
  }
}

// Return the vectors that hold the blocks, once all these vectors are available.
std::shared_ptr<const Decoding> Node::choose_sealed(std::uint32_t piece) {
  if (!work_.ledger->settled()) return nullptr;
  bool all_present = true;
  auto out = std::make_shared<Decoding>();
  std::vector<Version> versions{work_.ledger->version(0)};
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Version version = versions.emplace_back(work_.ledger->version(i + 1));
    if (!version.blocks) continue;
    if (!usable(i, piece) || children_[i].offer.progress.version() != version) return nullptr;
    if (gives_up() && stalled(children_[i])) return nullptr;
    all_present &= up_.call.lends() || is_there(children_[i]);
    out->rows.push_back(i);
  }
  if (!all_present) return nullptr;
  // The whole sum uses one division of the work, so that a record of this division gives the same bits.
  if (versions != up_.versions) up_.decoded = up_.exact;
  up_.versions = std::move(versions);
  out->coefficients.assign(decoder_.slices(), std::vector<double>(out->rows.size(), 1.0));
  return up_.decoding = out;
}

// --- The sum of the blocks of the previous round, whose vectors are handed over only now ---

// Return why this call is not allowed now, in a group whose program computes blocks; empty if it is allowed.
std::string Node::why_not_after_blocks() const {
  const Call& call = up_.call;
  const bool sums = call.up && !call.shared;
  std::string why;
  if (!follows_blocks()) {
    if (!work_.dealt || !sums) return {};
    why = "only the sum right after group.blocks is of what was computed there: sum all of it in one "
          "call, as coded_allreduce((gradients, loss), group), and anything else in a group of its own";
  } else if (work_.dealt_all) {
    if (sums) return {};
    why = "after group.blocks the sum of what was computed is to come, with coded_allreduce";
  } else {
    if (!sums) return {};
    why = "after group.blocks failed, or before its loop ends, there is nothing to sum: let the loop "
          "end, or repeat the step";
  }
  return "GroupMismatch: " + why + "; ranks called " + call.signature;
}

// Whether this call sums the blocks of the previous round, and this rank has none of them. The root may count
// on blocks that this rank had before: the round failed at this rank alone, and was repeated after a snapshot.
bool Node::lacks_what_it_computed() const {
  const auto blocks = computed();
  return !root() && up_.call.up && !up_.call.shared && blocks && blocks->empty();
}

// Leave out the children whose vectors hold nothing, or only blocks that other ranks have computed, too.
void Node::leave_out_the_others() {
  up_.call.erased.resize(children_.size());
  for (std::size_t i = 0; i < children_.size(); ++i) {
    up_.call.erased[i] = !work_.ledger->version(i + 1).blocks;
  }
}

// Return the vectors of the children that are not left out, once all of these are available. After the deadline,
// return the available vectors, from which the whole sum is formed.
std::shared_ptr<const Decoding> Node::choose_dealt(std::uint32_t piece) {
  const bool some = up_.overdue && approximates();
  if (some && !up_.approximating) {
    up_.decoding.reset();
    up_.decoded = up_.exact;  // nothing is summed yet
    begin_approximating();
  }
  const auto available = [&](std::size_t i) { return usable(i, piece); };
  if (some && up_.decoding) {
    return std::ranges::all_of(up_.decoding->rows, available) ? up_.decoding : nullptr;
  }
  up_.decoding.reset();
  auto out = std::make_shared<Decoding>();
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (up_.call.leaves_out(i)) continue;
    if (available(i) && !(gives_up() && stalled(children_[i]))) {
      out->rows.push_back(i);
    } else if (!some) {
      return nullptr;
    }
  }
  out->coefficients.assign(decoder_.slices(), std::vector<double>(out->rows.size(), 1.0));
  return up_.decoding = out;
}

// Whether the sum of the call in progress lacks blocks, by the root's ledger.
bool Node::lacks_blocks() const {
  return root() && work_.ledger && (up_.call.shared || sums_blocks()) && work_.ledger->missing();
}

// --- Ranks that do not answer ---

// Whether to accept a sum without a child's blocks, if other ranks cannot compute them. The child must have
// left a question of this round, or of an earlier one, unanswered.
bool Node::does_not_answer(const Child& child) const {
  if (!approximates() || !child.asked) return false;
  return silent(child) || wire_.now() - child.asked >= deadline(limits_.deadline_share / 4);
}

// Whether only ranks that have been silent for long could compute the missing blocks.
bool Node::only_silent_hold() const {
  std::vector<bool> silent(children_.size() + 1);
  bool lacks = work_.ledger->missing() > 0;
  for (std::size_t i = 0; i <= children_.size(); ++i) {
    silent[i] = i > 0 && (this->silent(children_[i - 1]) || children_[i - 1].retired);
    if (!work_.ledger->left(i)) continue;
    if (!silent[i]) return false;
    lacks = true;
  }
  return lacks && work_.ledger->orphans(silent).size() == work_.ledger->missing();
}

// Watch for ranks whose vectors do not come, and ask whether they are there.
void Node::watch_members() {
  if (!deals() || !work_.ledger->settled()) return;
  believe_answers();
  const double now = wire_.now();
  for (std::size_t i = 0; i < children_.size(); ++i) {
    Child& child = children_[i];
    if (!work_.ledger->version(i + 1).blocks) continue;
    if (up_.call.lends() ? child.offer.has(up_.decoded.pieces) : child.confirmed_round == next_) continue;
    const double quiet = now - std::max(child.heard, up_.waiting_since);
    if (quiet < limits_.orphan_seconds) continue;
    if (!child.asked) {
      ask_whether_it_is_there(child);
    } else if (now - child.asked >= limits_.silent_seconds) {
      if (work_.ledger->replaceable(i + 1)) {
        work_.ledger->give_up(i + 1, now);
      } else if (up_.overdue) {
        stall(child);
      }
    }
  }
}

double Node::shares_at() const {
  if (!deals()) return std::numeric_limits<double>::infinity();
  const double now = wire_.now();
  // ask a rank whose vector does not come
  return work_.ledger->settled() ? now + limits_.orphan_seconds : work_.ledger->wakes_at(now);
}

std::string Node::lacking_blocks() const {
  std::vector<Rank> busy;
  std::size_t blocks = work_.ledger->left(0);
  if (blocks) busy.push_back(family_.rank);
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const std::size_t left = work_.ledger->left(i + 1);
    const bool comes = usable(i, up_.decoded.pieces) && !stalled(children_[i]);
    if (left || (work_.ledger->version(i + 1).blocks && !comes)) busy.push_back(children_[i].rank);
    blocks += left;
  }
  if (busy.empty()) {  // the remaining blocks wait for ranks that have not come, or not come back
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (work_.ledger->awaited(i + 1)) busy.push_back(children_[i].rank);
    }
    blocks = work_.ledger->missing();
  }
  if (busy.empty()) return {};
  return me() + " waits for " + listed(busy) + ", which " +
         (busy.size() == 1 ? "has " : "have ") + std::to_string(blocks) +
         (blocks == 1 ? " block" : " blocks") + " to compute";
}

}  // namespace jaxcoded
