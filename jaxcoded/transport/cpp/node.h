// The state machine of one rank: what it does with messages, in whatever order they arrive.
//
// A round goes up and down the tree. On the way up a child *offers* its message. Its parent fetches messages
// piece by piece, from as many children as the code needs, adds its own vector and offers the sum. The root's
// sum is the *result*: ranks announce it down the tree, and every rank fetches it from above. Receivers fetch,
// and no rank pushes. So only a few headers wait in the mailbox of a rank that is late, stuck or gone, and
// surplus messages are never moved.
//
// A node has no MPI, no threads and no clock: see `Wire`. docs/engine.md describes the protocol.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "alerts.h"
#include "call.h"
#include "decoder.h"
#include "departures.h"
#include "failed_alone.h"
#include "history.h"
#include "listener.h"
#include "losses.h"
#include "median.h"
#include "message.h"
#include "offer.h"
#include "pool.h"
#include "section_shares.h"
#include "sections.h"
#include "shared_work.h"
#include "signatures.h"
#include "snapshots.h"
#include "telemetry.h"
#include "upstream.h"
#include "way_up.h"
#include "window.h"
#include "wire.h"

namespace jaxcoded {

// A block to compute. `fresh`: the vector must not contain earlier blocks. `audit`: `told` if the program must
// also report the block's norm and sum, `only_told` if it must not add the block.
enum class Audit : std::uint8_t { none, told, only_told };
struct Work {
  Block block;
  bool fresh;
  Audit audit = Audit::none;
};

enum class Outcome { pending, done, failed, desynchronized };

// What errors append to a dead rank's number.
inline constexpr const char* is_dead = ", which is dead";

struct Family {
  Rank rank = 0;
  std::vector<Rank> ancestors = {};    // the parent first, the root last; empty at the root
  std::vector<Rank> children = {};     // in the order of the code's rows
  std::vector<Rank> descendants = {};  // children, and all ranks below them
  std::vector<Rank> leaves = {};       // children without children
  std::vector<Rank> siblings = {};     // ranks with which this rank exchanges sections
  bool delegates = false;              // children may form sections of this rank's sums
};

// What a parent does if it still waits for its children at the deadline.
enum class OnDeadline {
  wait,         // it continues to wait
  raise,        // the round fails if the root needs this parent's message
  approximate,  // it sums the messages that have arrived
};

// Which messages of its children a parent compares, if it has a `check`.
enum class Compares {
  what_has_come,   // the messages that have arrived when the sum can be formed
  until_deadline,  // the messages of living children that arrive before the deadline
  all,
};

// What a parent does if its children's messages do not fit together.
enum class OnContradiction {
  raise,  // the round fails
  warn,   // it logs this, and continues
  drop,   // it continues without the wrong child; if it cannot tell which child is wrong, the round fails
};

struct Limits {
  std::uint64_t piece_bytes = 256 << 10;     // bytes that are decoded at a time
  std::uint64_t announced_bytes = 1 << 20;   // bytes that are announced at a time
  std::uint64_t history_bytes = 256 << 20;   // bytes of results that are kept for late ranks
  std::uint64_t history_rounds = 64;         // rounds whose results are kept even beyond `history_bytes`
  std::uint64_t history_most = 1ull << 30;   // the most bytes that the results of these rounds may take, except
  std::uint64_t history_least = 4;           // for this many rounds, whose results punctual ranks may still fetch
  std::uint64_t ahead_bytes = 32 << 20;      // results that a late leaf keeps for its own calls
  double orphan_seconds = 0.05;              // least silence before a rank is asked whether it is there, or given up
  double stall_seconds = 0.002;              // least time before another child's message is used
  double stuck_seconds = std::numeric_limits<double>::infinity();  // how long a child is behind before it is asked why
  double silent_seconds = 1;                 // least time before a rank that does not answer is given up
  OnDeadline on_deadline = OnDeadline::wait;
  Compares compares = Compares::all;
  bool waits_for_all = false;  // with shared work: no rank computes blocks of late ranks
  OnContradiction on_contradiction = OnContradiction::raise;
  double deadline_seconds = 0;               // from the start of a round; 0: none
  double deadline_rounds = 0;                // a multiple of the median of rounds of the same call; 0: none
  double deadline_share = 1;                 // this rank's share of the deadline; ranks below have a smaller share
  std::uint64_t telemetry_rounds = 1024;     // remembered rounds
  double step_times_seconds = 1;             // between messages about the speed of ranks
  std::uint64_t sections_from = 0;           // least bytes of a sum in sections; 0: no sections
  std::uint64_t section_pieces = 0;          // the wanted number of pieces of a sum in sections
  std::uint32_t slices = 1;                  // one piece of a message makes this many pieces of the sum
  std::uint32_t parts = 1;                   // a message has this many parts
  std::uint64_t least_piece_bytes = 16 << 10;  // pieces have at least this length
  std::uint64_t most_piece_bytes = 32 << 10;   // pieces have at most this length, at which MPI sends them at once

  // The length of the pieces of a vector of this many bytes.
  std::uint64_t piece_for(std::uint64_t bytes) const {
    const std::uint64_t countable = std::max(piece_bytes, bytes >> 24);  // pieces are numbered in 32 bits
    if (!section_pieces || !sections_from || bytes < sections_from) return countable;
    const std::uint64_t wanted = std::clamp(bytes / section_pieces, least_piece_bytes, most_piece_bytes);
    return std::min(countable, wanted);
  }
};

class Node {
 public:
  Node(Family family, Decoder decoder, Limits limits, Wire& wire);

  // Begin a call. There is at most one call at a time; `outcome` does not change before the next `submit`.
  void submit(Call call);
  // Report that this rank has too little memory for its work or, if `for_call`, for the call itself. The round
  // fails.
  void lack_memory(bool for_call = false);
  // Add this rank's next vectors to a call that is not complete. Does nothing if the call is over.
  void extend(const std::vector<const std::byte*>& own);
  // Complete the call, which now has all its vectors. The result goes to `out`.
  void complete(std::vector<std::byte*> out);

  // Set which ranks hold each block of shared work, its owner first.
  void share_blocks(const std::vector<std::vector<Rank>>& holders);
  // Return which blocks each rank computed in the latest round with shared work, by the root's ledger.
  Division division() const { return work_.ledger ? work_.ledger->division() : Division(); }
  // Make the root call `hook` with the division of each round with shared work, once its work is done.
  void on_dealt(std::function<void(const Dealt&)> hook) { work_.hook = std::move(hook); }
  // From now on, divide the work as in these recorded rounds. Call this on every rank; only the root needs
  // `rounds`.
  void replay(const std::vector<Dealt>& rounds);
  // Called when the program has computed its block, if it had one, and waits for the next. Its vectors `own`
  // stay valid while it waits.
  void come_for_block(const std::vector<const std::byte*>& own);
  // Return the next block, if there is one.
  std::optional<Work> take_block();
  // Whether `take_block` will certainly return a block, or no more blocks come. In both cases no rank uses the
  // program's vectors before the program continues.
  bool goes_on_at_once() const { return up_.share.has_blocks() || no_more_blocks(); }
  // Whether this call gets no more blocks.
  bool no_more_blocks() const { return !calling() || newest_ >= next_; }
  // Called when the program takes no more blocks, or passes no more parts of its call. Other ranks compute this
  // rank's blocks, and the round ends without this rank.
  void leave_call();
  // Return the blocks that this rank computed in the previous round, if the next round sums them.
  std::optional<std::vector<Block>> computed() const {
    const bool follows = work_.computed_round && work_.computed_round + 1 == next_;
    return follows ? std::optional(work_.computed) : std::nullopt;
  }

  // Discard an incomplete call. Another call takes its place in the same round.
  void break_off(Call call);
  Outcome outcome() const { return outcome_; }
  const std::string& error() const { return error_; }

  void deliver(Rank from, const Message& message);
  // Called when a message from this rank cannot be read; `which` describes the message.
  void garbled(Rank from, const std::string& which);
  // Called when `rank` is dead and sends nothing any more.
  void lost(Rank rank);
  // Called at the end of a pending fetch; `data` is empty if `from` no longer had the piece.
  void arrived(Rank from, Object object, std::uint32_t piece, std::span<const std::byte> data);
  // Do what can be done now. Returns whether there is more to do; the caller may look for messages first.
  bool advance();

  // Return a piece of an object of this rank, if this rank has the piece.
  std::optional<std::span<const std::byte>> read(Object object, std::uint32_t piece) const;

  // Use another code from the next round on, the same code on all ranks. `children`: in the order of the code's
  // rows.
  void replan(const std::vector<Rank>& children, Decoder decoder);

  // Record the machine epsilon of the numbers in which the program computes its vectors.
  void computes_with(double eps) { program_eps_ = std::max(program_eps_, eps); }

  // Return how many rounds are completely decided and not yet called by this rank.
  std::uint64_t lag() const;
  Round decided() const;  // the latest round that is over, as far as this rank knows
  // Whether a rank below waits, in a call, for a result that this rank lacks.
  bool awaited_below() const;
  // Set whether to ask the ranks above even while this rank makes no call, for example while ranks join.
  void watch(bool whether) { watches_ = whether; }
  Round next() const { return next_; }       // the round that this rank will call next
  Round frontier() const { return frontier_; }  // the first round whose result this rank lacks

  // Keep a snapshot of the user's state, which results from the rounds before `round`. Returns the previous
  // snapshot, because freeing its memory may take a while.
  State keep_state(Round round, State state);
  void ask_state();
  void ask_no_more() { recovery_.reset(); }
  // Return the round of the fetched snapshot; 0 while the snapshot is on its way.
  Round state_round() const { return recovery_ && recovery_->complete() ? recovery_->round() : 0; }
  bool state_missing() const { return recovery_ && recovery_->missing(); }
  // Move the fetched snapshot to the caller.
  State take_state() { return recovery_ ? recovery_->take() : State(); }
  // Continue at the round of the fetched snapshot.
  void resume();
  bool desynchronized() const { return desynchronized_; }

  // End this rank's calls: because of `failure` or, if `failure` is empty, as planned. Once no rank below needs
  // this rank, `left` returns true.
  void leave(const std::string& failure = {});
  // Make a round fail on every rank with the reason `why`, because this rank's calls are invalid.
  void alarm(const std::string& why, std::uint8_t flags = 0);
  // Called when MPI has lost a message to or from a living rank. Only questions are sent again.
  void lost_message(Rank other);
  // Called when the root's program is at its end: it has left without this rank, and answers nothing any more.
  void root_has_ended();
  Rank root_rank() const { return family_.ancestors.empty() ? family_.rank : family_.ancestors.back(); }
  bool left() const { return departures_.gone(); }
  // Leave without the ranks below that still need this rank.
  void give_up();
  // Called when the process ends, even if ranks still need it. Returns the ranks below that have not left.
  std::vector<Rank> end();
  // Return the ranks below that make no more calls, each with the error that ended its program, if any.
  std::vector<std::pair<Rank, std::string>> departed() const;
  // Return the ranks below that were given up, by this rank or by a rank below.
  const std::vector<Rank>& absent() const { return departures_.absent(); }

  // Return which ranks the call in progress waits for, in words; empty if it lacks no message.
  std::string waiting_for() const;
  // Return which children are in a round that this rank has not called, in words; empty if no child is.
  std::string waited_for() const;
  // Whether the call waits after its deadline. 0: it does not. 1: it waits for ranks below. 2: it waits, and no
  // rank above answers.
  int overdue() const { return up_.forsaken ? 2 : up_.overdue; }
  // At the root, return a reported fault that has not failed a round yet; empty if there is none.
  const std::string& untold() const { return alerts_.pending(); }
  // Return when, by the wire's clock, the node must act even if nothing has come.
  double wakes_at() const;
  // Describe to the user where this rank stands: in which round, since when, for which ranks it waits, and when
  // its neighbours last sent something.
  std::string standing() const;
  // Return news of children that are stuck or dead, in words. Each item is returned once.
  std::vector<std::string> take_news();
  // Describe where this rank stands in terms of the protocol, to find the cause of a hang.
  std::string status() const;
  const Telemetry& telemetry() const { return telemetry_; }
  const Decoder& decoder() const { return decoder_; }
  // `hook` is called at the end of each round of this rank, if it has telemetry.
  void on_round(std::function<void(const RoundRecord&)> hook) { hook_ = std::move(hook); }
  // Return the children's ranks, in the order of the telemetry's columns.
  const std::vector<Rank>& columns() const { return columns_; }
  // Return the step times of this rank and the ranks below, as far as they are known.
  std::vector<StepTime> step_times() const;
  std::uint64_t history_bytes() const { return history_.bytes(); }
  std::uint64_t memory_bytes() const {
    return pool_.used() + snapshot_.bytes() + (recovery_ ? recovery_->bytes() : 0);
  }
  std::uint64_t fetched_bytes() const { return fetched_bytes_; }
  // Return the bytes of the sections that this rank has formed, see `Section`.
  std::uint64_t formed_bytes() const { return formed_bytes_; }
  // Return in how many rounds this rank had more messages than it needed, and compared them.
  std::uint64_t compared_rounds() const { return compared_rounds_; }
  // Return the first round that failed at this rank alone, unknown to the root; 0: none.
  Round failed_alone() const { return failed_alone_.first(); }
  // Record that ranks have different states. Sums raise an error until this rank has received the root's state.
  void expect_state() { alike_ = false; }
  bool alike() const { return alike_; }

 private:
  void begin(Call call);
  struct Child {
    Rank rank;
    std::size_t column;  // in the telemetry
    double heard;  // when it last sent something
    double asked = 0;  // when it was asked whether it is there; 0 if it has sent something since
    Round asked_round = 0;
    Round confirmed_round = 0;  // the round that it has confirmed to be in
    Offer offer = {};         // the child's latest offer
    Round overdue_round = 0;  // the latest round in which the child reported a wait past its deadline
    std::string overdue = {};  // the ranks that the child then waited for
    Round not_finite_round = 0;  // the latest round in which it reported NaN or infinities
    Round done = 1;
    Round reported_round = 0;  // the latest round that it has reported to have called
    bool dead = false;
    bool retired = false;  // makes no more offers
    bool left = false;     // has left, and no rank below it needs anything
    struct Behind {
      Round called = 0;   // the child's latest call
      double since = 0;   // since when rounds have been decided that it has not called
      double asked = 0;   // when it was asked where it is
      double answered = 0;  // when the child answered; its answer follows
      bool in_program = false;
      Round next = 0;
      bool reported = false;  // whether this was reported to the user
    };
    Behind behind = {};
    // The `done` of a child that makes no more offers says nothing about its calls.
    Round called() const { return std::max({offer.round, retired ? 0 : done - 1, reported_round}); }
  };
  // A result that a rank above has.
  struct Announcement {
    Rank from;
    std::uint32_t ready;
    bool failed, alone;
    std::uint64_t fingerprint;
    std::vector<Segment> segments;
    std::vector<std::uint64_t> addresses;
    std::vector<std::byte> body;  // the result, or the error, if the message contained it
  };

  bool root() const { return family_.ancestors.empty(); }
  bool calling() const { return outcome_ == Outcome::pending; }
  bool is_over(Round round) const;
  Child* child_of(Rank rank);
  void understand(Rank from, const Message& message);

  // The way up.
  void on_offer(Child& child, const Message& message);
  Child& child_of_row(std::size_t row) { return children_[row / decoder_.parts()]; }
  const Child& child_of_row(std::size_t row) const { return children_[row / decoder_.parts()]; }
  bool stalled(const Child& child) const { return up_.stalled.contains(child.rank); }
  bool usable(std::size_t row, std::uint32_t piece) const;
  bool skips(const Child& child) const { return child.offer.round == next_ && child.offer.skips; }
  const std::vector<std::size_t>& rows_in_order();
  std::shared_ptr<const Decoding> choose(std::uint32_t piece);
  bool pinned() const { return decoder_.pinned() || up_.approximating || decoder_.checked(); }
  void stall(Child& child);
  void believe_answers();
  void start_again_without(const std::vector<std::size_t>& rows);
  const std::byte* bring(std::size_t row, std::uint32_t piece);
  bool gather();
  void decode(const Decoding& decoding, std::span<const std::byte* const> inputs);
  void skip_piece();
  bool own_ready(std::uint32_t piece) const;
  void announce_sum();
  void offer();
  bool holds_back() const;
  void offer_what_is_held_back();
  bool begin_offer();
  void send_offer(const Message& message);
  std::uint32_t needed() const;
  bool too_few_left(std::uint32_t piece, bool exact = false);
  void go_without_sum();
  void fail(const std::string& text);
  void stop_contributing();
  void stop_contributing_to_what_is_decided();
  void watch_for_stalls();
  bool as_a_whole() const { return pinned() || up_.call.shared || (sums_blocks() && approximates()); }
  void append_vectors(Message& message, bool inline_them) const;
  bool adds_own() const;
  std::uint64_t version_of(const Offer& offer) const {
    return up_.call.shared ? offer.progress.version().number() : 0;
  }

  // Shared work.
  void stop_lending();
  void begin_share();
  Progress progress();
  void tell_share();
  void on_order(const Message& message);
  void follow_order(const Order& order);
  void hear_share(std::size_t child);
  std::string why_not_as_before() const;
  void on_will_ask(std::size_t child, Round from);
  void begin_sharing();
  std::optional<Block> audited() const;
  Rank auditor(Block block) const;
  bool audited_alike();
  bool deals() const;
  bool deal();
  bool follows_blocks() const { return work_.dealt != 0 && work_.dealt + 1 == next_; }
  // Whether the call in progress sums the blocks that were computed in the previous round.
  bool sums_blocks() const { return follows_blocks() && work_.dealt_all && !up_.call.shared; }
  void dealt(bool all) { work_.dealt = next_, work_.dealt_all = all; }
  std::string why_not_after_blocks() const;
  void leave_out_the_others();
  std::shared_ptr<const Decoding> choose_dealt(std::uint32_t piece);
  std::shared_ptr<const Decoding> choose_sealed(std::uint32_t piece);
  bool is_there(Child& child);
  void hear_where_it_is(Child& child, const Header& head);
  bool lacks_what_it_computed() const;
  void watch_members();
  bool does_not_answer(const Child& child) const;
  bool only_silent_hold() const;
  bool lacks_blocks() const;
  double shares_at() const;
  std::string lacking_blocks() const;

  // Sections.
  std::uint64_t piece_bytes(const std::vector<Segment>& total) const;
  Layout laid_out(const std::vector<Segment>& total) const;
  SumShape sum_shape(const std::vector<Segment>& total) const;
  Incoming messages_of(const std::vector<Segment>& total) const;
  Purpose purpose() const { return root() ? Purpose::result : Purpose::message; }
  bool may_delegate() const;
  bool may_delegate_message() const;
  std::optional<bool> delegate();
  bool takes_part(const Child& child) const;
  bool begin_sections(const std::shared_ptr<const Decoding>& decoding);
  bool gives_up() const;
  bool chosen_by_all() const;
  bool own_is_zero() const;
  bool fetchable(const Decoding& choice);
  SectionShares shares_of(const Delegated& delegated,
                          const std::vector<std::shared_ptr<const Decoding>>& choices) const;
  std::vector<std::shared_ptr<const Decoding>> decodings_in_turn(std::shared_ptr<const Decoding> first);
  std::shared_ptr<const Decoding> decoding_from(const std::vector<std::size_t>& order, bool in_time);
  std::shared_ptr<const Decoding> decoding_from(std::size_t first, bool in_time);
  double latecomers_until() const;
  void assign(std::vector<Section> sections);
  void add_terms(SectionPlan& plan, std::size_t job);
  void tell_sections(Rank to, Round round, std::uint64_t fingerprint, const SectionPlan& plan, std::size_t job);
  void join_sections(const Child& child);
  bool oversee();
  bool mend_sections();
  bool is_responsive(Child& child);
  Rank stand_in(std::size_t index);
  void end_delegation();
  void abandon_sections();
  void pause_sections(Rank maker);
  bool answers_since(const Child& child, double since) const;
  bool spreads(const Entry& entry) const;
  std::vector<Rank> those_waiting(const Entry& entry) const;
  bool will_spread_to(Rank rank, const Entry& entry) const;
  void spread(const Entry& entry);
  void on_delegate(Rank from, const Message& message);
  void decline(const Message& message);
  Message about_section(Round round, std::size_t index, std::uint32_t version) const;
  void tell_unformed(Round round, std::size_t index, std::uint32_t version, const std::vector<Rank>& members);
  void learn_sections(SectionPlan plan);
  void check_sections(const Header& result);
  Entry* begin_entry();
  struct Destination {
    const Layout& layout;
    const std::vector<std::byte*>& at;
    std::vector<bool>& arrived;
    Copy how;
  };
  Destination destination();
  Destination destination(Entry& entry) const;
  bool from_afar() const;
  const std::byte* piece_of_section(std::size_t index, std::uint32_t piece) const;
  bool is_sibling(Rank rank) const;
  bool has_begun(const Section& section) const;
  void begin_forming(const SectionPlan& plan, std::size_t job);
  void end_sections();
  bool form();
  void drop_formed();
  bool bring_terms(Forming& forming, std::vector<const std::byte*>& inputs);
  void cannot_form(std::size_t index, Rank term);
  void unless_copy_lacks_memory(std::size_t index, const std::function<void()>& act);
  void lose_term(Rank rank);
  bool term_arrived(Rank from, Object object, std::uint32_t piece, std::span<const std::byte> data);
  void tell_formed(Rank to, std::size_t index);
  void on_formed(Rank from, const Message& message);
  void formed(std::size_t index, std::uint32_t ready, std::vector<std::uint64_t> addresses);
  void sections_came_on();
  bool take_sections(Destination to);
  bool all_taken(bool or_gone = false) const;
  void section_arrived(Rank from, Object object, std::uint32_t piece, std::span<const std::byte> data);
  std::optional<bool> follow_sections();
  double sections_at() const;

  // Whether this rank lacks the other ranks' state and must not take part in this sum.
  bool lacks_state() const { return !alike_ && up_.call.up; }
  std::string what_it_lacks() const;
  std::string me() const { return "rank " + std::to_string(family_.rank); }  // in texts
  void skip(const std::string& why);

  // Whether messages fit.
  bool awaits_all() const { return decoder_.checked() && limits_.compares == Compares::all; }
  bool awaits_more(const std::vector<bool>& heard) const;
  std::shared_ptr<const Decoding> choose_checked();
  std::vector<const std::byte*> checked(const Decoding& decoding,
                                        std::span<const std::byte* const> messages);
  bool accepted();
  bool accepted(const Contradiction& wrong);
  bool accepted_not_finite(const std::vector<std::size_t>& children);
  void tell_not_finite(Round round, const std::string& text);
  bool can_do_without(const std::vector<std::size_t>& children);
  void leave_out(const std::vector<std::size_t>& children);
  std::string about_round() const;
  bool counted();
  bool all_may_come() const;

  // Where this rank stands.
  bool in_program() const;
  void watch_children();

  // Deadlines.
  bool approximates() const { return limits_.on_deadline == OnDeadline::approximate; }
  void begin_approximating();
  double deadline(double share) const { return deadline(share, up_.call.fingerprint); }
  double deadline(double share, std::uint64_t fingerprint) const;
  double longest_deadline() const;
  double overdue_at() const;
  double uncalled_at() const;
  void fail_uncalled();
  double began() const;
  bool waits_for_children() const;
  void waited(double seconds);
  bool can_be_had() const;
  std::string lacking() const;
  void miss_the_deadline();
  bool lacks(std::size_t child) const;
  bool silent(const Child& child) const;
  void ask_children();
  void ask_whether_it_is_there(Child& child);
  bool offers_approximation(const Child& child) const;
  void hear_the_stalled();
  bool only_silent_lack();
  static std::string too_late(Round round, double seconds);
  void watch_above();
  void decide_alone(const std::string& text);
  std::string without_a_root(Round round) const;
  // Return the first round about which the root may know more than this rank; 0: none, or the root is dead.
  Round unsure_of() const { return upstream_.rootless() ? 0 : failed_alone_.first(); }
  void on_overdue(Child& child, const Message& message);
  std::shared_ptr<const Decoding> approximation(std::uint32_t piece);

  // Telemetry.
  void sum_complete();
  double own_work() const;
  double own_of_computed() const;
  double cost_of(Block block) const;
  void remember_division();
  void on_step_times(Rank from, const Message& message);
  void tell_step_times();

  // The way down.
  void place(Entry& entry);
  void decided(Entry& entry, std::uint32_t ready);
  void on_result(Rank from, const Message& message);
  static std::vector<Segment> segments_of(const Message& message);
  void read_announcement(Announcement& news, const Message& message) const;
  Entry* entry_at_frontier(const Announcement& news);
  bool follow();
  void lost_source();
  void hand_over(const Entry& entry);
  void give(const Layout& layout, std::uint32_t piece);
  std::size_t height(Rank ancestor) const;
  bool is_above(Rank rank) const;
  void ask();
  void want(Rank rank);
  void on_want(Rank rank, Listener& listener, const Header& head);
  void on_gone(Rank from, Round round, Round oldest);
  void lose_frontier();
  void skip_to(Round round);
  void take_back();
  void desynchronize(const std::string& why = {});
  void tell_gone(Rank rank, Round round, Round oldest);
  void tell(Rank rank, Listener& listener);
  void tell_all();
  void note(Rank rank, Round newest, std::uint8_t flags = 0);
  bool over_budget(std::uint64_t bytes, std::size_t rounds) const;
  void forget();
  Entry& fail_newest(std::uint64_t fingerprint, const std::string& error, bool alone);

  // Calls that do not match.
  std::string unreadable(Rank from, const std::string& which) const;
  void introduce(Rank to, Signatures::Known& known, std::uint64_t fingerprint);
  std::string clash(Rank one, std::uint64_t fingerprint, Round round, Rank other,
                    std::uint64_t other_fingerprint) const;
  void check_offer(Child& child);
  void check_offers();
  std::vector<bool> may_offer(std::uint32_t piece) const;
  std::vector<bool> may_come(std::uint32_t piece) const;
  void alert(Round round, const std::string& text, std::uint8_t flags = 0);
  Round undecided() const;
  void answer_losses();
  void answer_loss(Rank other, std::uint8_t alarm_flags);
  std::string lost_words(Rank other) const;
  double losses_wait() const;
  double stuck_at() const;
  void fail_stuck();
  void tell_alert(Round round, std::uint8_t flags, const std::string& text);
  void tell_alerts();
  void decide_error(std::string text);
  void fail_round(Round round, std::uint64_t fingerprint, std::string text, bool alone = false);

  // The end.
  void on_bye(Child& child, const Message& message);
  Message bye(Round round) const;
  void retire();
  void append_departed(Message& message, const std::vector<Rank>& ranks) const;
  void learn_failures(std::string_view lines);
  void give_up(Child& child);
  bool needs_nothing(const Child& child) const;
  bool has_left() const { return departures_.leaving() && !calling(); }
  bool all_left() const;
  bool may_leave() const;
  void say_bye(bool at_once = false);
  void go_on_leaving();
  void end_round();
  std::string who_left() const;
  void refuse(Round round, const std::string& text);
  void refuse_called(Rank rank, const Listener& listener);

  // Snapshots.
  void on_state(Rank from, const Message& message);
  void tell_state(Rank rank, Listener& listener);
  void ask_next_state();
  bool follow_state();

  void finish(Outcome outcome, std::string error = {});
  void keep_own();
  void withdraw(Object::What what, Round first_valid);
  double patience(double stuck_since) const;
  double share_of_wait(double since) const;
  Round done() const;
  Round lacked_below(Round round) const;
  Header header(Kind kind, Round round) const;
  static void append_addresses(Message& message, const std::vector<std::byte*>& segments);
  static std::string listed(const std::vector<Rank>& ranks);

  // How many pieces to request from one rank at a time, if a fetch takes time. With more, one child's pieces
  // would crowd out its siblings' pieces in their parent's port, and layers would take turns instead of working
  // at once.
  static constexpr std::uint32_t pieces_ahead = 2;
  static constexpr double calm_waits = 12;  // times `losses_wait`; a link that loses nothing for so long is sound again

  Family family_;
  Decoder decoder_;
  Limits limits_;
  Wire& wire_;
  Pool pool_;

  // This rank's calls.
  Round next_ = 1;
  WayUp up_;  // this rank's way up in the round `next_`
  Outcome outcome_ = Outcome::done;
  bool alike_ = true;
  bool watches_ = false;
  std::string error_;
  Latest durations_;  // how long rounds took, from this rank's call on
  std::map<std::uint64_t, Latest> waits_;  // times that this rank waited for its children, by fingerprint of the call
  Telemetry telemetry_;
  std::function<void(const RoundRecord&)> hook_;
  std::vector<Rank> columns_;
  std::map<Rank, StepTime> step_times_;  // step times of ranks below
  double told_step_times_ = 0;
  double ended_at_ = 0;     // when this rank's latest round ended
  double parent_heard_;     // when the parent last sent something
  std::vector<std::string> news_;

  // The ranks below.
  std::vector<Child> children_;
  std::uint64_t offers_seen_ = 0;
  std::vector<std::size_t> rows_;  // see `rows_in_order`
  std::uint64_t rows_sorted_ = 0;  // the value of `offers_seen_` when `rows_` was sorted
  SharedWork work_;

  // The way down.
  History history_;
  Round frontier_ = 1;
  Round newest_ = 0;         // the newest round known to be decided
  double program_eps_ = 0;   // see `computes_with`
  Upstream upstream_;
  std::map<Round, Announcement> announced_;
  std::set<std::uint32_t> asked_pieces_;
  std::map<Rank, Listener> listeners_;
  std::vector<std::byte> zeros_ = {};  // a piece of zeros, for the vector of a root without data
  Sections sections_;  // the sections of the round at the frontier, if it has any
  std::vector<std::pair<Rank, Message>> early_ = {};  // messages about sections that overtook the plan
  SectionVersions section_versions_;  // counted across rounds, as a round may be repeated
  // How long a sum in sections took from its plan on, and its bytes: the latest one that was about as long as the
  // longest.
  double section_seconds_ = 0, section_bytes_ = 0;
  Pause pause_;  // of sums in sections
  // How many pieces to request at a time, if a fetch takes time: pieces to form a section from, and pieces of
  // formed sections.
  Window terms_ahead_{4, 24}, results_ahead_{8, 48};
  Formed formed_;  // sections that this rank has formed, in the latest round with sections
  // This rank's section of the parent's latest copy of a result (`Purpose::copy`), and the ranks that may fetch it.
  struct {
    Round round = 0;
    std::size_t index = 0;
    std::uint32_t version = 0;
    std::vector<Rank> members = {};
  } copied_ = {};
  FailedAlone failed_alone_;
  bool desynchronized_ = false;
  bool root_ended_ = false;  // the root's program has ended, so the root counts as dead

  std::array<Round, Object::kinds> first_valid_{};  // by kind: the first round whose object other ranks may fetch

  Snapshot snapshot_;
  std::optional<Recovery> recovery_;
  Departures departures_;

  // Calls that do not match.
  Signatures signatures_;
  Alerts alerts_;  // at the root
  Losses losses_;
  std::uint64_t fetched_bytes_ = 0, formed_bytes_ = 0, compared_rounds_ = 0;
};

}  // namespace jaxcoded
