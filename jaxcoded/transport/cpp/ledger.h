// The parent's record of which member (parent or child) computes which blocks of a round with shared work.
//
// Each block is granted to one member at a time: first to its owner, which need not ask. Later the parent may
// take a block from the member that would finish last, and grant it to an idle member that holds its data. So
// each block is in the sum once, whichever rank is late. The rules are in tests/sharing/model.py.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "computed.h"
#include "share.h"

namespace jaxcoded {

// What the parent tells a member.
struct Order {
  enum class Kind : std::uint8_t { grant, recall, drop, hold };

  std::size_t member;
  Kind kind;
  std::vector<Block> blocks = {};  // the blocks to grant or recall
  std::uint32_t generation = 0;    // the generation that begins with a drop
};

// Which blocks each member computes, in this order.
using Division = std::vector<std::vector<Block>>;

// How the work of a round was divided.
struct Dealt {
  std::uint64_t round;
  std::string call;  // in words
  Division division;
};

class Ledger {
 public:
  // `holders`: the members that hold each block, its owner first. Members are numbered from 0.
  // `patience_seconds`: how long the parent waits for the answer to a recall before it first gives a member up.
  // `waits`: late members keep their blocks.
  Ledger(std::vector<std::vector<std::size_t>> holders, std::size_t members,
         double patience_seconds, bool waits = false);
  // Make a ledger in which each member computes its blocks of this division, in this order, and no other blocks.
  Ledger(const Division& division, double patience_seconds);

  // Begin a round. Members are expected to begin with their own blocks. But a member that was told to hold must
  // ask first, if it was granted nothing since then. `costs`: the cost of each block, > 0, in units of a usual
  // block; empty: all blocks have the usual cost.
  void begin(double now, std::vector<double> costs = {});
  // Record that the member has called the round. `claims`: the member has begun with its own blocks.
  void arrived(std::size_t member, bool claims, double now);
  // Record that the member will ask before it begins, as it was told to.
  void will_ask(std::size_t member);
  void heard(std::size_t member, const Progress& progress, double now);
  // Give up a member whose vector is not available. If it answers after all, it begins with an empty vector.
  void give_up(std::size_t member, double now);
  // Record that the member no longer takes part.
  void lost(std::size_t member);
  // Close the round at its deadline: no member begins another block. A block in progress gets the time that a
  // block usually takes. If it takes longer, the member's vector is not used.
  void close(double now);
  bool closed() const { return closed_at_.has_value(); }

  // Return the orders to send to the members now.
  std::vector<Order> orders(double now);
  // Return when there may be new orders even if no report comes.
  double wakes_at(double now) const;

  // Whether the members' vectors hold every block or, once the round is closed, every block that they will ever
  // hold.
  bool settled() const;
  // Return how many blocks are granted to no member.
  std::size_t missing() const { return free_.size(); }
  // Return how many granted blocks a member has not computed yet.
  std::size_t left(std::size_t member) const { return members_[member].left(); }
  // The version that a member's vector must have.
  Version version(std::size_t member) const;
  Division division() const;
  // Return how many blocks each member has computed.
  std::vector<Computed> computed() const;
  // Whether other members can compute the member's blocks, and the free blocks that it holds. True once the
  // round is closed, since nothing more need be computed.
  bool replaceable(std::size_t member) const;
  // Whether the member holds blocks that are granted to no member, and has not called or is still given up.
  bool awaited(std::size_t member) const;
  // Return the free blocks that no holder can compute, now or later. `silent`: members that will compute none;
  // empty: all members may.
  std::vector<Block> orphans(const std::vector<bool>& silent = {}) const;

 private:
  struct Recall {
    Block block;
    std::optional<std::size_t> beneficiary;  // the member that gets the block
    double since;
  };
  struct Member {
    enum class State : std::uint8_t { absent, expected, here, given_up, out, lost };
    State state = State::absent;
    std::uint32_t generation = 0;
    std::uint32_t added = 0, answered = 0;  // see `Progress`
    std::vector<Block> blocks = {};  // granted and not returned, in order
    std::deque<Recall> recalls = {};  // recalls that are not answered yet
    std::set<Block> kept = {};        // blocks that were recalled and not returned
    std::uint32_t promised = 0;      // how many blocks are recalled for this member
    std::uint32_t times_given_up = 0;
    std::optional<double> held = {};  // when the member was told to hold, if it has not answered
    double since = 0;     // when the member began the work that it has not reported
    double seconds = 0;   // the member's time for a block of usual cost; 0: not known
    bool measured = false;  // `seconds` was measured in this round

    bool expected() const { return state == State::expected; }
    bool here() const { return state == State::here; }
    bool takes_part() const { return here() || state == State::given_up; }
    std::size_t left() const { return blocks.size() - added; }
    // Return after how many more blocks the member reports its progress, as far as the parent knows.
    std::size_t until_told() const {
      std::size_t out = 1;
      while (out < left() && !tells_with(left() - out)) ++out;
      return out;
    }
  };

  double patience_ends(const Member& member) const;
  double usual() const;
  double seconds(const Member& member) const;
  double cost(Block block) const { return costs_.empty() ? 1 : costs_[block]; }
  double cost(const Member& member, std::size_t first, std::size_t last) const;
  // Return in how many seconds the member finishes, with additional blocks of cost `more`.
  double done_in(const Member& member, double now, double more = 0) const;
  std::size_t begun(const Member& member, double now) const;
  double anew_in(std::size_t from, double now) const;
  double worth_taking(std::size_t from, double own_seconds, double now) const;
  bool holds(std::size_t member, Block block) const;
  bool recalled(const Member& member, Block block) const;
  void grant(std::size_t member, const std::vector<Block>& blocks, double now);
  bool grant_own(std::size_t member, double now);
  bool grant_free(std::size_t member, double now);
  enum class Found : std::uint8_t { nothing, recalled, given_up };
  Found take_back_for(std::size_t member, double now);
  void recall(std::size_t from, Block block, std::optional<std::size_t> beneficiary, double now);
  void break_promise(const Recall& recall);
  void release(Member& member);
  void count_unused(std::size_t member);
  double closing_ends() const;
  void order(std::size_t member, Order::Kind kind, std::vector<Block> blocks);

  std::vector<std::vector<std::size_t>> holders_;
  Division own_;                     // blocks of each member
  std::vector<std::size_t> places_;  // the place of each block among its owner's blocks
  std::vector<double> costs_ = {};   // of each block in this round; empty: all have the usual cost
  double patience_seconds_;
  std::vector<Member> members_;
  std::vector<bool> asks_;  // for each member, whether it asks before it begins with its own blocks
  bool divided_ = false;    // the division is fixed: no member computes another member's blocks
  bool waits_ = false;
  std::optional<double> closed_at_ = {};
  std::set<Block> free_;
  std::vector<std::uint32_t> unused_;  // number of blocks that each member has computed and that are not in the sum
  std::vector<std::uint32_t> times_taken_;  // how often each block was taken back while it was computed
  std::vector<Order> orders_;
  mutable std::optional<double> usual_ = {};  // kept until a member's pace changes
};

}  // namespace jaxcoded
