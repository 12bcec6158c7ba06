// A simulated world of nodes in one process: links with queues, a clock, and a scheduler.
//
// Every rank's `Node` is the engine's code. The world simulates MPI, the clock and the programs, in a random
// order, and checks at every step what must be true: `check` throws a `Finding`.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "group.h"
#include "random.h"
#include "script.h"

namespace jaxcoded {

struct Settings {
  Limits limits = {};
  bool compares = false;   // parents compare their children's messages
  std::vector<std::size_t> inline_bytes = {0};
  double in_place = 0;     // fraction of results that replace the rank's own vectors
  double twice = 0;        // fraction of messages that are delivered twice
  double again = 0;        // fraction of announcements that are delivered a second time, later
  double unreadable = 0;   // fraction of pieces on the same host that cannot be read and must be sent
  double staged = 0;       // fraction of calls with several parts that begin before all parts are ready
  double rests = 0;        // the probability that time passes without messages and calls
  bool sleeps = true;      // check that ranks sleep once nothing happens. Not if memory runs out: ranks then try again
  bool chained = false;    // contributions depend on the number of sums so far, as gradients depend on parameters
  bool replans = false;    // a call replans
  bool lies = false;       // one rank's vectors are wrong in some calls, and parents compare all messages
  bool joined = false;     // the ranks do not have the root's state yet, as in a group that ranks have joined
  bool recovers = false;   // ranks keep snapshots, and continue from one if they are too far behind
  bool partial = false;    // after a deadline a sum may be the sum of only some ranks
  bool checks = true;  // check every piece and vector; if not, only the root's results, and that all ranks have them
  double damaged = 0;      // fraction of pieces that MPI changes: a fault that the checks must find
  double vanishing = 0;    // fraction of messages that MPI loses unreported: a fault that the checks must find
  double failing = 0;      // fraction of turns in which an allocation of the rank is about to fail
  std::uint64_t failures = 0;  // at most this many allocations fail
};

// Which ranks are in some state.
class Ranks {
 public:
  explicit Ranks(std::size_t size) : in_(size) {}
  bool has(Rank rank) const { return in_[static_cast<std::size_t>(rank)]; }
  void set(Rank rank, bool whether = true) { in_[static_cast<std::size_t>(rank)] = whether; }
  void clear() { in_.assign(in_.size(), false); }
  void assign(const std::vector<Rank>& ranks) {
    clear();
    for (const Rank rank : ranks) set(rank);
  }

 private:
  std::vector<bool> in_;
};

// Counts of what happened in a schedule, which show the cases that schedules reach.
struct Seen {
  std::array<std::uint64_t, 32> messages = {};  // by kind
  std::array<std::uint64_t, 4> outcomes = {};   // of calls
  std::uint64_t pieces_sent = 0, pieces_gone = 0, skipped = 0, restored = 0, deaths = 0, losses = 0, steps = 0;
  std::uint64_t failed_allocations = 0, broken_off = 0, audits = 0, replanned = 0, lies = 0;

  void add(const Seen& other);
  std::map<std::string, std::uint64_t> by_name() const;
};

// What a rank's engine does in some rounds.
struct Cost {
  double longest_turn = 0;  // processor seconds, for all waiting messages and one `advance`
  double seconds = 0;
  std::uint64_t messages = 0, bytes = 0;  // sent by the rank
};

class World {
 public:
  World(const Group& group, std::vector<Planned> script, const Settings& settings, Random& random);
  World(const World&) = delete;
  ~World();

  // Let one random event happen.
  void step();
  // Let every running rank do all it can. Returns 2 if anything happened except questions of waiting ranks and
  // the answers, 1 if only these happened, and 0 if nothing happened.
  int sweep();
  // Let ranks run and time pass, until nothing happens any more.
  void settle();

  void leave(Rank rank);
  // Let a process die. `known`: MPI reports the death to its peers.
  void kill(Rank rank, bool known);
  void report_death(Rank rank, Rank to);
  void report_death(Rank rank);
  // The requests of pieces that wait at a rank, by their places in its queue.
  std::size_t requests(Rank source) const { return requests_[index(source)].size(); }
  // Lose a request of a piece. MPI reports this to the rank that was to answer it.
  bool lose_request(Rank source, std::size_t which);
  // Lose the next message from one rank to another. MPI reports this to `told`, one of the two ranks.
  void lose(Rank from, Rank to, Rank informed);
  // Let an exception end a program between two blocks.
  void leave_blocks(Rank rank);
  void give_up(Rank rank);
  // Let a program discard a call to which it has not passed all vectors, and make another call in its place.
  void break_off(Rank rank);
  // Report that a rank's calls are invalid.
  void alarm(Rank rank);
  // Tell a rank that the root's process has ended, as its host may notice before MPI does.
  void tell_of_ended_root(Rank rank);

  Rank size() const { return static_cast<Rank>(group_.size()); }
  std::vector<Rank> living() const;
  // Whether one rank is above the other, or both have the same parent.
  bool linked(Rank from, Rank to) const;
  // Return the kind of the message that arrives next; none if no message is on its way.
  std::optional<Kind> next_message(Rank from, Rank to) const;
  bool is_incomplete(Rank rank) const;  // whether the rank's node lacks vectors of the rank's call
  bool computes_blocks(Rank rank) const;  // whether the rank's program is in the loop over its blocks
  bool calls(Rank rank) const { return running_[index(rank)] != nullptr; }
  Node& node(Rank rank) { return *nodes_[index(rank)]; }
  bool has_sum(Round round) const { return results_.contains(round); }
  const Planned& planned(Round round) const { return script_[round - 1]; }
  Round rounds() const { return script_.size(); }
  std::string describe() const;

  const Group& group() const { return group_; }
  const Settings& settings() const { return settings_; }

  double clock = 0;
  Ranks frozen;   // stopped processes. Other ranks can still read their memory
  Ranks idle;     // ranks that make no call, while their engine runs
  Ranks started;  // ranks whose calls wait in a queue: a call begins in the turn in which the previous call ends
  Ranks leaving;  // ranks that have closed the group. Their processes end as soon as they may
  Ranks dead;     // ranks whose processes have ended
  Ranks reported; // dead ranks whose death MPI has reported
  Ranks short_of_memory;  // ranks that get no memory for vectors
  Ranks slow;     // ranks whose network ports let few messages through
  // Links on which MPI loses all messages from the first rank to the second. It informs the rank that stands here.
  std::map<std::pair<Rank, Rank>, Rank> broken;
  std::map<std::pair<Rank, Round>, Planned> deviations;  // calls that differ from the script
  std::set<std::pair<Rank, Round>> skips;  // the calls in which a rank has nothing to contribute
  std::vector<std::map<Round, std::pair<Outcome, std::string>>> ends;  // how each call of a rank ended
  std::vector<Cost> costs;  // of each rank; with times only if `Settings::checks` is false
  Seen seen;
  bool traced = false;

 private:
  class SimulatedWire;
  struct Running;
  struct Request {
    Rank asker, source;
    Object object;
    std::uint32_t piece;
  };
  struct Answer : Request {
    Bytes data;
  };

  static std::size_t index(Rank rank) { return static_cast<std::size_t>(rank); }
  const std::vector<Rank>& above(Rank rank) const { return group_.families[index(rank)].ancestors; }
  bool stopped(Rank rank) const { return frozen.has(rank) || dead.has(rank); }
  // Whether the ports of both ranks let something through now.
  bool passes(Rank from, Rank to) {
    constexpr double share = 0.05;
    return !(slow.has(from) || slow.has(to)) || random_.chance(share);
  }
  bool on_one_host(Rank one, Rank other) const {
    return group_.hosts[index(one)] == group_.hosts[index(other)];
  }
  double* timed(Rank rank) { return settings_.checks ? nullptr : &costs[index(rank)].seconds; }
  template <class Act>
  bool attempt(Rank rank, Act act);
  template <class Act>
  bool turn(Rank rank, Act act, bool for_call = false);
  template <class Act>
  void turn_to_the_end(Rank rank, Act act);

  // The wires.
  void sent(Rank from, Rank to, Message message);
  Wire::Fetch fetch(const Request& request, std::uint64_t address, std::byte* to, std::size_t bytes);
  void ask(const Request& request);
  void answer(const Request& request);
  void arrive(const Answer& answer);
  Message take_message(Rank from, Rank to);
  void deliver(Rank from, Rank to);
  void deliver_once(Rank from, Rank to, const Message& message);

  // What is right.
  void check_piece(const Request& request, std::span<const std::byte> data);
  void check_vector(const Request& request, std::span<const std::byte> data);
  bool may_be_overwritten(const Request& request) const;
  bool may_change(const Request& request) const;
  static std::set<Rank> accused(const std::string& error);
  void check_end(Rank rank);
  void check_result(Rank rank, const Running& running);
  void check_division(const Running& running);
  void check_audit(const Running& running, const Numbers& audit);
  void check_lost(Rank rank, Round round) const;
  std::vector<Bytes> sums_of(const Running& running, const Division& division) const;
  const Running* offering(Rank rank) const;
  Expected& expected(const Planned& call);
  Round steps_before(Round round) const;
  State state(Round round) const;

  // Programs.
  const Planned& call_of(Rank rank, Round round);
  void replan(Rank rank);
  bool may_call(Rank rank) const;
  void submit(Rank rank);
  template <class Act>
  void begin(Rank rank, Act act);
  void submit_shared(Rank rank);
  bool may_extend(Rank rank);
  void extend(Rank rank);
  void compute_block(Rank rank);
  void come_for_block(Rank rank);
  bool advance(Rank rank);
  bool recover(Rank rank);
  void bury();
  void rest(double times);
  void move_a_piece();
  int on_their_way() const;
  bool only_asks_or_answers(Rank from, Rank to, const Message& message) const;

  const Group& group_;
  std::vector<Planned> script_;
  Settings settings_;
  Random& random_;
  std::uint64_t links_seed_;
  // Messages on their way to each rank, by sender, in the order in which they were sent. No queue is empty.
  std::vector<std::map<Rank, std::deque<Message>>> inboxes_;
  std::vector<std::unique_ptr<SimulatedWire>> wires_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::vector<Request>> requests_;  // by source
  std::vector<std::vector<Answer>> answers_;    // by asker
  std::vector<std::pair<std::pair<Rank, Rank>, Message>> echoes_;
  std::vector<std::unique_ptr<Running>> running_, left_behind_, given_back_;
  std::map<Round, Bytes> results_;
  std::map<std::tuple<int, Round, std::uint32_t, std::uint64_t, Rank>, Bytes> pieces_;  // pieces that were fetched
  std::map<const Planned*, Expected> expected_;
  Ranks must_replan_, replanned_;
  std::map<std::pair<Rank, const Planned*>, Planned> stale_;  // calls of ranks that have not replanned with the others
  std::map<Round, std::map<Rank, std::vector<Numbers>>> computed_;  // vectors computed for the round that sums them
  std::map<Rank, std::uint64_t> versions_;  // of vectors whose work is shared: ranks may change all earlier ones
  std::map<std::pair<Rank, Rank>, std::tuple<Round, std::uint32_t, std::uint8_t>> results_told_;  // last, by link
  std::vector<Round> steps_;
  std::set<Round> summed_;
  std::set<Rank> asking_;
  std::set<Rank> ask_again_;  // ranks in which an allocation failed while they asked for a snapshot
  std::vector<bool> restored_;
  Ranks lacked_memory_;  // ranks that have had too little memory at any time
};

}  // namespace jaxcoded
