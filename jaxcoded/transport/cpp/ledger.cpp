#include "ledger.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "median.h"
#include "message.h"

namespace jaxcoded {
namespace {

// A member gets more blocks while it computes its last block, so that the new blocks arrive in time.
constexpr std::size_t ahead = 1;
// An overdue block is expected to take another half of the time that it has taken so far.
constexpr double further = 0.5;
// A block in progress is computed again only if its member is expected to need 1 + this times as long.
constexpr double worth = 0.1;
constexpr double telling = 0.5;  // a pace is known after this many blocks of usual cost
constexpr std::uint32_t most_doublings = 6;  // how often the patience with a member is doubled at most
// A late member is checked again after `share_of_time` of its silence, but not before `finest` of the patience.
constexpr double share_of_time = 1.0 / 16, finest = 1.0 / 64;
constexpr double never = std::numeric_limits<double>::infinity();

}  // namespace

Ledger::Ledger(std::vector<std::vector<std::size_t>> holders, std::size_t members,
               double patience_seconds, bool waits)
    : holders_(std::move(holders)),
      own_(members),
      places_(holders_.size()),
      patience_seconds_(patience_seconds),
      members_(members),
      asks_(members),
      waits_(waits) {
  for (Block block = 0; block < holders_.size(); ++block) {
    std::vector<Block>& blocks = own_[holders_[block].front()];
    places_[block] = blocks.size();
    blocks.push_back(block);
  }
}

Ledger::Ledger(const Division& division, double patience_seconds)
    : own_(division),
      patience_seconds_(patience_seconds),
      members_(division.size()),
      asks_(division.size(), true),
      divided_(true) {
  for (std::size_t m = 0; m < division.size(); ++m) {
    for (const Block block : division[m]) {
      if (block >= holders_.size()) holders_.resize(block + 1);
      holders_[block] = {m};
    }
  }
}

void Ledger::begin(double now, std::vector<double> costs) {
  costs_ = std::move(costs);
  if (costs_.size() != holders_.size()) costs_.clear();
  orders_.clear();
  free_.clear();
  closed_at_.reset();
  times_taken_.assign(holders_.size(), 0);
  unused_.assign(members_.size(), 0);
  const double usual = this->usual();
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Member& member = members_[m];
    const bool lost = member.state == Member::State::lost;
    // A member may have stalled once. If all its blocks were then taken from it, nothing else would correct its time.
    const bool corrected = member.measured || member.seconds <= usual;
    member = {.state = lost ? Member::State::lost : Member::State::absent,
              .seconds = corrected ? member.seconds : std::max(usual, member.seconds / 2)};
    if (lost || asks_[m]) {
      free_.insert(own_[m].begin(), own_[m].end());
    } else {
      member.state = Member::State::expected;
      member.blocks = own_[m];
      member.since = now;
    }
  }
  usual_.reset();
}

void Ledger::arrived(std::size_t m, bool claims, double now) {
  Member& member = members_[m];
  if (!member.expected() && member.state != Member::State::absent) return;
  const bool expected = std::exchange(member.state, Member::State::here) != Member::State::absent;
  member.held.reset();
  member.since = now;
  if (expected == claims) {
    if (claims || closed()) return;
    grant_own(m, now);
  } else if (expected) {
    grant(m, std::exchange(member.blocks, {}), now);
  } else {
    give_up(m, now);  // the order that it must ask first came too late
  }
}

void Ledger::will_ask(std::size_t m) {
  Member& member = members_[m];
  if (!member.expected()) return;
  release(member);
  member = {.seconds = member.seconds};
}

void Ledger::heard(std::size_t m, const Progress& progress, double now) {
  Member& member = members_[m];
  if (!member.takes_part()) return;
  if (progress.generation > member.generation) throw Damaged();  // this generation has not begun yet
  if (progress.generation < member.generation) return;
  if (progress.out) {
    count_unused(m);
    release(member);
    member = {.state = Member::State::out, .seconds = member.seconds};
    return;
  }
  const bool granted = progress.added <= member.blocks.size();
  const bool recalled = progress.answered <= member.answered + member.recalls.size();
  if (!granted || !recalled) throw Damaged();
  if (member.state == Member::State::given_up) {  // the member has begun again, with an empty vector
    member.state = Member::State::here;
    member.since = now;
  }
  if (progress.added > member.added) {
    const double ago = progress.seconds > 0 ? progress.seconds : 0;
    const double reported = cost(member, member.added, progress.added);
    const double block = (now - ago - member.since) / reported;
    // The member may have begun before the round began here. A cheap block takes little longer than its
    // messages, so its time says little about the member's pace.
    if (block > 0 && reported >= telling) {
      member.seconds = member.measured ? (member.seconds + block) / 2 : block;
      usual_.reset();
      member.measured = true;
    }
    member.added = progress.added;
    member.since = std::max(member.since, now - ago);
  }
  while (member.answered < progress.answered && !member.recalls.empty()) {
    const Recall recall = member.recalls.front();
    const bool returns = std::ranges::find(progress.returned, recall.block) != progress.returned.end();
    const auto returned = std::ranges::find(member.blocks, recall.block);
    if (returns && returned - member.blocks.begin() < member.added) throw Damaged();  // the block is in its vector
    (returns ? free_ : member.kept).insert(recall.block);  // if this runs out of memory, nothing has changed
    member.recalls.pop_front();
    ++member.answered;
    break_promise(recall);
    if (!returns) continue;
    if (member.left() && member.blocks[member.added] == recall.block) {
      ++times_taken_[recall.block];
      ++unused_[m];
      member.since = now;
    }
    member.blocks.erase(returned);
    const auto beneficiary = recall.beneficiary;
    if (beneficiary && members_[*beneficiary].here() && !closed()) {
      grant(*beneficiary, {recall.block}, now);
    }
  }
}

void Ledger::give_up(std::size_t m, double now) {
  Member& member = members_[m];
  if (!member.here()) return;
  // A stall in a cheap block says little about the member's pace. The time after the close does not count, since it
  // lasts as long as usual blocks: it would grow with each round in which most members are stuck.
  const double until = closed() ? std::min(now, *closed_at_) : now;
  const double block =
      member.left() ? (until - member.since) / std::max(1.0, cost(member.blocks[member.added])) : 0;
  count_unused(m);
  release(member);
  member = {.state = Member::State::given_up,
            .generation = member.generation + 1,
            .times_given_up = member.times_given_up + 1,
            .since = now,
            .seconds = std::max(member.seconds, block)};
  usual_.reset();
  order(m, Order::Kind::drop, {});
}

void Ledger::lost(std::size_t m) {
  if (members_[m].state == Member::State::lost) return;
  if (members_[m].here()) count_unused(m);
  release(members_[m]);
  members_[m] = {.state = Member::State::lost};
  usual_.reset();
}

void Ledger::close(double now) {
  if (closed()) return;
  closed_at_ = now;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    Member& member = members_[m];
    will_ask(m);  // changes only members that are expected
    if (!member.here()) continue;
    for (std::size_t i = member.added + 1; i < member.blocks.size(); ++i) {
      const Block block = member.blocks[i];
      if (!recalled(member, block)) recall(m, block, {}, now);
    }
  }
}

// Count the blocks that a member has computed, and the block in progress.
void Ledger::count_unused(std::size_t m) {
  unused_[m] += members_[m].added + (members_[m].left() > 0);
}

void Ledger::break_promise(const Recall& recall) {
  if (!recall.beneficiary) return;
  Member& beneficiary = members_[*recall.beneficiary];
  if (beneficiary.promised) --beneficiary.promised;
}

// Free a member's blocks for other members.
void Ledger::release(Member& member) {
  free_.insert(member.blocks.begin(), member.blocks.end());
  for (const Recall& recall : member.recalls) break_promise(recall);
}

std::vector<Order> Ledger::orders(double now) {
  if (closed()) {
    const bool over = now >= closing_ends();
    for (std::size_t m = 0; over && m < members_.size(); ++m) {
      if (members_[m].left()) give_up(m, now);
    }
    return std::exchange(orders_, {});
  }
  for (std::size_t m = 0; m < members_.size(); ++m) {
    if (now < patience_ends(members_[m]) || !replaceable(m)) continue;
    members_[m].expected() ? will_ask(m) : give_up(m, now);
  }
  bool again = true;
  while (std::exchange(again, false)) {
    std::vector<std::size_t> idlest;  // members that have no blocks left except a block in progress
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const Member& member = members_[m];
      if (member.here() && member.left() + member.promised <= ahead) idlest.push_back(m);
    }
    // Members that were given up least often come first, so that the block is not lost again.
    std::ranges::sort(idlest, {}, [&](std::size_t m) {
      return std::pair(members_[m].times_given_up, done_in(members_[m], now));
    });
    for (const std::size_t m : idlest) {
      if (!members_[m].here() || grant_free(m, now)) continue;
      again |= take_back_for(m, now) == Found::given_up;
    }
  }
  return std::exchange(orders_, {});
}

double Ledger::wakes_at(double now) const {
  if (closed()) return settled() ? never : closing_ends();
  double out = never, block = never, latest = -never;
  bool idle = false;
  for (const Member& member : members_) {
    if (const double ends = patience_ends(member); ends > now) out = std::min(out, ends);
    if (!member.here() && !member.expected()) continue;
    member.left() ? latest = std::max(latest, member.since) : idle = true;
    block = std::min(block, seconds(member));
  }
  if (!idle || latest == -never || waits_) return out;
  // Only time shows how much longer a block takes. The longer the block takes, the less often it is checked.
  const double quarter = (block > 0 ? block : patience_seconds_) / 4;
  return std::min(out, now + std::max({quarter, (now - latest) * share_of_time, patience_seconds_ * finest}));
}

bool Ledger::settled() const {
  return (closed() || free_.empty()) && std::ranges::all_of(members_, [](const Member& member) {
           return !member.left();
         });
}

Division Ledger::division() const {
  Division out;
  for (const Member& member : members_) out.push_back(member.blocks);
  return out;
}

std::vector<Computed> Ledger::computed() const {
  std::vector<Computed> out(members_.size());
  for (std::size_t m = 0; m < members_.size(); ++m) {
    for (const Block block : members_[m].blocks) {
      ++(holders_[block].front() == m ? out[m].own : out[m].others);
    }
    out[m].unused = unused_[m];
  }
  return out;
}

Version Ledger::version(std::size_t m) const {
  return {members_[m].generation, static_cast<std::uint32_t>(members_[m].blocks.size())};
}

bool Ledger::replaceable(std::size_t m) const {
  if (closed()) return true;
  const auto by_others = [&](Block block) {
    return std::ranges::any_of(holders_[block],
                               [&](std::size_t other) { return other != m && members_[other].here(); });
  };
  return std::ranges::all_of(members_[m].blocks, by_others) &&
         std::ranges::all_of(free_, [&](Block block) { return !holds(m, block) || by_others(block); });
}

bool Ledger::awaited(std::size_t m) const {
  const Member::State state = members_[m].state;
  if (state != Member::State::absent && state != Member::State::given_up) return false;
  return std::ranges::any_of(free_, [&](Block block) { return holds(m, block); });
}

std::vector<Block> Ledger::orphans(const std::vector<bool>& silent) const {
  std::vector<Block> out;
  for (const Block block : free_) {
    if (std::ranges::none_of(holders_[block], [&](std::size_t m) {
          if (!silent.empty() && silent[m]) return false;
          return members_[m].takes_part() || members_[m].expected() ||
                 members_[m].state == Member::State::absent;
        })) {
      out.push_back(block);
    }
  }
  return out;
}

// Return when the parent gives the member up, unless the member answers before.
double Ledger::patience_ends(const Member& member) const {
  if (member.held) return *member.held + patience_seconds_;
  if (member.recalls.empty()) return never;
  const std::uint32_t doublings = std::min(member.times_given_up, most_doublings);
  return member.recalls.front().since + patience_seconds_ * (1u << doublings);
}

// Return the time until which a closed round waits for blocks in progress.
double Ledger::closing_ends() const { return *closed_at_ + std::max(patience_seconds_, usual()); }

// Return the seconds for a block of usual cost: the median over the members.
double Ledger::usual() const {
  if (usual_) return *usual_;
  std::vector<double> known;
  for (const Member& member : members_) {
    if (member.seconds > 0) known.push_back(member.seconds);
  }
  return *(usual_ = median(known));
}

double Ledger::seconds(const Member& member) const {
  return member.seconds > 0 ? member.seconds : usual();
}

// Return the total cost of the member's blocks from `first` up to before `last`.
double Ledger::cost(const Member& member, std::size_t first, std::size_t last) const {
  if (costs_.empty()) return static_cast<double>(last - first);
  double out = 0;
  for (std::size_t i = first; i < last; ++i) out += costs_[member.blocks[i]];
  return out;
}

// A member that has called reports after some blocks. Until its next report it is assumed to keep the usual
// pace.
double Ledger::done_in(const Member& member, double now, double more) const {
  const double usual = seconds(member);
  if (!member.left()) return more * usual;
  const double elapsed = now - member.since;
  const double left = cost(member, member.added, member.blocks.size()) + more;
  const std::size_t reported = member.added + member.until_told();
  const double unreported = cost(member, member.added, reported);
  if (elapsed < unreported * usual) return left * usual - elapsed;
  const double present = elapsed - (unreported - cost(member.blocks[reported - 1])) * usual;  // for one block
  return further * present + (left - unreported) * std::max(usual, elapsed / unreported);
}

// Return the index of the first of the member's blocks that may be worth a recall.
std::size_t Ledger::begun(const Member& member, double now) const {
  if (!member.here()) return 0;
  const double usual = seconds(member);
  double elapsed = now - member.since;
  std::size_t out = member.added + 1;
  const std::size_t reported = std::min(member.added + member.until_told(), member.blocks.size());
  if (elapsed >= cost(member, member.added, reported) * usual) return out;
  for (; out <= reported && elapsed >= cost(member.blocks[out - 1]) * usual; ++out) {
    elapsed -= cost(member.blocks[out - 1]) * usual;
  }
  return out;
}

bool Ledger::holds(std::size_t m, Block block) const {
  return std::ranges::find(holders_[block], m) != holders_[block].end();
}

bool Ledger::recalled(const Member& member, Block block) const {
  return std::ranges::any_of(member.recalls,
                             [&](const Recall& recall) { return recall.block == block; });
}

void Ledger::order(std::size_t m, Order::Kind kind, std::vector<Block> blocks) {
  orders_.push_back({m, kind, std::move(blocks), members_[m].generation});
}

void Ledger::grant(std::size_t m, const std::vector<Block>& blocks, double now) {
  Member& member = members_[m];
  if (!member.left()) member.since = now;
  asks_[m] = false;
  for (const Block block : blocks) {
    member.blocks.push_back(block);
    free_.erase(block);
  }
  order(m, Order::Kind::grant, blocks);
}

// Grant a member its own blocks, as far as they are still free.
bool Ledger::grant_own(std::size_t m, double now) {
  std::vector<Block> own;
  std::ranges::copy_if(own_[m], std::back_inserter(own),
                       [&](Block block) { return free_.contains(block); });
  if (own.empty()) return false;
  grant(m, own, now);
  return true;
}

// Grant the free block that its owner, if the owner arrives, would reach last.
bool Ledger::grant_free(std::size_t m, double now) {
  if (divided_) return grant_own(m, now);
  std::optional<Block> last;
  for (const Block block : free_) {
    if (!holds(m, block)) continue;
    if (!last || places_[block] > places_[*last]) last = block;
  }
  if (last) grant(m, {*last}, now);
  return last.has_value();
}

// Return in how many seconds the other members would finish all blocks granted to this member.
double Ledger::anew_in(std::size_t from, double now) const {
  std::vector<std::pair<double, double>> others;  // when each member is done, and its time for a block of usual cost
  for (std::size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    if (m == from || !member.here()) continue;
    others.emplace_back(done_in(member, now), seconds(member));
  }
  double out = 0;
  for (const Block block : members_[from].blocks) {
    if (others.empty()) break;
    const auto with_it = [&](const auto& other) {
      return std::pair(other.first + cost(block) * other.second, other.second);
    };
    auto& soonest = *std::ranges::min_element(others, {}, with_it);
    soonest = with_it(soonest);
    out = std::max(out, soonest.first);
  }
  return out;
}

// Return how many more seconds a member's last block must be expected to take before it is granted to another
// member, which would finish it in `own_seconds`. The threshold doubles each time, so a block that takes long
// on every member is finished in the end.
double Ledger::worth_taking(std::size_t from, double own_seconds, double now) const {
  const Member& other = members_[from];
  double least = own_seconds;
  if (other.added || other.kept.contains(other.blocks.back())) {  // the blocks in its vector are lost, too
    if (!replaceable(from)) return never;
    least = std::max(least, anew_in(from, now));
  }
  least = least > 0 ? least * (1 + worth) : patience_seconds_;
  return std::ldexp(least, static_cast<int>(times_taken_[other.blocks.back()]));
}

// Take back a block for a member from the member that would finish last, if the block then ends sooner.
Ledger::Found Ledger::take_back_for(std::size_t m, double now) {
  if (waits_) return Found::nothing;
  const Member& member = members_[m];
  const bool idle = !member.left();
  double latest = 0;
  std::optional<std::size_t> from;
  Block which = 0;
  double of = 0, own_seconds = 0;
  for (std::size_t v = 0; v < members_.size(); ++v) {
    const Member& other = members_[v];
    if (v == m || !(other.here() || other.expected()) || other.held) continue;
    if (other.left() <= other.recalls.size()) continue;
    const double other_seconds = done_in(other, now);
    // A member's only remaining block is in progress. This block is taken back only for an idle member.
    const bool last = other.here() && other.left() == 1;
    if (other_seconds <= latest || (last && !idle)) continue;
    for (std::size_t i = other.blocks.size(); i-- > (last ? other.added : begun(other, now));) {
      const Block block = other.blocks[i];
      if (!holds(m, block)) continue;
      if (recalled(other, block) || (other.kept.contains(block) && !last)) continue;
      // `own_seconds` is estimated like others' times, so no block moves back and forth between two late members.
      if (cost(block) != of) own_seconds = done_in(member, now, of = cost(block));
      if (other_seconds <= own_seconds || (last && other_seconds <= worth_taking(v, own_seconds, now))) continue;
      latest = other_seconds;
      from = v;
      which = block;
      break;
    }
  }
  if (!from) return Found::nothing;
  Member& other = members_[*from];
  if (other.expected()) {  // the member has not called yet, as far as the parent knows
    other.held = now;
    asks_[*from] = true;
    order(*from, Order::Kind::hold, {});
    return Found::recalled;
  }
  if (other.left() > 1 || !(other.added || other.kept.contains(which))) {
    recall(*from, which, m, now);
    return Found::recalled;
  }
  ++times_taken_[which];
  give_up(*from, now);
  return Found::given_up;
}

void Ledger::recall(std::size_t from, Block block, std::optional<std::size_t> beneficiary,
                    double now) {
  members_[from].recalls.push_back({block, beneficiary, now});
  if (beneficiary) ++members_[*beneficiary].promised;
  order(from, Order::Kind::recall, {block});
}

}  // namespace jaxcoded
