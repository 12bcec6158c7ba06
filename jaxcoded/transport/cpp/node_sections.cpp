// A long sum that is formed in sections, each by one rank of the root's family.
//
// The root chooses the messages, as for any sum, and asks those who are there to form a section each;
// whoever has formed some of it tells all others, who fetch it. Nobody ends its call before the root
// has all sections: until then messages stay where they are, so that a section can be formed again,
// and what was fetched of it before is not used. From then on the round is decided as any
// other, and a rank that lacks something gets it from its maker, or else from the root.
#include "node.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

// Pieces on their way at a time where that takes time: those that a section is formed from, those of
// the result, and of these from one rank at least. Receivers set the pace, or ports overflow; but what
// is asked for waits behind what was asked for before it.
constexpr std::size_t terms_ahead = 24;
constexpr std::size_t results_ahead = 48;
constexpr std::size_t results_from_one = 4;
constexpr std::size_t most_choices = 16;  // of messages
constexpr std::size_t early_of_each = 32;  // messages of a rank that overtook the root's
constexpr std::size_t most_attempts = 3;  // by others than the root
constexpr double unformed = 4;  // times as long may it take until any of a sum is formed

}  // namespace

// Of all messages of a round with this result.
std::uint64_t Node::piece_bytes(const std::vector<Segment>& total) const {
  return limits_.piece_for(bytes_of(total));
}

Layout Node::laid_out(const std::vector<Segment>& total) const {
  return Layout(total, piece_bytes(total), limits_.slices);
}

// Of a sum of vectors like these, and of the messages that it is formed from.
SumShape Node::sum_shape(const std::vector<Segment>& total) const {
  return {laid_out(total).size(), total.size(), limits_.slices, limits_.parts};
}

Incoming Node::messages_of(const std::vector<Segment>& total) const {
  return Incoming::of(total, total.size(), limits_.slices, limits_.parts, piece_bytes(total));
}

// --- The root ---

bool Node::may_delegate() const {
  return limits_.sections_from && up_.call.up && up_.call.down && !up_.whole &&
         up_.call.audits.empty() && !decoder_.checked() && !up_.approximating && up_.decoded.pieces == 0 &&
         up_.incoming.size() > 1 && up_.outgoing.bytes() >= limits_.sections_from &&
         up_.outgoing.size() == up_.incoming.size() * limits_.slices;
}

// Form the sum in sections, if it can be. Whether there is more to do at once; nothing if it is to be
// formed here.
std::optional<bool> Node::delegate() {
  if (up_.delegated) return oversee();
  if (!may_delegate()) return {};
  const std::uint32_t last = up_.incoming.size() - 1;
  const auto decoding = own_ready(last) ? choose(last) : nullptr;
  if (!may_delegate()) return {};
  if (!decoding) {
    up_.whole = gives_up() || too_few_left(last);
    if (up_.whole) return {};
    return false;
  }
  // Whoever comes a little later is of use, too.
  const double now = wire_.now();
  if (!up_.sufficient_at) up_.sufficient_at = now;
  if (now < up_.sufficient_at + patience_with_latecomers()) return false;
  if (!begin_sections(decoding)) {
    up_.whole = true;
    return {};
  }
  return true;
}

// Seconds to wait for them: no more than it would save that they send and form a part, too. From another
// host nobody comes sooner than that.
double Node::patience_with_latecomers() const {
  const auto comes = [&](const Child& child) { return !child.retired && !child.dead; };
  const auto here = [&](const Child& child) { return takes_part(child); };
  const auto most = static_cast<std::size_t>(std::ranges::count_if(children_, comes));
  const auto now = static_cast<std::size_t>(std::ranges::count_if(children_, here));
  if (now >= most) return 0;
  const double messages = static_cast<double>(decoder_.enough()) / limits_.slices;
  const double before = evenly_shared(messages, now + 1);
  const double after = evenly_shared(messages, most + 1);
  const double lasts = section_seconds_ * static_cast<double>(up_.outgoing.bytes());
  const double saved = lasts * (before / after - 1);
  const bool near = std::ranges::all_of(children_, [&](const Child& it) { return wire_.direct(it.rank); });
  return near ? saved : std::max(limits_.stall_seconds, saved);
}

// Whether a child waits for this round and may form a part of it.
bool Node::takes_part(const Child& child) const {
  return child.offer.round == next_ && !child.offer.withdrawn && !child.dead && !stalled(child) &&
         child.offer.fingerprint == up_.call.fingerprint;
}

bool Node::begin_sections(const std::shared_ptr<const Decoding>& decoding) {
  Delegated it;
  for (const Child& child : children_) {
    if (takes_part(child)) it.members.push_back(child.rank);
  }
  if (it.members.empty()) return false;
  const auto choices = chosen_by_all() ? std::vector{decoding} : decodings_in_turn(decoding);
  for (const auto& choice : choices) {
    if (!fetchable(*choice)) return false;
  }
  it.since = wire_.now();
  if (adds_own()) it.of_root = own_is_zero() ? OfRoot::zero : OfRoot::term;
  std::vector<Section> sections;
  std::uint32_t first = 0;
  for (const SectionShare& share : shares_of(it, choices).shares) {
    const bool own = share.maker == it.members.size();
    const std::uint32_t pieces = share.pieces * limits_.slices;
    sections.push_back({.first = first,
                        .last = first + pieces,
                        .maker = own ? family_.rank : it.members[share.maker],
                        .version = ++section_versions_});
    it.decodings.push_back(choices[share.choice]);
    first += pieces;
  }
  it.flows.assign(sections.size(), {.moved = it.since});
  it.attempts.assign(sections.size(), 0);
  up_.delegated = std::move(it);
  assign(std::move(sections));
  return true;
}

// Whether this rank hands in zeros: a root without data does. They are added all the same, so that the
// bits do not depend on where.
bool Node::own_is_zero() const {
  for (std::size_t s = 0; s < up_.call.own.size(); ++s) {
    const std::byte* begin = up_.call.own[s];
    const std::uint64_t bytes = up_.call.total[s].bytes();
    if (bytes && (begin[0] != std::byte{0} || std::memcmp(begin, begin + 1, bytes - 1) != 0)) return false;
  }
  return true;
}

// Whether others can fetch these messages: short ones come within offers.
bool Node::fetchable(const Decoding& choice) {
  return std::ranges::all_of(choice.rows, [&](std::size_t row) {
    return child_of_row(row).offer.addresses.size() == up_.of_child().segments().size();
  });
}

// Who of the members, and of this rank as the last one, forms how much, and from which messages.
SectionShares Node::shares_of(const Delegated& it,
                              const std::vector<std::shared_ptr<const Decoding>>& choices) const {
  const std::size_t own = children_.size();
  const auto port = [&](Rank rank) {
    const auto same = [&](const Child& child) { return child.rank == rank; };
    return static_cast<std::size_t>(std::ranges::find_if(children_, same) - children_.begin());
  };
  std::vector<std::size_t> makers;
  for (const Rank rank : it.members) makers.push_back(port(rank));
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
    if (it.of_root == OfRoot::term) ports.push_back({own, 1});
  }
  return section_shares(makers, messages, own + 1, up_.incoming.size());
}

// Choices of messages, of which the first is known, that use all messages about equally often.
std::vector<std::shared_ptr<const Decoding>> Node::decodings_in_turn(
    std::shared_ptr<const Decoding> first) {
  std::vector<std::size_t> order(decoder_.rows()), used(decoder_.rows());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::shared_ptr<const Decoding>> out;
  for (auto next = std::move(first); next && out.size() < most_choices; next = decoding_from(order, true)) {
    if (std::ranges::any_of(out, [&](const auto& it) { return it->rows == next->rows; })) break;
    for (const std::size_t row : next->rows) ++used[row];
    out.push_back(std::move(next));
    std::ranges::stable_sort(order, {}, [&](std::size_t row) { return used[row]; });
  }
  return out;
}

// Whether nobody is waited for any more.
bool Node::gives_up() const {
  return up_.overdue && limits_.on_deadline != OnDeadline::wait;
}

// Whether all of the sum is of one choice of messages, which is not this function's.
bool Node::chosen_by_all() const { return pinned() || up_.call.shared || sums_blocks(); }

// Messages that suffice for all of the sum, the first of them in this order.
std::shared_ptr<const Decoding> Node::decoding_from(const std::vector<std::size_t>& order, bool in_time) {
  const std::uint32_t last = up_.incoming.size() - 1;
  std::vector<std::size_t> here;
  for (const std::size_t row : order) {
    const Child& child = child_of_row(row);
    if (usable(row, last) && !child.dead && !(in_time && stalled(child))) here.push_back(row);
  }
  return decoder_.decode(here, may_offer(last));
}

// The same, those from `first` on before others.
std::shared_ptr<const Decoding> Node::decoding_from(std::size_t first, bool in_time) {
  std::vector<std::size_t> order(decoder_.rows());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = (first + i) % order.size();
  return decoding_from(order, in_time);
}

// Say who forms which section, where that has changed.
void Node::assign(std::vector<Section> sections) {
  Delegated& it = *up_.delegated;
  const auto is_new = [&](std::size_t i) {
    return i >= sections_.all.size() || sections_.all[i].section != sections[i];
  };
  std::vector<std::size_t> jobs;
  for (std::size_t i = 0; i < sections.size(); ++i) {
    if (!is_new(i)) continue;
    jobs.push_back(i);
    it.flows[i].begin(wire_.now());
    for (const std::size_t row : it.decodings[i]->rows) {
      telemetry_.used(next_, child_of_row(row).column);
    }
  }
  SectionPlan plan{.sections = std::move(sections), .members = it.members};
  std::vector<Rank> idle = it.members;
  idle.insert(idle.end(), it.joined.begin(), it.joined.end());
  for (const std::size_t job : jobs) {
    const Rank maker = plan.sections[job].maker;
    if (maker == family_.rank) continue;
    add_terms(plan, job);
    tell_sections(maker, plan, job);
    std::erase(idle, maker);
  }
  plan.terms.clear();
  for (const Rank rank : idle) tell_sections(rank, plan, 0);
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
  plan.of_root = up_.delegated->of_root;
  if (plan.of_root == OfRoot::term) {
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

void Node::tell_sections(Rank to, const SectionPlan& plan, std::size_t job) {
  Message message{header(Kind::delegate, next_)};
  message.header.fingerprint = up_.call.fingerprint;
  message.header.ready = static_cast<std::uint32_t>(job);
  plan.append_to(message);
  wire_.send(to, message);
}

// A child comes while others form the sum: it can have what they have formed.
void Node::join_sections(const Child& child) {
  if (!up_.delegated || !takes_part(child)) return;
  Delegated& it = *up_.delegated;
  if (std::ranges::find(it.members, child.rank) != it.members.end()) return;
  if (std::ranges::find(it.joined, child.rank) != it.joined.end()) return;
  it.joined.push_back(child.rank);
  SectionPlan plan{.members = it.members};
  for (const Sections::Known& known : sections_.all) plan.sections.push_back(known.section);
  tell_sections(child.rank, plan, 0);
  for (std::size_t i = 0; i < sections_.all.size(); ++i) {
    if (sections_.all[i].formed > sections_.all[i].section.first) tell_formed(child.rank, i);
  }
}

// One more turn of the sections. Whether there is more to do at once.
bool Node::oversee() {
  if (up_.call.shared) {
    const std::vector<Version> before = up_.versions;
    if (!choose_sealed(up_.incoming.size() - 1) || up_.versions != before) {
      abandon_sections();
      return true;
    }
  }
  if (!mend_sections()) {
    abandon_sections();
    return true;
  }
  const bool more = take_sections(*begin_entry());
  if (!all_taken()) return more;
  if (!up_.all_decoded()) {
    const double lasted = wire_.now() - up_.delegated->since;
    section_seconds_ = lasted / static_cast<double>(up_.outgoing.bytes());
  }
  while (!up_.all_decoded()) skip_piece();
  if (!counted()) return false;
  announce_sum();
  return false;
}

// See to it that somebody forms every section. False if nobody can.
bool Node::mend_sections() {
  Delegated& it = *up_.delegated;
  const double now = wire_.now();
  for (const Child& child : children_) {
    if (!child.asked) up_.stalled.erase(child.rank);  // it has answered since
  }
  // On slow cables all are slow. Before any of it is formed, that none is says little.
  double longest = 0;
  for (const Flow& flow : it.flows) longest = std::max(longest, flow.longest);
  const double patience = longest > 0 ? std::max(limits_.silent_seconds, 2 * longest)
                                      : unformed * limits_.silent_seconds;
  std::vector<Section> sections;
  bool changed = false;
  for (std::size_t i = 0; i < sections_.all.size(); ++i) {
    const Sections::Known& known = sections_.all[i];
    Section& section = sections.emplace_back(known.section);
    if (known.taken == section.last) continue;
    bool lost = false, late = false;  // messages
    for (const std::size_t row : it.decodings[i]->rows) {
      Child& child = child_of_row(row);
      lost |= !usable(row, up_.incoming.size() - 1) || child.dead;
      late |= !is_responsive(child);
    }
    if (lost && chosen_by_all()) return false;
    // One choice of messages for all of the sum: another one is a matter of the ordinary way, and where
    // the work is shared, of the ledger (`watch_members`), which has not chosen another one.
    if (late && chosen_by_all() && !up_.call.shared && (gives_up() || decoding_from(0, true))) return false;
    Child* maker = child_of(section.maker);
    const bool left = known.gone || (maker && !is_responsive(*maker));
    const bool stuck = now - it.flows[i].moved >= patience;
    std::shared_ptr<const Decoding> other;
    if ((lost || late) && !chosen_by_all()) {
      other = decoding_from(i, true);
      if (!other && lost && !gives_up()) other = decoding_from(i, false);
      if (!other && (lost || gives_up())) return false;
    }
    if (other && !fetchable(*other)) return false;
    if (!other && !left && !stuck) continue;
    if (other) it.decodings[i] = std::move(other);
    if (left || stuck) section.maker = stand_in(i);
    section.version = ++section_versions_;
    changed = true;
  }
  if (changed) assign(std::move(sections));
  return true;
}

// Whether a child that is relied on answers. It is asked if it has said nothing for a while. On the
// way to another host a word may have to wait for much that was sent before.
bool Node::is_responsive(Child& child) {
  if (child.dead || stalled(child)) return false;
  const double now = wire_.now();
  const double heard = std::max(child.heard, up_.delegated->since);
  if (now - heard < limits_.orphan_seconds) return true;
  const double least = wire_.direct(child.rank) ? limits_.orphan_seconds : limits_.silent_seconds;
  if (!child.asked) {
    ask_whether_it_is_there(child);
  } else if (now - child.asked >= std::max(least, patience(heard))) {
    stall(child);
    return false;
  }
  return true;
}

// Who forms a section in place of its maker.
Rank Node::stand_in(std::size_t index) {
  Delegated& it = *up_.delegated;
  if (++it.attempts[index] > most_attempts) return family_.rank;
  for (std::size_t i = 0; i < it.members.size(); ++i) {
    const Rank rank = it.members[it.turns++ % it.members.size()];
    const Child& child = *child_of(rank);
    if (rank != sections_.all[index].section.maker && takes_part(child)) return rank;
  }
  return family_.rank;
}

// The sum is formed in another way, or anew. What is known of the sections is forgotten everywhere.
void Node::abandon_sections() {
  if (!up_.delegated) return;
  const Delegated it = std::move(*up_.delegated);
  up_.delegated.reset();
  const SectionPlan none{.members = it.members};
  for (const Rank rank : it.members) tell_sections(rank, none, 0);
  for (const Rank rank : it.joined) tell_sections(rank, none, 0);
  learn_sections(none);
  up_.whole = !up_.call.shared;
  up_.decoding.reset();
  up_.decoded = up_.exact;
}

// --- Everybody ---

void Node::on_delegate(Rank from, const Message& message) {
  const Header& head = message.header;
  if (root() || from != upstream_.parent() || from != family_.ancestors.back()) return;
  if (!calling() || head.round != next_ || frontier_ != next_) return;
  if (head.fingerprint != up_.call.fingerprint) return;  // it is told so otherwise
  const Entry* entry = history_.find(next_);
  if (entry && (entry->failed || !entry->buffer || entry->ready)) return;
  const std::vector<Segment>& total = up_.call.total;
  const auto known = announced_.find(next_);
  if (entry && entry->layout.segments() != total) throw Damaged();
  if (known != announced_.end() && !known->second.failed && known->second.segments != total) {
    throw Damaged();
  }
  const SectionPlan plan = SectionPlan::from(message, sum_shape(total), [&](Rank rank) {
    return rank == family_.rank || rank == from || is_sibling(rank);
  });
  const bool mine = !plan.terms.empty();
  if (mine) {
    // a sum that no messages of the family's code can make, such as of a length that its slices do not divide
    if (sum_shape(total).pieces != messages_of(total).incoming.size() * limits_.slices) throw Damaged();
    if (head.ready >= plan.sections.size()) throw Damaged();
    if (plan.sections[head.ready].maker != family_.rank) throw Damaged();
    if (plan.of_root == OfRoot::term && plan.terms.front().rank != from) throw Damaged();
  }
  learn_sections(plan);
  if (mine && !has_begun(plan.sections[head.ready])) begin_forming(plan, head.ready);
  for (auto& [who, early] : std::exchange(early_, {})) on_formed(who, early);
}

// What is the same as before stays, the rest is to be fetched again.
void Node::learn_sections(SectionPlan plan) {
  if (sections_.round != next_) {
    sections_ = {.round = next_,
                 .layout = laid_out(up_.call.total),
                 .messages = messages_of(up_.call.total),
                 .slices = limits_.slices};
    drop_formed();
  }
  Sections& it = sections_;
  it.members = std::move(plan.members);
  it.flow.begin(wire_.now());
  const auto before = std::exchange(it.all, {});
  for (std::size_t i = 0; i < plan.sections.size(); ++i) {
    const Section& section = plan.sections[i];
    const bool same = i < before.size() && before[i].section == section;
    it.all.push_back(same ? before[i]
                          : Sections::Known{.section = section,
                                            .formed = section.first,
                                            .taken = section.first});
  }
  const auto stays = [&](std::uint32_t piece) {
    const std::size_t i = it.of_piece(piece);
    return i < before.size() && i < it.all.size() && before[i].section == it.all[i].section;
  };
  std::erase_if(it.asked, [&](const auto& each) { return !stays(each.first); });
  if (Entry* entry = history_.find(next_)) {
    entry->here.resize(entry->layout.size());
    for (std::uint32_t p = 0; p < entry->layout.size(); ++p) {
      entry->here[p] = entry->here[p] && stays(p);
    }
  }
  std::erase_if(it.forming, [&](const Forming& each) {
    return each.index >= it.all.size() || it.all[each.index].section != each.section;
  });
  if (it.all.empty()) it = {};
}

// Whether some of it comes from another host. On one host nothing is gained by copying before the
// round is decided, and from then on it can be copied to where the program wants it.
bool Node::from_afar() const {
  return std::ranges::any_of(sections_.all, [&](const Sections::Known& it) {
    return it.section.maker != family_.rank && !wire_.direct(it.section.maker);
  });
}

// The entry of the round in the history, in memory of its own.
Entry* Node::begin_entry() {
  Entry* entry = history_.find(sections_.round);
  if (!entry) {
    entry = &history_.add({.round = sections_.round,
                           .fingerprint = up_.call.fingerprint,
                           .layout = sections_.layout});
    place(*entry);
  }
  entry->here.resize(entry->layout.size());
  return entry;
}

bool Node::is_sibling(Rank rank) const {
  return std::ranges::find(family_.siblings, rank) != family_.siblings.end();
}

bool Node::has_begun(const Section& section) const {
  return formed_.round == next_ && formed_.find(section.version);
}

void Node::begin_forming(const SectionPlan& plan, std::size_t job) {
  const Section& section = plan.sections[job];
  sections_.forming.push_back({.index = job,
                               .section = section,
                               .of_root = plan.of_root,
                               .terms = plan.terms,
                               .next = section.first});
  if (formed_.round != next_) formed_ = {.round = next_, .layout = sections_.layout};
  formed_.begin(section, pool_);
}

void Node::end_sections() {
  if (sections_.round) sections_ = {};
  early_.clear();
  up_.delegated.reset();
}

void Node::drop_formed() {
  if (!formed_.round) return;
  withdraw(Object::What::section, formed_.round + 1);
  formed_ = {};
}

// --- Forming a section ---

// A turn of the section that this rank forms. Whether there is more to do at once.
bool Node::form() {
  if (sections_.forming.empty()) return false;
  Forming& it = sections_.forming.front();
  Formed::Part& part = *formed_.find(it.section.version);
  std::uint64_t bytes = 0;
  while (it.next < it.section.last && bytes < limits_.announced_bytes) {
    std::vector<const std::byte*> inputs;
    if (!bring_terms(it, inputs)) return true;
    if (inputs.size() < it.terms.size()) break;
    const Piece piece = formed_.layout[it.next];
    std::vector<double> coefficients;
    for (const Term& term : it.terms) coefficients.push_back(term.coefficients[it.next % sections_.slices]);
    const std::size_t own = it.of_root == OfRoot::term ? 1 : 0;
    const std::byte* of_root = own ? inputs.front() : nullptr;
    if (it.of_root == OfRoot::zero) {
      zeros_.resize(std::max<std::size_t>(zeros_.size(), piece.bytes));
      of_root = zeros_.data();
    }
    if (piece.count) {
      combine(formed_.layout.segments()[piece.segment].dtype, formed_.at(part, it.next), of_root,
              std::span(inputs).subspan(own), std::span(coefficients).subspan(own), piece.count);
    }
    ++it.next;
    for (std::size_t i = 0; i < it.terms.size(); ++i) {
      const std::uint32_t number = sections_.number(it, i, it.next - 1);
      const bool again = it.next < it.section.last && sections_.number(it, i, it.next) == number;
      if (!again) it.slots.erase({number, i});
    }
    bytes += piece.bytes;
  }
  if (it.next == part.end) return false;
  formed_bytes_ += bytes;
  part.end = it.next;
  const std::size_t index = it.index;
  const bool over = it.next == it.section.last;
  formed(index, it.next, formed_.addresses(part));
  for (const Rank rank : sections_.members) {
    if (rank != family_.rank) tell_formed(rank, index);
  }
  if (!root()) tell_formed(family_.ancestors.back(), index);
  if (over) sections_.forming.pop_front();
  return over ? !sections_.forming.empty() : bytes >= limits_.announced_bytes;
}

// Ask for what a section is formed from, and find what is here for its next piece. False if some of it
// can be had no more.
bool Node::bring_terms(Forming& it, std::vector<const std::byte*>& inputs) {
  static const std::byte nothing[1] = {};
  const std::size_t count = it.terms.size();
  const Object::What what = Object::What::message;
  for (std::uint32_t p = it.next; p < it.section.last; ++p) {
    for (std::size_t turn = 0; turn < count; ++turn) {
      const std::size_t i = (turn + it.index) % count;  // everybody begins with another one
      const Term& term = it.terms[i];
      const std::uint32_t number = sections_.number(it, i, p);
      const Piece piece = sections_.of_term(it, i, number);
      if (!piece.bytes || term.rank == family_.rank || it.slots.contains({number, i})) continue;
      const bool direct = wire_.direct(term.rank);
      if (direct ? p > it.next : it.pending >= terms_ahead) continue;
      Forming::Slot& slot = it.slots[{number, i}];
      slot.buffer = pool_.take(piece.bytes);
      fetched_bytes_ += piece.bytes;
      const std::size_t vector = piece.segment % term.addresses.size();
      switch (wire_.fetch(term.rank, {what, sections_.round, term.version}, number,
                          term.addresses[vector] + piece.offset, slot.buffer.data(),
                          piece.bytes, Copy::cached)) {
        case Wire::Fetch::done:
          slot.here = true;
          break;
        case Wire::Fetch::pending:
          ++it.pending;
          break;
        case Wire::Fetch::gone:
          cannot_form(it.index, term.rank);
          return false;
      }
    }
    if (!it.pending || it.pending >= terms_ahead) break;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Term& term = it.terms[i];
    const std::uint32_t number = sections_.number(it, i, it.next);
    if (!sections_.of_term(it, i, number).bytes) {
      inputs.push_back(nothing);
    } else if (term.rank == family_.rank) {
      const auto own = read({what, sections_.round, term.version}, number);
      if (!own) {
        cannot_form(it.index, term.rank);
        return false;
      }
      inputs.push_back(own->data());
    } else if (const auto slot = it.slots.find({number, i}); slot != it.slots.end() && slot->second.here) {
      inputs.push_back(slot->second.buffer.data());
    } else {
      break;
    }
  }
  return true;
}

// Somebody's message can be had no more: the root is to know.
void Node::cannot_form(std::size_t index, Rank term) {
  const Section section = sections_.all[index].section;
  std::erase_if(sections_.forming, [&](const Forming& it) { return it.section == section; });
  if (root()) return lose_term(term);
  Message message{header(Kind::formed, sections_.round)};
  message.header.flags = failed;
  message.header.last = index;
  message.header.fingerprint = section.version;
  message.header.ready = static_cast<std::uint32_t>(term);
  wire_.send(family_.ancestors.back(), message);
}

void Node::lose_term(Rank rank) {
  if (Child* child = child_of(rank); child && child->offer.round == next_) {
    child->offer.withdraw();
    check_offers();
  } else {
    abandon_sections();
  }
}

// A piece that a section is formed from. False if none is waited for.
bool Node::term_arrived(Rank from, Object object, std::uint32_t piece,
                          std::span<const std::byte> data) {
  if (!sections_.round || object.round != sections_.round) return false;
  for (Forming& it : sections_.forming) {
    for (std::size_t i = 0; i < it.terms.size(); ++i) {
      if (it.terms[i].rank != from || it.terms[i].version != object.version) continue;
      const auto slot = it.slots.find({piece, i});
      if (slot == it.slots.end() || slot->second.here) continue;
      if (data.empty()) {
        cannot_form(it.index, from);
        return true;
      }
      std::memcpy(slot->second.buffer.data(), data.data(), data.size());
      slot->second.here = true;
      --it.pending;
      return true;
    }
  }
  return false;
}

// --- What is formed ---

// A piece of a section, if it is here.
const std::byte* Node::piece_of_section(std::size_t index, std::uint32_t piece) const {
  const Section& section = sections_.all[index].section;
  if (const auto* part = formed_.round == sections_.round ? formed_.find(section.version) : nullptr) {
    return piece < part->end ? formed_.at(*part, piece) : nullptr;
  }
  const Entry* entry = history_.find(sections_.round);
  return entry && piece < entry->here.size() && entry->here[piece] ? entry->data(piece) : nullptr;
}

// Tell a rank how much of a section can be had, and where; or all of it, if that is short.
void Node::tell_formed(Rank to, std::size_t index) {
  const Sections::Known& known = sections_.all[index];
  Message message{header(Kind::formed, sections_.round)};
  message.header.last = index;
  message.header.fingerprint = known.section.version;
  message.header.ready = known.formed;
  std::uint64_t bytes = 0;
  bool here = known.formed == known.section.last;
  for (std::uint32_t p = known.section.first; p < known.formed && here; ++p) {
    bytes += sections_.layout[p].bytes;
    here = piece_of_section(index, p) != nullptr;
  }
  if (here && bytes <= wire_.inline_bytes(to)) {
    message.header.flags = inlined;
    for (std::uint32_t p = known.section.first; p < known.formed; ++p) {
      message.append(piece_of_section(index, p), sections_.layout[p].bytes);
    }
  } else if (known.addresses.empty()) {
    message.header.flags = failed;  // it came to this rank in a message, and goes on with the result
  } else {
    message.header.segments = static_cast<std::uint32_t>(known.addresses.size());
    message.append(known.addresses.data(), known.addresses.size() * sizeof(std::uint64_t));
  }
  wire_.send(to, message);
}

void Node::on_formed(Rank from, const Message& message) {
  const Header& head = message.header;
  if (!calling() || head.round != next_ || frontier_ != next_) return;
  const bool relayed = !root() && from == family_.ancestors.back();
  const bool known = sections_.round == next_ && head.last < sections_.all.size();
  if (!known || head.fingerprint > sections_.all[head.last].section.version) {
    if (root() || !(relayed || is_sibling(from))) return;
    std::erase_if(early_, [&](const auto& it) {  // it says more
      return it.first == from && it.second.header.last == head.last;
    });
    if (early_.size() < early_of_each * (family_.siblings.size() + 1)) early_.emplace_back(from, message);
    return;
  }
  Sections::Known& it = sections_.all[head.last];
  if (head.fingerprint != it.section.version) return;
  if (from != it.section.maker && !relayed) throw Damaged();
  if (head.flags & failed) {
    it.gone = root() || relayed;
    if (root()) lose_term(static_cast<Rank>(head.ready));
    return;
  }
  if (head.ready < it.section.first || head.ready > it.section.last) throw Damaged();
  if (head.ready <= it.formed) return;
  if (head.flags & inlined) {
    std::size_t at = 0;
    for (std::uint32_t p = it.section.first; p < head.ready; ++p) at += sections_.layout[p].bytes;
    if (at != message.body.size()) throw Damaged();
    Entry& entry = *begin_entry();
    at = 0;
    for (std::uint32_t p = it.section.first; p < head.ready; ++p) {
      const Piece piece = entry.layout[p];
      std::memcpy(entry.at[piece.segment] + piece.offset, message.body.data() + at, piece.bytes);
      at += piece.bytes;
      entry.here[p] = true;
    }
    formed(head.last, head.ready, {});
  } else {
    const std::size_t segments = sections_.layout.segments().size();
    if (head.segments != segments || message.body.size() != segments * sizeof(std::uint64_t)) {
      throw Damaged();
    }
    formed(head.last, head.ready, message.values<std::uint64_t>(0, head.segments));
  }
}

// So many pieces of a section can be had from its maker, there.
void Node::formed(std::size_t index, std::uint32_t ready, std::vector<std::uint64_t> addresses) {
  Sections::Known& it = sections_.all[index];
  it.formed = ready;
  it.addresses = std::move(addresses);
  sections_came_on(index);
  if (!root()) return;
  for (const Rank rank : up_.delegated->joined) tell_formed(rank, index);
}

// Some of it came.
void Node::sections_came_on(std::size_t index) {
  const double now = wire_.now();
  sections_.flow.move(now);
  if (root()) {
    up_.delegated->flows[index].move(now);
  } else {
    upstream_.moved(now);
  }
}

// Fetch what has been formed. Whether there is more to do at once.
bool Node::take_sections(Entry& entry) {
  const std::size_t count = sections_.all.size();
  std::uint64_t bytes = 0;
  const Copy how = for_program(entry.layout.bytes());
  const std::size_t from_one = std::max(results_from_one, results_ahead / std::max<std::size_t>(count, 1));
  for (std::size_t turn = 1; turn <= count; ++turn) {
    // everybody begins with another one
    Sections::Known& it = sections_.all[(turn + static_cast<std::size_t>(family_.rank)) % count];
    const Rank maker = it.section.maker;
    std::size_t on_their_way = 0;
    for (std::uint32_t p = it.taken; p < it.formed && !it.gone; ++p) {
      if (entry.here[p]) continue;
      const Piece piece = entry.layout[p];
      std::byte* to = piece.bytes ? entry.at[piece.segment] + piece.offset : nullptr;
      if (maker == family_.rank || !piece.bytes) {
        if (piece.bytes) copy(to, piece_of_section(sections_.of_piece(p), p), piece.bytes, how);
        entry.here[p] = true;
        continue;
      }
      if (sections_.asked.contains(p)) {
        ++on_their_way;
        continue;
      }
      const bool direct = wire_.direct(maker);
      if (direct && bytes >= limits_.announced_bytes) return true;
      if (!direct && (sections_.asked.size() >= results_ahead || on_their_way >= from_one)) {
        break;
      }
      fetched_bytes_ += piece.bytes;
      switch (wire_.fetch(maker, {Object::What::section, sections_.round, it.section.version}, p,
                          it.addresses[piece.segment] + piece.packed, to, piece.bytes, how)) {
        case Wire::Fetch::done:
          entry.here[p] = true;
          bytes += piece.bytes;
          break;
        case Wire::Fetch::pending:
          sections_.asked[p] = maker;
          ++on_their_way;
          break;
        case Wire::Fetch::gone:
          it.gone = true;
          break;
      }
    }
    while (it.taken < it.formed && entry.here[it.taken]) ++it.taken;
  }
  if (!bytes) return false;
  sections_.flow.move(wire_.now());
  if (!root()) upstream_.moved(sections_.flow.moved);
  return false;
}

// Whether all of the sum is here.
bool Node::all_taken() const {
  return std::ranges::all_of(sections_.all, [](const auto& it) { return it.taken == it.section.last; });
}

// A piece of a section, or word that it can be had no more.
void Node::section_arrived(Rank from, Object object, std::uint32_t piece,
                           std::span<const std::byte> data) {
  const auto asked = sections_.asked.find(piece);
  if (object.round != sections_.round || asked == sections_.asked.end()) return;
  Sections::Known& it = sections_.all[sections_.of_piece(piece)];
  if (asked->second != from || it.section.version != object.version) return;
  sections_.asked.erase(asked);
  if (data.empty()) {
    it.gone = true;
    return;
  }
  Entry& entry = *history_.find(sections_.round);
  const Piece to = entry.layout[piece];
  std::memcpy(entry.at[to.segment] + to.offset, data.data(), data.size());
  entry.here[piece] = true;
  while (it.taken < it.formed && entry.here[it.taken]) ++it.taken;
  sections_came_on(sections_.of_piece(piece));
}

// Go on with the sections of the round at the frontier. Whether there is more to do at once; nothing
// if there are none, or the rest is to be had from above.
std::optional<bool> Node::follow_sections() {
  if (!sections_.round || sections_.round != frontier_) return {};
  const auto found = announced_.find(frontier_);
  const bool decided = found != announced_.end();
  bool more = false;
  if (!decided || !found->second.failed) {
    Entry* entry = history_.find(frontier_);
    if (!entry && from_afar()) entry = begin_entry();
    if (!entry && decided) entry = entry_at_frontier(found->second);
    if (entry) entry->here.resize(entry->layout.size());
    if (entry) more = take_sections(*entry);
    if (!decided || !entry) return more;
    if (!all_taken()) {
      if (!sections_.decided_at) sections_.decided_at = wire_.now();
      const double since = std::max(sections_.flow.moved, sections_.decided_at);
      const double patience = std::max(limits_.orphan_seconds, 2 * sections_.flow.longest);
      const bool gone = std::ranges::any_of(sections_.all, &Sections::Known::gone);
      if (!gone && wire_.now() - since < patience) return more;
    }
  }
  end_sections();
  return {};
}

// When somebody who says nothing of the sections is to be asked, or given up.
double Node::sections_at() const {
  if (root() && calling() && up_.sufficient_at && !up_.delegated && !up_.all_decoded() && !up_.whole) {
    return up_.sufficient_at + patience_with_latecomers();
  }
  return sections_.round ? wire_.now() + limits_.orphan_seconds
                         : std::numeric_limits<double>::infinity();
}

}  // namespace jaxcoded
