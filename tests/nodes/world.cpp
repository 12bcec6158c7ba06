#include "world.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <new>

#include "memory.h"

namespace jaxcoded {

constexpr double rest_times = 20;   // in units of `orphan_seconds`: a second of an idle group
constexpr int most_woken = 128;     // wake-ups by timers within `rest_times`
constexpr int most_turns = 10'000;  // turns that a rank may take before it sleeps
constexpr std::size_t snapshot_bytes = 100;

// Adds the seconds that the processor spends on this thread.
class Timer {
 public:
  explicit Timer(double* to) : to_(to), started_(to ? now() : 0) {}
  ~Timer() {
    if (to_) *to_ += now() - started_;
  }

 private:
  static double now() {
    timespec at{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
  }
  double* to_;
  double started_;
};

struct World::Running {
  Round round;
  const Planned* call;
  std::vector<Segment> message = {};
  std::vector<Bytes> own = {}, out = {};
  bool in_place = false;
  std::size_t known = 0;  // how many of the call's vectors the node has
  double scale = 1;       // see `Settings::chained`
  bool left = false;      // the program passes no more vectors of this call, and does not read its result
  // If the call's work is shared:
  const Planned* of = nullptr;          // the call that sums the blocks
  std::vector<Numbers> sums = {};       // of the blocks in the rank's vectors
  std::optional<Work> work = {};        // the block that the rank's program computes
  bool over = false;                    // the rank's program has left the loop over its blocks

  std::vector<Bytes>& results() { return in_place ? own : out; }
  const std::vector<Bytes>& results() const { return in_place ? own : out; }
  std::vector<const std::byte*> own_at(std::size_t first, std::size_t end) const {
    std::vector<const std::byte*> at;
    for (std::size_t i = first; i < end; ++i) at.push_back(own[i].data());
    return at;
  }
  std::vector<std::byte*> out_at() {
    std::vector<std::byte*> at;
    for (Bytes& vector : results()) at.push_back(vector.data());
    return at;
  }
};

class World::SimulatedWire : public Wire, Source {
 public:
  SimulatedWire(World& world, Rank rank) : world_(world), rank_(rank) {}

  // As in MPI's wire, sending and fetching take memory of this rank.
  void send(Rank to, const Message& message) override {
    const auto sent = std::make_unique<Message>(message);
    const memory::Exempt simulated;
    world_.sent(rank_, to, std::move(*sent));
  }
  Fetch fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address, std::byte* to,
              std::size_t bytes, Copy) override {
    const auto request = std::make_unique<const Request>(rank_, from, object, piece);
    const memory::Exempt simulated;
    return world_.fetch(*request, address, to, bytes);
  }
  void withdraw(Object::What what, Round first_valid) override {
    valid[static_cast<std::size_t>(what)] = first_valid;
  }
  Source& memory() override { return *this; }
  std::byte* allocate(std::size_t bytes) override {
    if (world_.short_of_memory.has(rank_)) {
      world_.lacked_memory_.set(rank_);
      throw std::bad_alloc();
    }
    return heap.allocate(bytes);
  }
  void release(std::byte* data, std::size_t bytes) override { heap.release(data, bytes); }
  std::size_t inline_bytes(Rank to) const override {
    const auto& some = world_.settings_.inline_bytes;
    const auto number = static_cast<std::uint64_t>(rank_) << 32 | static_cast<std::uint64_t>(to);
    return some[mixed(world_.links_seed_ ^ mixed(number)) % some.size()];
  }
  bool direct(Rank from) const override { return world_.on_one_host(rank_, from); }
  double now() const override { return world_.clock; }

  std::array<Round, Object::kinds> valid = {};

 private:
  World& world_;
  Rank rank_;
};

World::World(const Group& group, std::vector<Planned> script, const Settings& settings, Random& random)
    : frozen(group.size()), idle(group.size()), started(group.size()), leaving(group.size()),
      dead(group.size()), reported(group.size()), short_of_memory(group.size()), slow(group.size()), ends(group.size()),
      costs(group.size()),
      group_(group), script_(std::move(script)), settings_(settings), random_(random),
      links_seed_(random.bits()), inboxes_(group.size()), requests_(group.size()), answers_(group.size()),
      running_(group.size()), left_behind_(group.size()), given_back_(group.size()), must_replan_(group.size()),
      replanned_(group.size()), steps_(group.size()),
      restored_(group.size()), lacked_memory_(group.size()) {
  const Group* plan = &group_;
  for (Planned& call : script_) {
    call.group = plan;
    call.replanned = plan != &group_;
    if (call.replans) plan = &group_.replanned.front();
  }
  const auto& families = settings.limits.sections_from ? group.delegating : group.families;
  for (Rank rank = 0; rank < size(); ++rank) {
    Limits limits = settings.limits;
    limits.deadline_share = group.deadline_shares[index(rank)];
    wires_.push_back(std::make_unique<SimulatedWire>(*this, rank));
    const auto& decoders = settings.compares ? group.comparing : group.decoders;
    nodes_.push_back(
        std::make_unique<Node>(families[index(rank)], decoders[index(rank)], limits, *wires_.back()));
    if (!group.holders.empty()) node(rank).share_blocks(group.holders);
    if (settings.recovers) node(rank).keep_state(1, state(1));
    if (settings.joined) node(rank).expect_state();
  }
}

World::~World() = default;

// Let a rank act. Returns whether there was enough memory.
template <class Act>
bool World::attempt(Rank rank, Act act) {
  std::optional<std::size_t> succeed;
  if (seen.failed_allocations < settings_.failures && random_.chance(settings_.failing)) {
    succeed = random_.below(random_.pick({4u, 12u, 40u}));
  }
  const memory::Failing failing(succeed);
  bool enough = true;
  try {
    const Timer timer(timed(rank));
    act(node(rank));
  } catch (const std::bad_alloc&) {
    enough = false;
  }
  if (failing.happened()) {
    ++seen.failed_allocations;
    lacked_memory_.set(rank);
    if (asking_.contains(rank)) ask_again_.insert(rank);
    if (traced) std::cerr << clock << ": an allocation of rank " << rank << " fails\n";
  }
  return enough;
}

// Give a rank a turn. As in the engine, a call fails if the turn runs out of memory, and the engine reports this
// to the node until there is enough memory for the report. `for_call`: see `Node::lack_memory`. Returns whether
// there was enough memory.
template <class Act>
bool World::turn(Rank rank, Act act, bool for_call) {
  if (attempt(rank, act)) return true;
  const auto report = [&](Node& node) { node.lack_memory(for_call); };
  if (!attempt(rank, report)) report(node(rank));
  return false;
}

// Give a rank a turn that the engine repeats until there is enough memory for it.
template <class Act>
void World::turn_to_the_end(Rank rank, Act act) {
  if (!turn(rank, act)) {
    check_end(rank);
    act(node(rank));
  }
  check_end(rank);
}

// --- The wires ---

bool World::linked(Rank from, Rank to) const {
  const auto has = [&](Rank rank, Rank other) { return std::ranges::find(above(rank), other) != above(rank).end(); };
  return has(from, to) || has(to, from) || (from != to && group_.parents[index(from)] == group_.parents[index(to)]);
}

void World::sent(Rank from, Rank to, Message message) {
  check(linked(from, to), "rank", from, "sends a message to rank", to);
  ++costs[index(from)].messages;
  costs[index(from)].bytes += sizeof message.header + message.body.size();
  if (dead.has(to)) return;
  if (message.header.kind == Kind::offer && message.header.flags & Flag::shares) {
    const auto progress = message.values<std::uint32_t>(0, 2);
    // a rank that has blocks to compute offers no vector, and may change even the version that it reports
    versions_[from] = (std::uint64_t{progress[0]} << 32 | progress[1]) + !message.header.ready;
  }
  if (!random_.chance(settings_.vanishing)) inboxes_[index(to)][from].push_back(std::move(message));
}

Wire::Fetch World::fetch(const Request& request, std::uint64_t address, std::byte* to, std::size_t bytes) {
  const auto& [asker, source, object, piece] = request;
  if (!on_one_host(asker, source) || random_.chance(settings_.unreadable)) {
    ask(request);
    return Wire::Fetch::pending;
  }
  // the memory of a dead process may still be mapped
  const bool gone = dead.has(source) && random_.chance(0.5);
  if (gone || wires_[index(source)]->valid[static_cast<std::size_t>(object.what)] > object.round) {
    return Wire::Fetch::gone;
  }
  const auto data = node(source).read(object, piece);
  if (!data) {
    check(may_change(request), "rank", source, "changed object", static_cast<int>(object.what), "of round",
          object.round, "before it withdrew it");
    for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(random_.bits());
    return Wire::Fetch::done;
  }
  check(data->size() == bytes, "rank", asker, "expects another length of a piece");
  check(!bytes || !std::memcmp(reinterpret_cast<const void*>(address), data->data(), bytes), "rank", source,
        "announced another address");
  check_piece(request, *data);
  if (bytes) std::memcpy(to, data->data(), bytes);
  return Wire::Fetch::done;
}

void World::ask(const Request& request) {
  if (reported.has(request.source)) {
    answers_[index(request.asker)].push_back({request, {}});
  } else {
    requests_[index(request.source)].push_back(request);
  }
}

void World::answer(const Request& request) {
  const auto data = node(request.source).read(request.object, request.piece);
  if (data) check_piece(request, *data);
  Bytes sent = data ? Bytes(data->begin(), data->end()) : Bytes();
  if (!sent.empty() && random_.chance(settings_.damaged)) sent.back() ^= std::byte{64};
  answers_[index(request.asker)].push_back({request, std::move(sent)});
}

void World::arrive(const Answer& answer) {
  ++(answer.data.empty() ? seen.pieces_gone : seen.pieces_sent);
  turn_to_the_end(answer.asker,
                  [&](Node& node) { node.arrived(answer.source, answer.object, answer.piece, answer.data); });
}

Message World::take_message(Rank from, Rank to) {
  const auto queue = inboxes_[index(to)].find(from);
  Message message = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) inboxes_[index(to)].erase(queue);
  return message;
}

void World::deliver(Rank from, Rank to) {
  if (const auto link = broken.find({from, to}); link != broken.end()) {
    const Rank informed = next_message(from, to) == Kind::bye ? from : link->second;
    if (!dead.has(informed)) return lose(from, to, informed);
  }
  const Message message = take_message(from, to);
  const int times = random_.chance(settings_.twice) ? 2 : 1;
  for (int time = 0; time < times; ++time) deliver_once(from, to, message);
  const Kind kind = message.header.kind;
  if (random_.chance(settings_.again) && (kind == Kind::offer || kind == Kind::result ||
                                          kind == Kind::note || kind == Kind::signature)) {
    echoes_.push_back({{from, to}, message});
  }
}

// A node that had too little memory for a message gets the message a second time. If memory runs out again, the
// node must drop the message, since other messages wait behind it.
void World::deliver_once(Rank from, Rank to, const Message& message) {
  const Header& head = message.header;
  ++seen.messages[static_cast<std::size_t>(head.kind)];
  if (head.kind == Kind::result) results_told_[{from, to}] = {head.round, head.ready, head.flags};
  if (traced) {
    std::cerr << clock << ": " << from << " to " << to << ": kind " << static_cast<int>(message.header.kind)
              << " flags " << static_cast<int>(message.header.flags) << " ready " << message.header.ready
              << " round " << message.header.round << " last " << message.header.last << " done "
              << message.header.done << '\n';
  }
  turn_to_the_end(to, [&](Node& node) { node.deliver(from, message); });
}

// --- What is right ---

const World::Running* World::offering(Rank rank) const {
  const auto& running = running_[index(rank)];
  return running ? running.get() : left_behind_[index(rank)].get();
}

Expected& World::expected(const Planned& call) {
  return expected_.try_emplace(&call, call).first->second;
}

// Every piece that is sent must be right, even if the receiver does not use it.
void World::check_piece(const Request& request, std::span<const std::byte> data) {
  if (!settings_.checks) return;
  const Object& object = request.object;
  switch (object.what) {
    case Object::What::result:
    case Object::What::section: {
      // each parent numbers the versions of its own family
      const bool section = object.what == Object::What::section;
      const Rank above = section ? group_.parents[index(request.source)] : -1;
      const auto [known, first] = pieces_.try_emplace(
          std::tuple(static_cast<int>(section), object.round, request.piece, object.version, above),
          data.begin(), data.end());
      check(first || std::ranges::equal(known->second, data), "piece", request.piece, "of round", object.round,
            "has different bytes on different ranks");
      break;
    }
    case Object::What::state: break;
    default: check_vector(request, data);
  }
}

// A piece of a rank's message, or of a parent's own vector.
void World::check_vector(const Request& request, std::span<const std::byte> data) {
  const Running* const running = offering(request.source);
  check(running != nullptr, "rank", request.source, "lets others read a call that is over");
  const bool own = request.object.what == Object::What::own;
  const std::uint64_t bytes = settings_.limits.piece_for(bytes_of(running->call->segments));
  const Piece piece = Layout(running->message, bytes, own ? settings_.limits.slices : 1)[request.piece];
  if (running->message.empty()) return;
  const DType dtype = running->message[piece.segment].dtype;
  const bool shared = running->call->shared, sums_blocks = running->call->sums_blocks;
  if (shared || sums_blocks || own) {
    if (sums_blocks && !own && may_be_overwritten(request)) return;
    Numbers exact;
    if (shared) {
      exact = running->sums[piece.segment];
    } else if (sums_blocks) {
      exact = computed_.at(running->round).at(request.source)[piece.segment];
    } else {
      exact = running->call->own(request.source)[piece.segment];
      for (double& number : exact) number = rounded(dtype, number) * running->scale;
    }
    const Bytes right = narrowed(dtype, exact);
    check(std::ranges::equal(std::span(right).subspan(piece.offset, piece.bytes), data), "rank",
          request.source, "lends a wrong piece", request.piece, "of round", running->round);
  } else if (settings_.partial && !group_.families[index(request.source)].children.empty()) {
    return;  // the message is the sum of only the ranks that have come
  } else if (const Rank liar = running->call->liar; liar >= 0 && std::ranges::count(above(liar), request.source)) {
    return;  // a parent that finds the lie sends no message: those above form theirs from other children
  } else if (!may_be_overwritten(request)) {
    Numbers actual = widened(dtype, data);
    for (double& number : actual) number /= running->scale;
    expected(*running->call).check_message(request.source, piece.segment, piece.first, actual);
  }
}

// The result may overwrite a piece of a message once the root has that piece of the sum. From then on no rank
// uses the message's piece, and a parent that has the result forms no sum. If messages are compared, no rank
// may read an overwritten piece.
bool World::may_be_overwritten(const Request& request) const {
  const Running* const running = offering(request.source);
  const Family& family = group_.families[index(request.source)];
  if (settings_.compares || !(running->in_place || !family.children.empty())) return false;
  const Node& root = *nodes_[index(group_.root())];
  return root.next() > request.object.round ||
         (running->call->group->shares[index(request.source)].slices == 1 &&
          root.read({Object::What::result, request.object.round}, request.piece));
}

// Programs add blocks to vectors that other ranks may still read. Once a version of a vector is no longer
// offered, no rank uses its pieces.
bool World::may_change(const Request& request) const {
  const Running* const running = offering(request.source);
  if (!running || !running->call->shared) return false;
  if (request.object.what == Object::What::own) return true;  // the root reports its own version to no rank
  const auto version = versions_.find(request.source);
  return request.object.what == Object::What::message &&
         (running->work || (version != versions_.end() && request.object.version < version->second));
}

// Return the ranks of which an error says that their messages do not fit.
std::set<Rank> World::accused(const std::string& error) {
  std::set<Rank> out;
  const auto first = error.find("what rank"), last = error.find(" sent to ");
  if (first == std::string::npos || last == std::string::npos) return out;
  std::string number;
  for (const char letter : error.substr(first, last - first)) {
    if (letter >= '0' && letter <= '9') {
      number += letter;
    } else if (!number.empty()) {
      out.insert(std::stoi(std::exchange(number, {})));
    }
  }
  return out;
}

void World::check_end(Rank rank) {
  auto& running = running_[index(rank)];
  if (!running || node(rank).outcome() == Outcome::pending) {
    if (const auto& before = given_back_[index(rank)]; before && settings_.checks) {
      for (const auto* vectors : {&before->own, &before->out}) {
        for (const Bytes& vector : *vectors) {
          const bool kept = std::ranges::all_of(vector, [](std::byte byte) { return byte == std::byte{255}; });
          check(kept, "rank", rank, "writes to vectors of a call that is over");
        }
      }
    }
    return;
  }
  given_back_[index(rank)] = std::move(running);
  Running& ended = *given_back_[index(rank)];
  const Outcome outcome = node(rank).outcome();
  ends[index(rank)][ended.round] = {outcome, node(rank).error()};
  ++seen.outcomes[static_cast<std::size_t>(outcome)];
  if (traced) {
    std::cerr << clock << ": rank " << rank << " ends round " << ended.round << ": "
              << static_cast<int>(outcome) << ' ' << node(rank).error() << '\n';
  }
  if (outcome == Outcome::done) {
    check(node(rank).error().empty() && node(rank).next() == ended.round + 1, "rank", rank,
          "ended round", ended.round, "and is in round", node(rank).next());
    check_result(rank, ended);
    if (ended.call->replans) {
      must_replan_.set(rank);
      if (random_.chance(0.5)) replan(rank);
    }
    if (settings_.chained) {
      check(steps_[index(rank)] == steps_before(ended.round), "rank", rank, "has a sum of round", ended.round,
            "after", steps_[index(rank)], "sums in place of", steps_before(ended.round));
      ++steps_[index(rank)];
      summed_.insert(ended.round);
    }
  }
  const std::string& error = node(rank).error();
  if (outcome == Outcome::desynchronized && error.find("alone") == std::string::npos) {
    check_lost(rank, ended.round);
  }
  const bool accuses = error.find("cannot read a message") != std::string::npos ||
                       error.find("InconsistentMessages") != std::string::npos;
  if (ended.call->liar >= 0 && outcome != Outcome::desynchronized) {
    ++seen.lies;
    check(outcome == Outcome::failed && accused(error).contains(ended.call->liar), "rank", rank,
          "does not name the liar", ended.call->liar, "in round", ended.round, error);
  } else {
    check(!accuses || settings_.damaged || settings_.vanishing, "rank", rank, "accuses an honest rank:", error);
  }
  for (Rank other = 0; other < size() && error.find(" has too little memory") != std::string::npos; ++other) {
    const bool named = error.find("rank " + std::to_string(other) + " has too little memory") != std::string::npos;
    check(!named || lacked_memory_.has(other), "rank", rank, "has an error without a reason:", error);
  }
  const bool followed = ended.call->shared && ended.call->segments.empty();
  const Round next = ended.round + 1;
  // a step that computes blocks on the host has two rounds, and keeps a snapshot only after the second

  if (outcome != Outcome::desynchronized && settings_.recovers && !followed) {
    node(rank).keep_state(next, state(next));
  }
  // No rank reads or writes the caller's memory any more.
  for (auto* vectors : {&ended.own, &ended.out}) {
    for (Bytes& vector : *vectors) std::ranges::fill(vector, std::byte{255});
  }
  if (ended.call->shared && !ended.over && !dead.has(rank)) {
    // the program does not know yet that the call is over, and asks for a block
    check(!node(rank).take_block(), "rank", rank, "gets a block of a call that is over");
  }
}

void World::check_result(Rank rank, const Running& running) {
  if (running.left) return;
  const Planned& call = *running.call;
  const bool nothing = call.kind == Planned::Kind::reduce && rank != group_.root();
  Bytes all;
  for (std::size_t s = 0; s < call.segments.size(); ++s) {
    const Bytes& result = running.results()[s];
    if (s >= call.summed()) {
      check_audit(running, widened(call.segments[s].dtype, result));
      all.insert(all.end(), result.begin(), result.end());
      continue;
    }
    if (nothing) {
      const bool zero = std::ranges::all_of(result, [](std::byte byte) { return byte == std::byte{}; });
      check(zero, "rank", rank, "has numbers after a sum that the root alone gets");
      continue;
    }
    if (!settings_.partial && (settings_.checks || rank == group_.root())) {
      Numbers actual = widened(call.segments[s].dtype, result);
      for (double& number : actual) number /= running.scale;
      expected(call).check_result(rank, s, actual);
    }
    all.insert(all.end(), result.begin(), result.end());
  }
  if (nothing) return;
  const auto [known, first] = results_.try_emplace(running.round, all);
  check(first || known->second == all, "rank", rank, "has other bytes than others in round", running.round);
  if (rank == group_.root() && (call.sums_blocks || (call.shared && !call.segments.empty()))) {
    check_division(running);
  }
}

// Check that no block has NaN or infinities, and that the block's two reports are equal.
void World::check_audit(const Running& running, const Numbers& audit) {
  const auto reports = std::span(audit).subspan(group_.size());
  const auto first = reports.first(reports.size() / 2), second = reports.last(reports.size() / 2);
  const bool finite =
      std::ranges::all_of(std::span(audit).first(group_.size()), [](double number) { return number == 0; });
  const auto once = [](std::span<const double> report) { return report[0] == 0 || report[0] == 1; };
  check(finite && once(first) && once(second), "round", running.round, "has wrong reports on its audited block");
  const bool both = first[0] == 1 && second[0] == 1;
  if (both) ++seen.audits;
  check(!both || std::ranges::equal(first, second), "round", running.round, "has different reports on its audited block");
}

// Check that the result is the sum of the members' vectors, in the ledger's order, with each block once.
void World::check_division(const Running& running) {
  const Division division = node(group_.root()).division();
  std::set<Block> blocks;
  std::size_t count = 0;
  for (const auto& some : division) {
    blocks.insert(some.begin(), some.end());
    count += some.size();
  }
  check(blocks.size() == count && (settings_.partial || count == group_.holders.size()), "round", running.round,
        "has", count, "blocks,", blocks.size(), "different ones, of", group_.holders.size());
  std::vector<Bytes> results = running.results();
  results.resize(running.call->summed());
  bool right = sums_of(running, division) == results;
  // after a deadline, a sum of the previous round's blocks leaves out the vectors of ranks that do not come
  const bool some = settings_.partial && running.call->sums_blocks;
  for (std::uint32_t without = 1; some && !right && without < 1u << division.size(); ++without) {
    Division rest = division;
    for (std::size_t member = 1; member < rest.size(); ++member) {
      if (without >> member & 1) rest[member].clear();
    }
    right = sums_of(running, rest) == results;
  }
  check(right, "round", running.round, "has other bytes than the sum of its members' vectors");
}

std::vector<Bytes> World::sums_of(const Running& running, const Division& division) const {
  std::vector<Bytes> out;
  for (std::size_t s = 0; s < running.call->summed(); ++s) {
    const Segment& segment = running.call->segments[s];
    std::optional<Numbers> total;
    for (const auto& blocks : division) {
      if (blocks.empty()) continue;
      Numbers vector(segment.count);
      for (const Block block : blocks) {
        const Numbers more = running.call->sum(s, group_.starts[block], group_.starts[block + 1]);
        for (std::size_t i = 0; i < vector.size(); ++i) vector[i] += more[i];
      }
      for (std::size_t i = 0; i < vector.size(); ++i) {
        const double number = rounded(segment.dtype, vector[i]);
        vector[i] = total ? rounded(segment.dtype, (*total)[i] + number) : number;
      }
      total = std::move(vector);
    }
    out.push_back(narrowed(segment.dtype, total.value_or(Numbers(segment.count))));
  }
  return out;
}

// Check that a rank has a reason for being unable to get a result: some rank above knows of enough later rounds,
// has continued from a snapshot, cannot get a result itself, or is dead.
void World::check_lost(Rank rank, Round round) const {
  const auto ahead = [&](Rank other) { return nodes_[index(other)]->frontier() >= round + settings_.limits.history_rounds; };
  const bool right = std::ranges::any_of(above(rank), [&](Rank other) {
    return ahead(other) || dead.has(other) || nodes_[index(other)]->desynchronized() || restored_[index(other)];
  });
  if (right || rank == group_.root()) return;
  check(false, "rank", rank, "cannot get the result of round", round, "any more:", describe());
}

Round World::steps_before(Round round) const {
  return static_cast<Round>(std::distance(summed_.begin(), summed_.lower_bound(round)));
}

// Return the state after the rounds before `round`, equal on all ranks.
State World::state(Round round) const {
  Random drawn(1000 * round + (settings_.chained ? steps_before(round) : 0));
  State out(snapshot_bytes);
  for (std::size_t i = 0; i < snapshot_bytes; ++i) out.data()[i] = static_cast<std::byte>(drawn.bits());
  return out;
}

// --- Programs ---

const Planned& World::call_of(Rank rank, Round round) {
  const auto other = deviations.find({rank, round});
  const Planned& call = other == deviations.end() ? planned(round) : other->second;
  if (call.replanned == replanned_.has(rank)) return call;
  Planned& stale = stale_.try_emplace({rank, &call}, call).first->second;
  stale.replanned = !call.replanned;
  stale.group = stale.replanned ? &group_.replanned.front() : &group_;
  stale.erased = nullptr;
  for (Segment& segment : stale.segments) {
    segment.count = (segment.count + stale.group->multiple - 1) / stale.group->multiple * stale.group->multiple;
  }
  return stale;
}

// Let a rank's program use the other plan, which it learned from its last call.
void World::replan(Rank rank) {
  const Group& other = group_.replanned.front();
  const auto& decoders = settings_.compares ? other.comparing : other.decoders;
  node(rank).replan(other.families[index(rank)].children, decoders[index(rank)]);
  must_replan_.set(rank, false);
  replanned_.set(rank);
  ++seen.replanned;
}

bool World::may_call(Rank rank) const {
  const Node& node = *nodes_[index(rank)];
  return !calls(rank) && !stopped(rank) && !idle.has(rank) && !leaving.has(rank) && !node.desynchronized() &&
         node.next() <= script_.size();
}

void World::submit(Rank rank) {
  if (must_replan_.has(rank)) replan(rank);
  if (call_of(rank, node(rank).next()).shared) return submit_shared(rank);
  begin(rank, [rank, this](Call call) { node(rank).submit(std::move(call)); });
}

void World::break_off(Rank rank) {
  ++seen.broken_off;
  const auto before = std::move(running_[index(rank)]);
  begin(rank, [rank, this](Call call) { node(rank).break_off(std::move(call)); });
}

// Make a rank's next call, and hand it over to the rank's node.
template <class Act>
void World::begin(Rank rank, Act act) {
  const Round round = node(rank).next();
  const Planned& call = call_of(rank, round);
  auto& running = running_[index(rank)];
  running = std::make_unique<Running>(Running{.round = round, .call = &call});
  if (settings_.chained) running->scale = std::ldexp(1.0, static_cast<int>(steps_[index(rank)] % 3));
  const auto& computed = computed_[round];
  const std::vector<Numbers> own = call.sums_blocks ? computed.at(rank) : call.own(rank);
  for (std::size_t v = 0; v < own.size(); ++v) {
    const DType dtype = call.segments[v % call.segments.size()].dtype;
    Numbers scaled = own[v];
    for (double& number : scaled) number = rounded(dtype, number) * running->scale;
    running->own.push_back(narrowed(dtype, scaled));
    running->message.push_back({dtype, own[v].size()});
  }
  bool alike = own.size() == call.segments.size();
  for (std::size_t s = 0; s < call.segments.size(); ++s) {
    alike = alike && running->message[s] == call.segments[s];
    running->out.emplace_back(call.segments[s].bytes(), std::byte{255});
  }
  running->in_place = alike && random_.chance(settings_.in_place);
  running->known = own.size();
  if (own.size() > call.segments.size() && !call.segments.empty() && random_.chance(settings_.staged)) {
    running->known = call.segments.size() * random_.between(1, own.size() / call.segments.size() - 1);
  }
  const bool complete = running->known == own.size();
  Call made = {.fingerprint = call.fingerprint(),
               .signature = call.signature(),
               .why_not = call.why_not,
               .up = call.kind != Planned::Kind::broadcast,
               .down = call.kind != Planned::Kind::reduce,
               .skipped = skips.contains({rank, round}),
               .message = running->message,
               .total = call.segments,
               .own = running->own_at(0, running->known),
               .out = complete ? running->out_at() : std::vector<std::byte*>(),
               .complete = complete,
               .erased = call.erased ? (*call.erased)[index(rank)] : std::vector<bool>(),
               .apart = {},
               .examples = {},
               .audits = {}};
  seen.skipped += made.skipped;
  turn(rank, [&](Node&) { act(std::move(made)); });
  check_end(rank);
}

void World::submit_shared(Rank rank) {
  const Round round = node(rank).next();
  const Planned& call = call_of(rank, round);
  auto& running = running_[index(rank)];
  running = std::make_unique<Running>(Running{.round = round, .call = &call});
  running->of = call.segments.empty() ? &planned(round + 1) : &call;
  running->message = call.segments;
  for (const Segment& segment : running->of->segments) running->sums.emplace_back(segment.count);
  for (const Segment& segment : call.segments) {
    running->own.emplace_back(segment.bytes());
    running->out.emplace_back(segment.bytes(), std::byte{255});
  }
  running->known = running->own.size();
  running->in_place = random_.chance(settings_.in_place);
  if (call.segments.empty()) computed_[round + 1][rank] = running->sums;
  Call made;
  made.fingerprint = call.fingerprint();
  made.signature = call.signature();
  made.message = made.total = call.segments;
  made.complete = false;
  made.shared = true;
  made.costs = call.costs;
  for (std::size_t s = 0; call.audited && s < call.summed(); ++s) {
    made.audits.emplace_back(std::numeric_limits<float>::epsilon(), call.segments[s].count);
  }
  turn(rank, [&](Node& node) { node.submit(std::move(made)); });
  come_for_block(rank);
  check_end(rank);
}

void World::come_for_block(Rank rank) {
  Running& running = *running_[index(rank)];
  for (std::size_t s = 0; s < running.own.size(); ++s) {
    const Bytes vector = narrowed(running.message[s].dtype, running.sums[s]);
    std::ranges::copy(vector, running.own[s].begin());
  }
  if (running.call->segments.empty()) computed_[running.round + 1][rank] = running.sums;
  turn(rank, [&](Node& node) { node.come_for_block(running.own_at(0, running.own.size())); });
}

bool World::is_incomplete(Rank rank) const {
  const auto& running = running_[index(rank)];
  return running && !running->call->shared && running->known < running->own.size();
}

bool World::computes_blocks(Rank rank) const {
  const auto& running = running_[index(rank)];
  return running && running->call->shared && !running->over;
}

bool World::may_extend(Rank rank) {
  const auto& running = running_[index(rank)];
  if (!running || stopped(rank) || idle.has(rank)) return false;
  if (!running->call->shared) return running->known < running->own.size() && !leaving.has(rank);
  if (running->over) return false;
  if (!running->work) {
    turn(rank, [&](Node& node) { running->work = node.take_block(); });
    if (running->work) {  // other ranks no longer use the vector
      for (Bytes& vector : running->own) std::ranges::fill(vector, std::byte{255});
    }
  }
  return running->work || node(rank).no_more_blocks();
}

// Let a program make one more part of its call ready, or compute a block.
void World::extend(Rank rank) {
  Running& running = *running_[index(rank)];
  if (running.call->shared) return compute_block(rank);
  const std::size_t first = running.known;
  running.known = std::min(first + running.call->segments.size(), running.own.size());
  const auto act = [&](Node& node) {
    node.extend(running.own_at(first, running.known));
    if (running.known == running.own.size()) node.complete(running.out_at());
  };
  if (!turn(rank, act, true)) running.known = running.own.size();  // the program passes no more parts
  check_end(rank);
}

void World::compute_block(Rank rank) {
  Running& running = *running_[index(rank)];
  if (!running.work) {
    running.over = true;
    turn(rank, [&](Node& node) { node.complete(running.out_at()); }, true);
    return check_end(rank);
  }
  const auto [block, fresh, audit] = *std::exchange(running.work, std::nullopt);
  const auto& holders = group_.holders[block];
  check(std::ranges::find(holders, rank) != holders.end(), "rank", rank, "must compute block", block,
        "whose data it lacks");
  check(!(fresh && running.call->segments.empty()), "rank", rank, "cannot begin again in a loop on the host");
  std::vector<double> report = {1};
  for (std::size_t s = 0; s < running.sums.size(); ++s) {
    if (fresh) std::ranges::fill(running.sums[s], 0);
    if (s >= running.of->summed()) continue;
    const Numbers more = running.of->sum(s, group_.starts[block], group_.starts[block + 1]);
    double squares = 0, sum = 0;
    for (const double number : more) squares += number * number, sum += number;
    report.insert(report.end(), {0, std::sqrt(squares), sum});
    if (audit == Audit::only_told) continue;
    for (std::size_t i = 0; i < more.size(); ++i) running.sums[s][i] += more[i];
  }
  if (audit != Audit::none) {
    const std::size_t place = group_.size() + (audit == Audit::only_told ? report.size() : 0);
    for (std::size_t i = 0; i < report.size(); ++i) running.sums.back()[place + i] += report[i];
  }
  come_for_block(rank);
  check_end(rank);
}

void World::leave_blocks(Rank rank) {
  Running& running = *running_[index(rank)];
  running.left = running.over = true;
  turn_to_the_end(rank, [](Node& node) { node.leave_call(); });
}

// Give a rank a turn. Returns whether it wants another turn at once; otherwise it sleeps.
bool World::advance(Rank rank) {
  bool more = false;
  if (turn(rank, [&](Node& node) { more = node.advance(); }) && !more && node(rank).wakes_at() <= clock) {
    // a second turn may show that the rank has nothing more to do at this time
    bool again = false;
    const bool enough = turn(rank, [&](Node& node) { again = node.advance(); });
    check(again || !enough || node(rank).wakes_at() > clock, "rank", rank, "never sleeps");
  }
  node(rank).take_news();
  check_end(rank);
  if (started.has(rank) && may_call(rank)) {
    submit(rank);
    return true;
  }
  return more;
}

// Fetch a snapshot if a rank needs one, and continue from it. Returns whether anything was done. If the root is
// dead, no round is decided, so no program goes back to repeat rounds. A rank that may have had too little memory
// for a snapshot asks again, as its error says.
bool World::recover(Rank rank) {
  Node& node = this->node(rank);
  if (!settings_.recovers || dead.has(group_.root())) return false;
  if (!node.desynchronized()) return false;
  if (node.state_missing() && ask_again_.erase(rank)) asking_.erase(rank);
  if (node.state_missing() && asking_.contains(rank)) return false;
  if (asking_.insert(rank).second) {
    node.ask_state();
    return true;
  }
  const Round round = node.state_round();
  if (!round) return false;
  const State got = node.take_state();
  check(std::ranges::equal(got.all(), state(round).all()), "rank", rank, "has a wrong snapshot of round", round);
  node.resume();
  check(node.next() == round && !node.desynchronized(), "rank", rank, "does not continue at its snapshot");
  // a round that failed only at some ranks is not decided
  const Round known = node.lag() ? round + node.lag() - 1 : 0, decided = this->node(group_.root()).decided();
  check(known <= decided, "rank", rank, "takes round", known, "for decided, and the root", decided);
  steps_[index(rank)] = steps_before(round);
  asking_.erase(rank);
  restored_[index(rank)] = true;
  ++seen.restored;
  return true;
}

void World::leave(Rank rank) {
  leaving.set(rank);
  // the rank may still be in its last call, of which it passes no more parts
  if (const auto& running = running_[index(rank)]) running->left |= running->known < running->own.size();
  node(rank).leave();
  check_end(rank);
}

void World::give_up(Rank rank) {
  node(rank).give_up();
  check_end(rank);
}

void World::alarm(Rank rank) {
  turn_to_the_end(rank, [](Node& node) { node.alarm("its calls are invalid"); });
}

void World::tell_of_ended_root(Rank rank) {
  turn_to_the_end(rank, [](Node& node) { node.root_has_ended(); });
}

void World::kill(Rank rank, bool known) {
  ++seen.deaths;
  dead.set(rank);
  left_behind_[index(rank)] = std::move(running_[index(rank)]);
  inboxes_[index(rank)].clear();
  for (auto& inbox : inboxes_) {
    const auto queue = inbox.find(rank);
    if (queue == inbox.end()) continue;
    queue->second.resize(random_.between(0, queue->second.size()));  // some of the dead rank's last messages are lost
    if (queue->second.empty()) inbox.erase(queue);
  }
  if (known) report_death(rank);
}

void World::report_death(Rank rank) {
  reported.set(rank);
  for (const Rank peer : random_.sample(living(), living().size())) report_death(rank, peer);
  for (const Request& request : std::exchange(requests_[index(rank)], {})) ask(request);
}

void World::report_death(Rank rank, Rank to) {
  if (!linked(rank, to)) return;
  turn_to_the_end(to, [&](Node& node) { node.lost(rank); });
}

void World::lose(Rank from, Rank to, Rank informed) {
  ++seen.losses;
  take_message(from, to);
  turn_to_the_end(informed, [&](Node& node) { node.lost_message(informed == from ? to : from); });
}

// Returns whether the request is lost. A rank that fetches a snapshot asks again only after its time-out, and a rank
// that lacks a piece of a message fails its round with others, so these requests stay.
bool World::lose_request(Rank source, std::size_t which) {
  auto& requests = requests_[index(source)];
  const Request request = requests[which];
  if (request.object.what != Object::What::result || dead.has(request.asker)) return false;
  ++seen.losses;
  requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(which));
  turn_to_the_end(source, [&](Node& node) { node.lost_message(request.asker); });
  return true;
}

// End the processes that may end.
void World::bury() {
  for (Rank rank = 0; rank < size(); ++rank) {
    if (!leaving.has(rank) || stopped(rank) || !node(rank).left()) continue;
    if (node(rank).outcome() == Outcome::pending) continue;
    dead.set(rank);
    inboxes_[index(rank)].clear();
  }
}

// --- The scheduler ---

void World::step() {
  ++seen.steps;
  bury();
  if (!echoes_.empty() && random_.chance(0.1)) {
    const std::size_t which = random_.below(echoes_.size());
    const auto [along, message] = echoes_[which];
    echoes_.erase(echoes_.begin() + static_cast<std::ptrdiff_t>(which));
    if (!stopped(along.second)) deliver_once(along.first, along.second, message);
    return;
  }
  const double kind = random_.real();
  if (kind < 0.45) {
    std::vector<std::pair<Rank, Rank>> waiting;
    for (Rank to = 0; to < size(); ++to) {
      for (const auto& [from, queue] : inboxes_[index(to)]) {
        if (!stopped(to)) waiting.emplace_back(from, to);
      }
    }
    if (waiting.empty()) return;
    const auto [from, to] = random_.pick(waiting);
    if (passes(from, to)) deliver(from, to);
  } else if (kind < 0.6) {
    move_a_piece();
  } else if (kind < 0.97) {
    const Rank rank = static_cast<Rank>(random_.below(group_.size()));
    if (kind < 0.85) {
      if (stopped(rank)) return;
      advance(rank);
      recover(rank);
    } else if (may_call(rank)) {
      submit(rank);
    } else if (may_extend(rank)) {
      extend(rank);
    }
  } else if (settings_.sleeps && random_.chance(settings_.rests)) {
    rest(1);
  } else {
    clock += random_.exponential(settings_.limits.orphan_seconds);
  }
}

void World::move_a_piece() {
  std::vector<std::pair<Rank, std::size_t>> asked, ready;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (stopped(rank)) continue;
    for (std::size_t i = 0; i < requests_[index(rank)].size(); ++i) asked.emplace_back(rank, i);
    for (std::size_t i = 0; i < answers_[index(rank)].size(); ++i) ready.emplace_back(rank, i);
  }
  const auto take = [](auto& from, std::size_t which) {
    auto out = std::move(from[which]);
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(which));
    return out;
  };
  if (!asked.empty() && (ready.empty() || random_.chance(0.5))) {
    const auto [rank, which] = random_.pick(asked);
    if (passes(requests_[index(rank)][which].asker, rank)) answer(take(requests_[index(rank)], which));
  } else if (!ready.empty()) {
    const auto [rank, which] = random_.pick(ready);
    if (passes(answers_[index(rank)][which].source, rank)) arrive(take(answers_[index(rank)], which));
  }
}

// Whether a message is the question of a waiting rank, or the answer that nothing has changed.
bool World::only_asks_or_answers(Rank from, Rank to, const Message& message) const {
  const Header& head = message.header;
  if (head.kind == Kind::want || head.kind == Kind::note) return true;
  const auto last = results_told_.find({from, to});
  return head.kind == Kind::result && last != results_told_.end() &&
         last->second == std::tuple(head.round, head.ready, head.flags);
}

int World::sweep() {
  constexpr int news = 2;
  int moved = 0;
  bury();
  std::vector<Rank> order;
  for (Rank rank = 0; rank < size(); ++rank) order.push_back(rank);
  for (const Rank rank : random_.sample(order, order.size())) {
    if (stopped(rank)) continue;
    if (may_call(rank)) {
      submit(rank);
      moved = news;
    }
    if (may_extend(rank)) {
      extend(rank);
      moved = news;
    }
    const double before = costs[index(rank)].seconds;
    while (!inboxes_[index(rank)].empty()) {
      const auto& [from, queue] = *inboxes_[index(rank)].begin();
      moved = std::max(moved, only_asks_or_answers(from, rank, queue.front()) ? 1 : news);
      deliver(from, rank);
    }
    for (const Request& request : std::exchange(requests_[index(rank)], {})) {
      answer(request);
      moved = news;
    }
    for (const Answer& answer : std::exchange(answers_[index(rank)], {})) {
      arrive(answer);
      moved = news;
    }
    bool more = advance(rank);
    costs[index(rank)].longest_turn = std::max(costs[index(rank)].longest_turn, costs[index(rank)].seconds - before);
    for (int turns = 0; more; more = advance(rank)) {
      check(++turns < most_turns, "rank", rank, "never comes to rest");
    }
    if (recover(rank)) moved = news;
  }
  return std::max(moved, on_their_way());
}

// Return what running ranks have not received yet, as a number with the same meaning as that of `sweep`.
int World::on_their_way() const {
  int out = 0;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (stopped(rank)) continue;
    if (!requests_[index(rank)].empty() || !answers_[index(rank)].empty()) return 2;
    for (const auto& [from, queue] : inboxes_[index(rank)]) {
      for (const Message& message : queue) {
        out = std::max(out, only_asks_or_answers(from, rank, message) ? 1 : 2);
      }
    }
  }
  return out;
}

void World::settle() {
  int quiet = 0;
  for (int times = 0; times < most_turns; ++times) {
    if (sweep() == 2) {
      quiet = 0;
      continue;
    }
    clock += settings_.limits.orphan_seconds * std::ldexp(1.0, ++quiet);
    if (quiet == 16) {
      if (settings_.sleeps) rest(rest_times);
      return;
    }
  }
  check(false, "the ranks never come to rest:", describe());
}

// Let `times` times `orphan_seconds` pass without messages and calls. Nodes must wake up only when `wakes_at`
// says so, and seldom.
void World::rest(double times) {
  std::vector<int> woken(group_.size());
  const double until = clock + times * settings_.limits.orphan_seconds;
  while (true) {
    Rank first = -1;
    double at = std::numeric_limits<double>::infinity();
    for (Rank rank = 0; rank < size(); ++rank) {
      if (!stopped(rank) && node(rank).wakes_at() < at) at = node(first = rank).wakes_at();
    }
    if (at > until) break;
    clock = std::max(clock, at);
    while (advance(first)) {
    }
    check(++woken[index(first)] <= most_woken, "rank", first, "wakes up all the time");
  }
  clock = until;
}

std::vector<Rank> World::living() const {
  std::vector<Rank> out;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (!dead.has(rank)) out.push_back(rank);
  }
  return out;
}

std::optional<Kind> World::next_message(Rank from, Rank to) const {
  const auto queue = inboxes_[index(to)].find(from);
  return queue == inboxes_[index(to)].end() ? std::nullopt : std::optional(queue->second.front().header.kind);
}

std::string World::describe() const {
  std::string out;
  for (Rank rank = 0; rank < size(); ++rank) {
    const Node& node = *nodes_[index(rank)];
    out += "\nrank " + std::to_string(rank) + " below " + std::to_string(group_.parents[index(rank)]) +
           " on host " + std::to_string(group_.hosts[index(rank)]);
    for (const auto& [ranks, name] : {std::pair(&dead, " dead"), {&reported, " reported"}, {&frozen, " frozen"},
                                      {&idle, " idle"}, {&leaving, " leaving"}}) {
      if (ranks->has(rank)) out += name;
    }
    out += ": next " + std::to_string(node.next()) + ", frontier " + std::to_string(node.frontier());
    if (const auto& running = running_[index(rank)]) out += ", calls round " + std::to_string(running->round);
    if (node.desynchronized()) out += ", desynchronized";
    out += "\n  " + node.status() + " " + node.waiting_for();
    for (const auto& [round, end] : ends[index(rank)]) {
      if (end.first != Outcome::done) out += "\n  round " + std::to_string(round) + ": " + end.second;
    }
  }
  return out;
}

void Seen::add(const Seen& other) {
  for (std::size_t i = 0; i < messages.size(); ++i) messages[i] += other.messages[i];
  for (std::size_t i = 0; i < outcomes.size(); ++i) outcomes[i] += other.outcomes[i];
  pieces_sent += other.pieces_sent;
  pieces_gone += other.pieces_gone;
  skipped += other.skipped;
  restored += other.restored;
  deaths += other.deaths;
  losses += other.losses;
  failed_allocations += other.failed_allocations;
  broken_off += other.broken_off;
  audits += other.audits;
  replanned += other.replanned;
  lies += other.lies;
  steps += other.steps;
}

std::map<std::string, std::uint64_t> Seen::by_name() const {
  std::map<std::string, std::uint64_t> out = {
      {"pieces that are sent", pieces_sent}, {"pieces that are gone", pieces_gone},
      {"skipped calls", skipped},            {"returns by a snapshot", restored},
      {"ranks that die", deaths},            {"messages that are lost", losses},
      {"allocations that fail", failed_allocations}, {"steps", steps},
      {"calls broken off", broken_off},      {"audits of two reports", audits}, {"ranks that replan", replanned},
      {"lies that are found", lies},
      {"calls done", outcomes[1]},
      {"calls failed", outcomes[2]},         {"calls of ranks out of the history", outcomes[3]}};
  for (std::size_t kind = 0; kind < messages.size(); ++kind) {
    if (messages[kind]) out["message: " + std::to_string(kind)] = messages[kind];
  }
  return out;
}

}  // namespace jaxcoded
