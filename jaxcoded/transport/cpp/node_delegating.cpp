// A parent whose children form a long sum in sections. The parent chooses the messages, as for any sum. It
// tells each child which section to form from which messages.
//
// The root's sum is the result, which all ranks fetch. The sum of any other parent is its message, which only
// this parent fetches. Once a parent has its whole sum, the round continues like any other.
#include "node.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

constexpr std::size_t most_choices = 16;  // how many sets of messages the sections of one sum may use
constexpr std::size_t most_attempts = 3;  // how often ranks other than the parent try to form a section
constexpr double unformed = 4;  // times the usual patience: how long to wait for the first piece

}  // namespace

bool Node::may_delegate() const {
  return family_.delegates && up_.call.up && up_.call.down && !up_.whole && may_delegate_message() &&
         up_.call.audits.empty() && !decoder_.checked() && !up_.approximating && !pause_.lasts(next_) &&
         up_.decoded.pieces == 0 &&
         up_.incoming.size() > 1 && up_.outgoing.bytes() >= limits_.sections_from &&
         up_.outgoing.size() == up_.incoming.size() * limits_.slices;
}

// Whether this parent may delegate its message. Below the root, the message must be as long as the result, and
// the result not known yet: a known result may overwrite this rank's own vector.
bool Node::may_delegate_message() const {
  if (root()) return true;
  const bool known = announced_.contains(next_) || history_.find(next_);
  return !known && !up_.call.shared && !sums_blocks() && up_.call.message == up_.call.total &&
         limits_.slices == 1 && limits_.parts == 1 && decoder_.slices() == 1 && decoder_.parts() == 1;
}

// Form the sum in sections, if possible. Returns whether there is more to do at once, or nothing if this rank
// must form the sum itself.
std::optional<bool> Node::delegate() {
  if (up_.delegated) return oversee();
  const double sufficient_at = std::exchange(up_.sufficient_at, 0);
  if (!may_delegate()) return {};
  const std::uint32_t last = up_.incoming.size() - 1;
  const auto decoding = own_ready(last) ? choose(last) : nullptr;
  if (!may_delegate()) return {};  // the sum will use only the messages that have arrived
  if (!decoding) {
    up_.whole = gives_up() || too_few_left(last);
    if (up_.whole) return {};
    if (up_.overdue && !root()) miss_the_deadline();
    return false;
  }
  // A child that comes a little later can still help.
  const double now = wire_.now();
  up_.sufficient_at = sufficient_at ? sufficient_at : now;
  if (now < latecomers_until()) return false;
  up_.sufficient_at = 0;
  if (!begin_sections(decoding)) {
    up_.whole = true;
    return {};
  }
  return true;
}

// Return the time until which to wait for latecomers: no longer than the time saved if they also send and form a
// part. Between hosts the wait is at least `stall_seconds`, as no child arrives sooner. Only the root waits: a
// parent that fetches its sum alone saves no time. After the deadline no rank waits for what it can do without.
double Node::latecomers_until() const {
  if (!root() || up_.overdue) return up_.sufficient_at;
  // children that were reported as stuck are not expected
  const auto comes = [&](const Child& child) { return !child.retired && !child.dead && !child.behind.reported; };
  const auto present = [&](const Child& child) { return takes_part(child); };
  const auto most = static_cast<std::size_t>(std::ranges::count_if(children_, comes));
  const auto now = static_cast<std::size_t>(std::ranges::count_if(children_, present));
  if (now >= most) return up_.sufficient_at;
  const double messages = static_cast<double>(decoder_.enough()) / limits_.slices;
  const double before = evenly_shared(messages, now + 1);
  const double after = evenly_shared(messages, most + 1);
  // a short sum says little about a longer one, since a child may have stopped in it
  const double share = section_bytes_ > 0 ? static_cast<double>(up_.outgoing.bytes()) / section_bytes_ : 0;
  const double lasts = section_seconds_ * std::min(share, 1.0);
  const double saved = lasts * (before / after - 1);
  const bool near = std::ranges::all_of(children_, [&](const Child& child) { return wire_.direct(child.rank); });
  return up_.sufficient_at + (near ? saved : std::max(limits_.stall_seconds, saved));
}

// Whether a child waits in this round and may form a section.
bool Node::takes_part(const Child& child) const {
  return child.offer.round == next_ && !child.offer.withdrawn && !child.dead && !stalled(child) &&
         child.offer.fingerprint == up_.call.fingerprint;
}

bool Node::begin_sections(const std::shared_ptr<const Decoding>& decoding) {
  Delegated delegated;
  for (const Child& child : children_) {
    if (takes_part(child)) delegated.members.push_back(child.rank);
  }
  if (delegated.members.empty()) return false;
  const auto choices = chosen_by_all() ? std::vector{decoding} : decodings_in_turn(decoding);
  for (const auto& choice : choices) {
    if (!fetchable(*choice)) return false;
  }
  delegated.since = wire_.now();
  if (adds_own()) delegated.of_parent = own_is_zero() ? OfParent::zero : OfParent::term;
  std::vector<Section> sections;
  std::uint32_t first = 0;
  for (const SectionShare& share : shares_of(delegated, choices).shares) {
    const bool own = share.maker == delegated.members.size();
    const std::uint32_t pieces = share.pieces * limits_.slices;
    sections.push_back({.first = first,
                        .last = first + pieces,
                        .maker = own ? family_.rank : delegated.members[share.maker],
                        .version = section_versions_.next()});
    delegated.decodings.push_back(choices[share.choice]);
    first += pieces;
  }
  delegated.flows.assign(sections.size(), {.moved = delegated.since});
  delegated.attempts.assign(sections.size(), 0);
  up_.delegated = std::move(delegated);
  assign(std::move(sections));
  return true;
}

// Whether this rank's vectors are zeros, like the vectors of a root without data. Makers still add the zeros,
// so that the bits do not depend on where the sum is formed.
bool Node::own_is_zero() const {
  for (std::size_t s = 0; s < up_.call.own.size(); ++s) {
    const std::byte* begin = up_.call.own[s];
    const std::uint64_t bytes = up_.call.total[s].bytes();
    if (bytes && (begin[0] != std::byte{0} || std::memcmp(begin, begin + 1, bytes - 1) != 0)) return false;
  }
  return true;
}

// Whether other ranks can fetch these messages. Short messages come within offers, without addresses.
bool Node::fetchable(const Decoding& choice) {
  return std::ranges::all_of(choice.rows, [&](std::size_t row) {
    return child_of_row(row).offer.addresses.size() == up_.of_child().segments().size();
  });
}

// Return how much each member forms, and from which messages; this rank counts as the last member.
SectionShares Node::shares_of(const Delegated& delegated,
                              const std::vector<std::shared_ptr<const Decoding>>& choices) const {
  const std::size_t own = children_.size();
  const auto port = [&](Rank rank) {
    const auto same = [&](const Child& child) { return child.rank == rank; };
    return static_cast<std::size_t>(std::ranges::find_if(children_, same) - children_.begin());
  };
  std::vector<std::size_t> makers;
  for (const Rank rank : delegated.members) makers.push_back(port(rank));
  makers.push_back(own);
  const double length = 1.0 / limits_.slices;
  std::vector<std::vector<PortMessage>> messages;
  for (const auto& choice : choices) {
    auto& ports = messages.emplace_back();
    for (const std::size_t row : choice->rows) {
      const std::size_t child = row / decoder_.parts();
      const auto known = std::ranges::find(ports, child, &PortMessage::port);
      known == ports.end() ? ports.push_back({child, length}) : void(known->length += length);
    }
    if (delegated.of_parent == OfParent::term) ports.push_back({own, 1});
  }
  const auto taker = root() ? std::nullopt : std::optional(own);
  return section_shares(makers, messages, own + 1, up_.incoming.size(), taker);
}

// Return choices of messages, beginning with `first`, that use all messages about equally often.
std::vector<std::shared_ptr<const Decoding>> Node::decodings_in_turn(
    std::shared_ptr<const Decoding> first) {
  std::vector<std::size_t> order(decoder_.rows()), used(decoder_.rows());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::shared_ptr<const Decoding>> out;
  for (auto next = std::move(first); next && out.size() < most_choices; next = decoding_from(order, true)) {
    if (std::ranges::any_of(out, [&](const auto& choice) { return choice->rows == next->rows; })) break;
    for (const std::size_t row : next->rows) ++used[row];
    out.push_back(std::move(next));
    std::ranges::stable_sort(order, {}, [&](std::size_t row) { return used[row]; });
  }
  return out;
}

// Whether this rank has stopped waiting for late children.
bool Node::gives_up() const {
  return up_.overdue && limits_.on_deadline != OnDeadline::wait;
}

// Whether the whole sum must use one choice of messages, which `choose` makes.
bool Node::chosen_by_all() const { return pinned() || up_.call.shared || sums_blocks(); }

// Return messages that suffice for the whole sum: the first ones in this order.
std::shared_ptr<const Decoding> Node::decoding_from(const std::vector<std::size_t>& order, bool in_time) {
  const std::uint32_t last = up_.incoming.size() - 1;
  std::vector<std::size_t> available;
  for (const std::size_t row : order) {
    const Child& child = child_of_row(row);
    if (usable(row, last) && !child.dead && !(in_time && stalled(child))) available.push_back(row);
  }
  return decoder_.decode(available, may_offer(last));
}

// Return messages that suffice for the whole sum: the first ones among the rows from `first` on, followed by the
// rows before `first`.
std::shared_ptr<const Decoding> Node::decoding_from(std::size_t first, bool in_time) {
  std::vector<std::size_t> order(decoder_.rows());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = (first + i) % order.size();
  return decoding_from(order, in_time);
}

// Tell the members which rank forms which section, if this has changed.
void Node::assign(std::vector<Section> sections) {
  Delegated& delegated = *up_.delegated;
  const auto is_new = [&](std::size_t i) {
    return i >= sections_.all.size() || sections_.all[i].section != sections[i];
  };
  std::vector<std::size_t> jobs;
  for (std::size_t i = 0; i < sections.size(); ++i) {
    if (!is_new(i)) continue;
    jobs.push_back(i);
    delegated.flows[i].begin(wire_.now());
    for (const std::size_t row : delegated.decodings[i]->rows) {
      telemetry_.used(next_, child_of_row(row).column);
    }
  }
  SectionPlan plan{.purpose = purpose(), .sections = std::move(sections)};
  if (root()) plan.members = delegated.members;
  std::vector<Rank> idle = delegated.members;
  idle.insert(idle.end(), delegated.joined.begin(), delegated.joined.end());
  for (const std::size_t job : jobs) {
    const Rank maker = plan.sections[job].maker;
    if (maker == family_.rank) continue;
    add_terms(plan, job);
    tell_sections(maker, next_, up_.call.fingerprint, plan, job);
    std::erase(idle, maker);
  }
  plan.terms.clear();
  for (const Rank rank : idle) tell_sections(rank, next_, up_.call.fingerprint, plan, 0);
  learn_sections(plan);
  for (const std::size_t job : jobs) {
    if (plan.sections[job].maker != family_.rank) continue;
    add_terms(plan, job);
    begin_forming(plan, job);
  }
}

void Node::add_terms(SectionPlan& plan, std::size_t job) {
  const Decoding& decoding = *up_.delegated->decodings[job];
  plan.terms.clear();
  plan.of_parent = up_.delegated->of_parent;
  if (plan.of_parent == OfParent::term) {
    Term& own = plan.terms.emplace_back();
    own.rank = family_.rank;
    own.coefficients.assign(limits_.slices, 1.0);
    if (up_.call.shared) own.version = up_.share.version().number();
    for (const std::byte* vector : up_.call.own) {
      own.addresses.push_back(reinterpret_cast<std::uintptr_t>(vector));
    }
  }
  for (std::size_t i = 0; i < decoding.rows.size(); ++i) {
    const Child& child = child_of_row(decoding.rows[i]);
    const std::size_t part = decoding.rows[i] % decoder_.parts(), vectors = up_.call.total.size();
    Term& term = plan.terms.emplace_back();
    term.rank = child.rank;
    term.part = static_cast<std::uint32_t>(part);
    for (const auto& of_slice : decoding.coefficients) term.coefficients.push_back(of_slice[i]);
    term.version = version_of(child.offer);
    const auto addresses = std::span(child.offer.addresses).subspan(part * vectors, vectors);
    term.addresses.assign(addresses.begin(), addresses.end());
  }
}

void Node::tell_sections(Rank to, Round round, std::uint64_t fingerprint, const SectionPlan& plan,
                         std::size_t job) {
  Message message{header(Kind::delegate, round)};
  message.header.fingerprint = fingerprint;
  message.header.ready = static_cast<std::uint32_t>(job);
  plan.append_to(message);
  wire_.send(to, message);
}

// Called if a child comes while other ranks form the sum. Tells the child which pieces are formed, so that it
// can fetch them.
void Node::join_sections(const Child& child) {
  if (!root() || !up_.delegated || !takes_part(child)) return;
  Delegated& delegated = *up_.delegated;
  if (std::ranges::find(delegated.members, child.rank) != delegated.members.end()) return;
  if (std::ranges::find(delegated.joined, child.rank) != delegated.joined.end()) return;
  delegated.joined.push_back(child.rank);
  SectionPlan plan{.members = delegated.members};
  for (const Sections::Known& known : sections_.all) plan.sections.push_back(known.section);
  tell_sections(child.rank, next_, up_.call.fingerprint, plan, 0);
  for (std::size_t i = 0; i < sections_.all.size(); ++i) {
    if (sections_.all[i].formed > sections_.all[i].section.first) tell_formed(child.rank, i);
  }
}

// Continue with the sections. Returns whether there is more to do at once.
bool Node::oversee() {
  if (up_.call.shared) {
    const std::vector<Version> before = up_.versions;
    if (!choose_sealed(up_.incoming.size() - 1) || up_.versions != before) {
      abandon_sections();
      return true;
    }
  }
  // there are no sections if there was too little memory to assign them
  if (sections_.all.empty() || !mend_sections()) {
    abandon_sections();
    return true;
  }
  const bool more = take_sections(destination());
  if (!all_taken()) return more;
  if (!up_.all_decoded()) {
    const auto bytes = static_cast<double>(up_.outgoing.bytes());
    if (bytes >= section_bytes_ / 2) {
      // this process may have been stopped meanwhile
      double lasted = std::min(wire_.now() - up_.delegated->since, Flow::most);
      if (section_bytes_ > 0) lasted = std::min(lasted, 2 * section_seconds_ * bytes / section_bytes_);
      section_seconds_ = lasted;
      section_bytes_ = bytes;
    }
  }
  if (!pause_.lasts(next_)) pause_.over();
  while (!up_.all_decoded()) skip_piece();
  if (root() && !counted()) return false;
  announce_sum();
  if (!root()) end_delegation();
  return false;
}

// Below the root: end the sections, because the message that the children form is complete or no longer needed.
void Node::end_delegation() {
  withdraw(Object::What::own, next_ + 1);
  up_.delegated.reset();
  sections_ = {};
  formed_.parts.clear();  // sections that this rank formed itself, because other ranks did not
}

// Make sure that some rank forms each section. Returns false if that is impossible.
bool Node::mend_sections() {
  Delegated& delegated = *up_.delegated;
  const double now = wire_.now();
  believe_answers();
  // On slow cables all sections are slow. Until the first piece is formed, the absence of pieces says little.
  double longest = 0;
  for (const Flow& flow : delegated.flows) longest = std::max(longest, flow.longest);
  const double patience = longest > 0 ? std::max(limits_.silent_seconds, 2 * longest)
                                      : unformed * limits_.silent_seconds;
  std::vector<Section> sections;
  bool changed = false, other_messages = false;
  for (std::size_t i = 0; i < sections_.all.size(); ++i) {
    const Sections::Known& known = sections_.all[i];
    Section& section = sections.emplace_back(known.section);
    if (known.taken == section.last) continue;
    bool lost = false, late = false;  // whether messages are lost or late
    bool answered = true;             // whether all ranks have answered since the last piece came
    for (const std::size_t row : delegated.decodings[i]->rows) {
      Child& child = child_of_row(row);
      answered = answered && answers_since(child, delegated.flows[i].moved);
      lost |= !usable(row, up_.incoming.size() - 1) || child.dead;
      late |= !is_responsive(child);
    }
    if (lost && chosen_by_all()) return false;
    // If the whole sum must use one choice of messages, the ordinary path makes another choice. With shared work
    // the ledger makes the choice (see `watch_members`), and has not changed it yet.
    if (late && chosen_by_all() && !up_.call.shared && (gives_up() || decoding_from(0, true))) return false;
    Child* maker = child_of(section.maker);
    const bool left = known.gone || (maker && !is_responsive(*maker));
    std::shared_ptr<const Decoding> other;
    if ((lost || late) && !chosen_by_all()) {
      other = decoding_from(i, true);
      if (!other && lost && !gives_up()) other = decoding_from(i, false);
      if (!other && (lost || gives_up())) return false;
    }
    if (late && !other) delegated.flows[i].wait(now);
    // A section that begins again loses all fetched pieces. So patience doubles with each attempt. The parent
    // is the last to try, and never loses its pieces: even on slow networks the sum is formed in the end.
    const bool stuck = now - delegated.flows[i].moved >= std::ldexp(patience, static_cast<int>(delegated.attempts[i]));
    if (!other && (!maker || !(left || stuck))) continue;
    other_messages |= late && other;
    if (other) delegated.decodings[i] = std::move(other);
    // a child may have offered a part of its message first, and then the whole message within the offer
    if (!fetchable(*delegated.decodings[i])) return false;
    answered = answered && maker && answers_since(*maker, delegated.flows[i].moved);
    if (stuck && !left && !late && answered) {
      pause_sections(section.maker);
      section.maker = family_.rank;
    } else if (left || stuck) {
      section.maker = stand_in(i);
    }
    section.version = section_versions_.next();
    changed = true;
  }
  delegated.changes += other_messages;
  if (changed) assign(std::move(sections));
  return true;
}

// Whether a child has sent something since then, and owes no answer.
bool Node::answers_since(const Child& child, double since) const {
  return child.heard > since && (!child.asked || wire_.now() - child.asked < limits_.orphan_seconds);
}

// Called if a rank does not form its section, although all ranks answer. It may be unable to reach another rank, and
// would be unable in the next rounds, too. Form their sums without other ranks.
void Node::pause_sections(Rank maker) {
  if (pause_.lasts(next_)) return;
  pause_.begin(next_);
  news_.push_back("rank " + std::to_string(maker) + " gets no data from other ranks, although all ranks answer: look "
                  "for errors of the network with jaxcoded doctor; " + me() + " forms the long sums of the next " +
                  std::to_string(pause_.rounds()) + " rounds alone");
}

// Whether a child that this rank relies on answers. Asks a child that has been silent for a while. Between hosts
// a message may have to wait behind a lot of earlier data. The usual time of rounds does not show how long this
// wait is, since programs compute for most of a round.
bool Node::is_responsive(Child& child) {
  if (child.dead || stalled(child)) return false;
  const double now = wire_.now();
  const double heard = std::max(child.heard, up_.delegated->since);
  if (now - heard < limits_.orphan_seconds) return true;
  const double least = wire_.direct(child.rank) ? limits_.orphan_seconds : limits_.silent_seconds;
  if (!child.asked) {
    ask_whether_it_is_there(child);
  } else if (now - child.asked >= std::ldexp(std::max(least, share_of_wait(heard)), up_.delegated->changes)) {
    stall(child);
    return false;
  }
  return true;
}

// Choose a rank to form a section in place of its maker.
Rank Node::stand_in(std::size_t index) {
  Delegated& delegated = *up_.delegated;
  if (++delegated.attempts[index] > most_attempts) return family_.rank;
  for (std::size_t i = 0; i < delegated.members.size(); ++i) {
    const Rank rank = delegated.members[delegated.turns++ % delegated.members.size()];
    const Child& child = *child_of(rank);
    if (rank != sections_.all[index].section.maker && takes_part(child)) return rank;
  }
  return family_.rank;
}

// Give up the sections, because the sum is formed in another way, or again. All ranks forget the sections.
void Node::abandon_sections() {
  up_.sufficient_at = 0;
  if (!up_.delegated) return;
  const Delegated& delegated = *up_.delegated;
  const SectionPlan none{.purpose = purpose(), .members = delegated.members};
  for (const Rank rank : delegated.members) tell_sections(rank, next_, up_.call.fingerprint, none, 0);
  for (const Rank rank : delegated.joined) tell_sections(rank, next_, up_.call.fingerprint, none, 0);
  learn_sections(none);
  root() ? up_.delegated.reset() : end_delegation();
  up_.whole = !up_.call.shared;
  up_.decoding.reset();
  up_.decoded = up_.exact;
}

// --- On the way down ---

// Whether children fetch this result from this rank in sections.
bool Node::spreads(const Entry& entry) const {
  return family_.delegates && !root() && !entry.failed && entry.buffer && limits_.slices == 1 &&
         entry.layout.size() > 1 && entry.layout.bytes() >= limits_.sections_from;
}

// Return the children that wait for this result and do not know any of it yet; empty if there is only one.
std::vector<Rank> Node::those_waiting(const Entry& entry) const {
  std::vector<Rank> out;
  for (const Child& child : children_) {
    const Listener& listener = listeners_.at(child.rank);
    const bool waits = child.offer.round == entry.round && listener.first == entry.round &&
                       listener.last >= entry.round && !listener.known_pieces;
    if (waits && child.offer.fingerprint == entry.fingerprint && !child.dead && !child.asked) {
      out.push_back(child.rank);
    }
  }
  if (out.size() < 2) out.clear();
  return out;
}

// Whether `rank` will get the result in sections once this rank has the whole result.
bool Node::will_spread_to(Rank rank, const Entry& entry) const {
  return spreads(entry) && std::ranges::count(those_waiting(entry), rank);
}

// Let waiting children fetch one section each from this rank, and the other sections from each other. Only then
// does this rank announce the whole result to them. A child that lacks a piece for a while fetches it from this
// rank.
void Node::spread(const Entry& entry) {
  if (!spreads(entry)) return;
  SectionPlan plan{.purpose = Purpose::copy, .members = those_waiting(entry), .of_parent = OfParent::term};
  const std::size_t makers = std::min<std::size_t>(plan.members.size(), entry.layout.size());
  for (std::size_t i = 0; i < makers; ++i) {
    const auto bound = [&](std::size_t part) {
      return static_cast<std::uint32_t>(std::uint64_t{entry.layout.size()} * part / makers);
    };
    plan.sections.push_back({.first = bound(i),
                             .last = bound(i + 1),
                             .maker = plan.members[i],
                             .version = section_versions_.next()});
  }
  Term& term = plan.terms.emplace_back(Term{.rank = family_.rank, .coefficients = {1.0}});
  for (const std::byte* vector : entry.at) term.addresses.push_back(reinterpret_cast<std::uintptr_t>(vector));
  for (std::size_t i = 0; i < plan.members.size(); ++i) {
    if (i == makers) plan.terms.clear();
    tell_sections(plan.members[i], entry.round, entry.fingerprint, plan, i < makers ? i : 0);
  }
}

}  // namespace jaxcoded
