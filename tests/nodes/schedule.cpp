#include "schedule.h"

#include <algorithm>
#include <exception>
#include <iostream>

namespace jaxcoded {
namespace {

constexpr double deadline = 5;  // in seconds
constexpr std::size_t rounds = 10;

enum class Happening : std::uint8_t {
  stop, stay_away, slow_down, come_back, queue_calls, settle, report, go_on,  // harmless
  lack_memory, die, leave, lose, break_link, wait, raise_between_blocks, call_something_else, break_off, alarm, watch,
};
constexpr std::size_t harmless = static_cast<std::size_t>(Happening::go_on);
constexpr const char* names[] = {
    "ranks stop", "programs stay away", "ports are slow", "all come back", "calls are queued", "the ranks settle",
    "deaths are reported", "the ranks go on", "ranks lack memory", "a rank dies", "a rank leaves",
    "a message is lost", "a link breaks", "time passes", "an exception between blocks", "a rank calls something else",
    "calls are broken off", "a rank raises an alarm", "ranks watch the ranks above"};

// Return the calls of a group without shared work.
std::vector<Planned> sums(const Group& group, Random& random, const Settings& settings) {
  constexpr std::uint64_t most = 20;
  std::vector<Planned> out;
  const std::size_t last = settings.replans ? random.between(1, rounds - 2) : rounds;  // round with the first plan
  for (std::size_t round = 1; round <= rounds; ++round) {
    const Group& plan = round > last ? group.replanned.front() : group;
    Planned call;
    call.seed = random.bits() >> 40;
    const std::vector<DType> types{DType::float16, DType::bfloat16, DType::float32, DType::float64};
    const auto multiple = plan.multiple;
    for (const DType dtype : random.sample(types, random.pick({0u, 1u, 1u, 1u, 2u, 3u}))) {
      const auto times = random.pick({std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2},
                                      std::uint64_t{random.below(most / multiple + 1)}});
      call.segments.push_back({dtype, multiple * times});
    }
    if (settings.compares) {
      // Keep vectors so long, and numbers so wide, that compared elements of honest messages never consist of
      // rounding alone (docs/theory.md, "What rounding explains").
      std::map<DType, std::uint64_t> longest;
      for (const auto& [dtype, count] : call.segments) {
        const bool narrow = size_of(dtype) < 4 && plan.amplification > 5;
        std::uint64_t& length = longest[narrow ? DType::float32 : dtype];
        length = std::max(length, count ? std::max(count, 8 * multiple) : 0);
      }
      call.segments.clear();
      for (const auto& [dtype, count] : longest) call.segments.push_back({dtype, count});
    }
    switch (random.below(8)) {
      case 0: call.kind = Planned::Kind::reduce; break;
      case 1: call.kind = Planned::Kind::broadcast; break;
      case 2: call.why_not = "refused: no. " + std::to_string(round); break;
      case 3:
        if (!plan.erasures.empty()) call.erased = &random.pick(plan.erasures);
        break;
      default: break;
    }
    call.replans = round == last && last < rounds;
    if (call.replans) {
      call.kind = Planned::Kind::broadcast;
      call.why_not = {};
      call.erased = nullptr;
    }
    const bool is_sum = call.kind != Planned::Kind::broadcast && call.why_not.empty() && !call.erased;
    if (settings.lies && is_sum && random.chance(0.3)) {
      std::vector<Rank> watched;
      for (std::size_t rank = 0; rank < plan.size(); ++rank) {
        if (plan.watched[rank]) watched.push_back(static_cast<Rank>(rank));
      }
      const bool empty = std::ranges::all_of(call.segments, [](const Segment& segment) { return !segment.count; });
      if (!watched.empty() && !empty) call.liar = random.pick(watched);
    }
    out.push_back(std::move(call));
  }
  if (settings.joined) {
    Planned& call = out[random.below(3)];
    call.kind = Planned::Kind::broadcast;
    call.why_not = {};
    call.erased = nullptr;
    call.liar = -1;
  }
  return out;
}

// Return calls with shared work. Either each call computes and sums blocks, or every second call sums them.
std::vector<Planned> shared_work(const Group& group, Random& random) {
  std::vector<Planned> out;
  const bool handed_over = random.chance(0.5), audited = !handed_over && random.chance(0.5);
  std::vector<double> costs(random.chance(0.5) ? group.holders.size() : 0);
  for (double& cost : costs) cost = random.pick({0.01, 0.5, 1.0, 1.0, 20.0});
  for (std::size_t round = 1; round <= rounds; ++round) {
    Planned call;
    call.seed = round;
    call.segments = {{DType::float64, 5}};
    call.shared = handed_over ? round % 2 : random.chance(0.8);
    if (handed_over && call.shared) call.segments.clear();
    if (call.shared) call.costs = costs;
    call.audited = audited && call.shared;
    if (call.audited) call.segments.push_back({DType::float32, group.size() + 2 * (1 + 3 * call.segments.size())});
    call.sums_blocks = handed_over && !call.shared;
    out.push_back(std::move(call));
  }
  return out;
}

Settings settings(const Group& group, const Schedule& schedule, Random& random) {
  const bool calm = schedule.theme == Theme::calm, shares = !group.holders.empty();
  Settings out;
  out.replans = !group.replanned.empty() && random.chance(0.5);
  out.joined = !shares && random.chance(0.2);
  const Group& last = out.replans ? group.replanned.front() : group;
  Limits& limits = out.limits;
  limits.history_bytes = 0;
  // if ranks compute blocks on the host, the next round sums the blocks
  limits.history_rounds = out.replans || out.joined ? 100 : random.pick({shares ? 2u : 1u, 3u, 100u});
  limits.piece_bytes = random.pick({8u, 8u, 16u, 24u, 64u, 1u << 18});
  limits.announced_bytes = random.pick({8u, 32u, 64u, 1u << 20});
  limits.sections_from = random.pick({0u, 1u, 1u, 64u});
  limits.section_pieces = shares ? 0 : random.pick({0u, 0u, 3u, 10u});
  limits.least_piece_bytes = 8;
  limits.stuck_seconds = random.pick({std::numeric_limits<double>::infinity(), 0.05});
  if (limits.sections_from) {
    limits.slices = static_cast<std::uint32_t>(std::max<std::size_t>(
        group.combinations[static_cast<std::size_t>(group.root())].slices, 1));
    limits.parts = static_cast<std::uint32_t>(group.combinations[static_cast<std::size_t>(group.root())].parts);
  }
  if (!calm) {
    limits.on_deadline = random.pick({OnDeadline::wait, OnDeadline::raise, OnDeadline::approximate});
    if (random.chance(0.5)) {
      limits.deadline_seconds = deadline;
    } else {
      limits.deadline_rounds = random.pick({1.5, 3.0});
    }
  }
  out.partial = limits.on_deadline == OnDeadline::approximate;
  out.compares = !shares && !out.partial && !group.comparing.empty() && !last.comparing.empty() && random.chance(0.4);
  if (out.compares) {
    limits.compares = random.pick({Compares::what_has_come, Compares::until_deadline, Compares::all});
    limits.on_contradiction =
        random.pick({OnContradiction::raise, OnContradiction::warn, OnContradiction::drop});
    out.lies = calm && !out.joined && limits.compares == Compares::all && limits.on_contradiction == OnContradiction::raise;
  }
  limits.waits_for_all = shares && random.chance(0.3);
  limits.telemetry_rounds = random.pick({0u, 3u, 1024u});
  out.inline_bytes = random.pick<std::vector<std::size_t>>({{0}, {0}, {64}, {1 << 20}, {0, 32, 1 << 20}});
  out.in_place = random.pick({0.0, 0.0, 0.5, 1.0});
  out.twice = random.pick({0.0, 0.1});
  out.again = random.pick({0.0, 0.1});
  out.unreadable = random.pick({0.0, 0.0, 0.1, 0.3});
  out.staged = random.pick({0.0, 0.5, 1.0});
  out.rests = calm ? random.pick({0.0, 0.2}) : 0;
  out.sleeps = calm;
  // no rank continues from a snapshot of another plan, or has one before it has the root's state
  out.recovers = !out.replans && !out.joined && (calm || shares || random.chance(0.5));
  // with more steps, float16 would overflow
  out.chained = calm && !shares && group.amplification < 1e3 && last.amplification < 1e3;
  if (!calm) {
    out.failures = random.pick({0u, 1u, 2u});
    out.failing = random.pick({0.002, 0.01, 0.05});
  }
  out.damaged = schedule.damaged;
  out.vanishing = schedule.vanishing;
  return out;
}

class Player {
 public:
  Player(const Group& group, const Schedule& schedule, Random& random, World& world, Report& report)
      : group_(group), schedule_(schedule), random_(random), world_(world), report_(report) {}

  void play() {
    draw_kinds();
    draw_skips();
    const std::size_t wanted = std::min<std::size_t>(random_.pick({10u, 40u, 100u}), schedule_.most_happenings);
    for (std::size_t i = 0; i < wanted; ++i) {
      happen(random_.pick(kinds_));
      ++report_.happenings;
      for (const Rank rank : world_.living()) check(!world_.node(rank).status().empty());
    }
    end();
    check_all_came_to_the_end();
    for (const Rank rank : world_.living()) {
      if (!world_.leaving.has(rank)) world_.leave(rank);
    }
    end();
    for (const Rank rank : world_.living()) {  // the engine does the same after some seconds
      world_.give_up(rank);
      end();
    }
    check(world_.living().empty(), "processes do not end:", world_.describe());
  }

 private:
  std::vector<Rank> some() { return random_.some(world_.living()); }
  bool acts(Rank rank) const { return !world_.frozen.has(rank) && !world_.leaving.has(rank); }

  void draw_kinds() {
    const bool calm = schedule_.theme == Theme::calm;
    const std::size_t end = calm ? harmless : std::size(names);
    std::vector<Happening> all;
    for (std::size_t i = 0; i < end; ++i) {
      if (i != harmless) all.push_back(static_cast<Happening>(i));
    }
    // with fewer kinds of events in a schedule, events of the chosen kinds coincide more often
    kinds_ = random_.sample(all, random_.between(1, 5));
    kinds_.insert(kinds_.end(), 2, Happening::go_on);
    losses_ = random_.pick({1, 3, 10});
  }

  void draw_skips() {
    if (!group_.holders.empty()) return;
    for (Round round = 1; round <= world_.rounds(); ++round) {
      const Planned& call = world_.planned(round);
      if (call.kind != Planned::Kind::allreduce || call.erased || call.liar >= 0 || !random_.chance(0.1)) continue;
      for (const Family& family : call.group->families) {
        const std::size_t most = call.group->tolerances[static_cast<std::size_t>(family.rank)];
        for (const Rank child : random_.sample(family.children, random_.between(0, most))) {
          world_.skips.insert({child, round});
        }
      }
    }
  }

  void happen(Happening kind) {
    report_.happened += std::string(names[static_cast<std::size_t>(kind)]) + "; ";
    if (world_.traced) std::cerr << world_.clock << ": " << names[static_cast<std::size_t>(kind)] << '\n';
    switch (kind) {
      case Happening::stop: return world_.frozen.assign(some());
      case Happening::stay_away: return world_.idle.assign(some());
      case Happening::slow_down: return world_.slow.assign(some());
      case Happening::come_back: return come_back();
      case Happening::queue_calls: return world_.started.assign(some());
      case Happening::settle:
        for (int i = 0; i < 10; ++i) world_.sweep();
        return;
      case Happening::report: return report_some();
      case Happening::go_on:
        for (std::size_t i = random_.pick({1u, 10u, 100u}); i > 0; --i) world_.step();
        return;
      case Happening::lack_memory: return world_.short_of_memory.assign(some());
      case Happening::die: return die();
      case Happening::leave: return leave();
      case Happening::lose: return lose();
      case Happening::break_link: return break_link();
      case Happening::wait:
        world_.clock += random_.pick({0.1, 1.0, deadline, 10 * deadline});
        return;
      case Happening::raise_between_blocks: return raise_between_blocks();
      case Happening::call_something_else: return call_something_else();
      case Happening::break_off: return break_off();
      case Happening::alarm: return alarm();
      case Happening::watch: return watch();
    }
  }

  void come_back() {
    world_.frozen.clear();
    world_.idle.clear();
    world_.slow.clear();
    world_.short_of_memory.clear();
    world_.broken.clear();
  }

  void die() {
    const auto living = world_.living();
    if (living.size() < 2) return;
    const Rank rank = random_.pick(living);
    const bool known = random_.chance(0.5);
    world_.kill(rank, known);
    if (!known) unreported_.push_back(rank);
    world_.frozen.set(rank, false);
    world_.idle.set(rank, false);
  }

  // Let MPI report deaths to some ranks.
  void report_some() {
    for (const Rank rank : unreported_) {
      for (const Rank peer : world_.living()) {
        if (random_.chance(0.5)) world_.report_death(rank, peer);
      }
    }
  }

  void leave() {
    const auto living = world_.living();
    if (living.empty()) return;
    const Rank rank = random_.pick(living);
    const bool may = !world_.leaving.has(rank) && !world_.frozen.has(rank);
    if (may && !world_.computes_blocks(rank)) world_.leave(rank);
  }

  void lose() {
    std::vector<std::pair<Rank, Rank>> links;
    for (const Rank from : world_.living()) {
      for (const Rank to : world_.living()) {
        if (world_.linked(from, to) && world_.next_message(from, to)) links.emplace_back(from, to);
      }
    }
    if (!losses_) return;
    std::vector<std::pair<Rank, std::size_t>> requests;
    for (const Rank source : world_.living()) {
      for (std::size_t i = 0; i < world_.requests(source); ++i) requests.emplace_back(source, i);
    }
    if (!requests.empty() && (links.empty() || random_.chance(0.5))) {
      const auto [source, which] = random_.pick(requests);
      losses_ -= world_.lose_request(source, which);
      return;
    }
    if (links.empty()) return;
    --losses_;
    const auto [from, to] = random_.pick(links);
    // report the loss of a last message to its sender: if only the parent knew of the loss, the sender might
    // have ended
    const bool last = world_.next_message(from, to) == Kind::bye;
    world_.lose(from, to, last || random_.chance(0.5) ? from : to);
  }

  void break_link() {
    std::vector<std::pair<Rank, Rank>> links;
    for (const Rank from : world_.living()) {
      for (const Rank to : world_.living()) {
        if (world_.linked(from, to)) links.emplace_back(from, to);
      }
    }
    if (links.empty()) return;
    const auto [from, to] = random_.pick(links);
    world_.broken[{from, to}] = random_.chance(0.5) ? from : to;
  }

  void raise_between_blocks() {
    const auto living = world_.living();
    if (living.empty()) return;
    const Rank rank = random_.pick(living);
    if (rank != group_.root() && world_.computes_blocks(rank)) world_.leave_blocks(rank);
  }

  // Make a rank's next call differ from the script.
  void call_something_else() {
    const Rank rank = static_cast<Rank>(random_.below(group_.size()));
    call_something_else(rank, world_.node(rank).next() + world_.calls(rank));
  }

  void call_something_else(Rank rank, Round round) {
    if (round > world_.rounds()) return;
    const Planned& call = world_.planned(round);
    const bool plain =
        call.kind == Planned::Kind::allreduce && call.why_not.empty() && !call.erased && call.liar < 0;
    if (!plain || call.shared || call.sums_blocks) return;
    Planned other;
    other.segments = {{DType::float32, 5 * call.group->multiple}};
    other.group = call.group;
    other.replanned = call.replanned;
    other.seed = 1'000'000 + round;
    world_.deviations.try_emplace({rank, round}, std::move(other));
  }

  // Let programs make another call before they have passed all vectors of the first.
  void break_off() {
    for (const Rank rank : some()) {
      if (!acts(rank) || !world_.is_incomplete(rank)) continue;
      if (random_.chance(0.5)) call_something_else(rank, world_.node(rank).next());
      world_.break_off(rank);
    }
  }

  void alarm() {
    const auto living = world_.living();
    const Rank rank = living.empty() ? -1 : random_.pick(living);
    if (rank >= 0 && acts(rank)) world_.alarm(rank);
  }

  // Let programs wait for other ranks, as in `recovered`. Some learn of the end of the root's process.
  void watch() {
    const auto watching = some();
    for (const Rank rank : world_.living()) {
      world_.node(rank).watch(std::ranges::find(watching, rank) != watching.end());
    }
    if (!world_.dead.has(group_.root())) return;
    for (const Rank rank : some()) {
      if (!world_.frozen.has(rank)) world_.tell_of_ended_root(rank);
    }
  }

  // Let all ranks end that can end.
  void end() {
    come_back();
    for (const Rank rank : unreported_) world_.report_death(rank);
    unreported_.clear();
    for (int i = 0; i < 4; ++i) {
      world_.settle();
      world_.clock += 100;
      if (world_.settings().recovers) continue;
      for (const Rank rank : world_.living()) {  // the rank's program ends with an error
        if (!world_.leaving.has(rank) && world_.node(rank).desynchronized()) world_.leave(rank);
      }
    }
  }

  void check_all_came_to_the_end() {
    const bool calm = schedule_.theme == Theme::calm;
    for (const Rank rank : world_.living()) {
      Node& node = world_.node(rank);
      const bool lost = node.desynchronized();
      const bool through = node.next() > world_.rounds() || lost || world_.leaving.has(rank);
      if (!through || (world_.calls(rank) && !lost)) {
        check(false, "rank", rank, "does not get to the end:", world_.describe());
      }
      for (const auto& [round, end] : world_.ends[static_cast<std::size_t>(rank)]) {
        const bool fine = end.first == Outcome::done || end.first == Outcome::desynchronized ||
                          end.second.starts_with("refused: no. ") || world_.planned(round).liar >= 0 ||
                          lacks_state(round);
        check(!calm || fine, "rank", rank, "failed round", round, "for no reason:", end.second);
      }
    }
    for (Round round = 1; calm && round <= world_.rounds(); ++round) {
      const Planned& call = world_.planned(round);
      const bool blocks = call.shared && call.segments.empty();
      const bool right = call.why_not.empty() && call.liar < 0 && !lacks_state(round);
      check(blocks || world_.has_sum(round) == right, "round", round, "has a sum, or not");
    }
  }

  // Whether ranks have joined that do not have the root's state yet in this round.
  bool lacks_state(Round round) const {
    if (!world_.settings().joined) return false;
    for (Round before = 1; before <= round; ++before) {
      const Planned& call = world_.planned(before);
      if (call.kind == Planned::Kind::broadcast && call.why_not.empty()) return false;
    }
    return true;
  }

  const Group& group_;
  const Schedule& schedule_;
  Random& random_;
  World& world_;
  Report& report_;
  std::vector<Happening> kinds_;
  std::vector<Rank> unreported_;
  int losses_ = 0;
};

}  // namespace

Report play(const Group& group, const Schedule& schedule, bool traced) {
  Report report;
  Random random(schedule.seed);
  const Settings drawn = settings(group, schedule, random);
  auto script = group.holders.empty() ? sums(group, random, drawn) : shared_work(group, random);
  World world(group, std::move(script), drawn, random);
  world.traced = traced;
  try {
    Player(group, schedule, random, world, report).play();
  } catch (const Finding& finding) {
    report.finding = finding.text;
  } catch (const std::exception& error) {
    report.finding = std::string("an exception: ") + error.what();
  } catch (const Damaged&) {
    report.finding = "an honest message counts as damaged";
  }
  report.seen = world.seen;
  return report;
}

std::vector<Cost> count_costs(const Group& group, std::size_t calls, std::uint64_t count, bool sections) {
  std::vector<Planned> script;
  for (std::size_t round = 1; round <= calls; ++round) {
    Planned call;
    call.segments = {{DType::float32, count}};
    call.seed = round;
    call.shared = !group.holders.empty();
    script.push_back(std::move(call));
  }
  Settings settings;
  settings.limits.sections_from = sections;
  settings.limits.piece_bytes = 1024;
  settings.inline_bytes = {1024};
  settings.checks = false;  // checks would take most of the time
  Random random(0);
  World world(group, std::move(script), settings, random);
  while (world.sweep() == 2) {
  }
  for (const auto& ends : world.ends) {
    for (Round round = 1; round <= calls; ++round) {
      if (!ends.contains(round) || ends.at(round).first != Outcome::done) {
        check(false, "round", round, "has no sum:", world.describe());
      }
    }
  }
  return world.costs;
}

}  // namespace jaxcoded
