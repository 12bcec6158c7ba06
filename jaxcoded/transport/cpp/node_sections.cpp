// A long sum that is formed in sections, each by one rank of a family: what these ranks do.
//
// A maker that has formed a part of its section tells the ranks that fetch the section. No rank ends its call
// before the root has all sections of the result. Until then messages stay in place, so that a section can be
// formed again; pieces of its old version are not used. Once the root has all sections, the round is decided
// like any other. A rank gets missing pieces from the maker or, if this fails, from its parent.
#include "node.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

// At least this many of the requested pieces may be from one rank.
constexpr std::size_t results_from_one = 4;
constexpr std::size_t early_of_each = 32;  // messages of each rank that may arrive before the plan and are kept

}  // namespace

// Return the length of pieces in all messages of a round whose result has these segments.
std::uint64_t Node::piece_bytes(const std::vector<Segment>& total) const {
  return limits_.piece_for(bytes_of(total));
}

Layout Node::laid_out(const std::vector<Segment>& total) const {
  return Layout(total, piece_bytes(total), limits_.slices);
}

// Return the shape of a sum with these segments, and of its messages.
SumShape Node::sum_shape(const std::vector<Segment>& total) const {
  return {laid_out(total).size(), total.size(), limits_.slices, limits_.parts};
}

Incoming Node::messages_of(const std::vector<Segment>& total) const {
  return Incoming::of(total, total.size(), limits_.slices, limits_.parts, piece_bytes(total));
}

// --- Messages about sections ---

void Node::on_delegate(Rank from, const Message& message) {
  const Header& head = message.header;
  if (root() || from != upstream_.parent()) return;
  const Entry* entry = history_.find(next_);
  // if there is too little memory, later messages must not wait behind this one
  const bool waits = calling() && !up_.told_little_memory && head.round == next_ && frontier_ == next_ &&
                     head.fingerprint == up_.call.fingerprint;  // a mismatch is reported elsewhere
  const bool has_some = entry && (entry->failed || !entry->buffer || entry->ready);
  if (!waits || has_some) return decline(message);
  const std::vector<Segment>& total = up_.call.total;
  const SumShape shape = sum_shape(total);
  const SectionPlan plan = SectionPlan::from(message, &shape, [&](Rank rank) {
    return rank == family_.rank || rank == from || is_sibling(rank);
  });
  const auto known = announced_.find(next_);
  if (plan.purpose == Purpose::message && (entry || known != announced_.end())) return;  // not needed now
  if (entry && entry->layout.segments() != total) throw Damaged();
  if (known != announced_.end() && !known->second.failed && known->second.segments != total) {
    throw Damaged();
  }
  const bool forms = !plan.terms.empty();
  if (forms) {
    // the family's code has no messages for this sum, for example if slices do not divide the sum's length
    if (shape.pieces != messages_of(total).incoming.size() * limits_.slices) throw Damaged();
    if (head.ready >= plan.sections.size()) throw Damaged();
    if (plan.sections[head.ready].maker != family_.rank) throw Damaged();
    if (plan.of_parent == OfParent::term && plan.terms.front().rank != from) throw Damaged();
  }
  if (plan.purpose != Purpose::result && limits_.slices != 1) throw Damaged();
  if (up_.delegated) abandon_sections();  // this rank's message is not needed any more
  learn_sections(plan);
  if (forms && plan.purpose == Purpose::copy) {
    copied_ = {next_, head.ready, plan.sections[head.ready].version, plan.members};
  }
  if (forms && !has_begun(plan.sections[head.ready])) {
    unless_copy_lacks_memory(head.ready, [&] { begin_forming(plan, head.ready); });
  }
  for (auto& [sender, early] : std::exchange(early_, {})) on_formed(sender, early);
}

// Refuse to form a section. For a copy, tell the members, as no rank oversees the sections of a copy.
void Node::decline(const Message& message) {
  const auto anybody = [](Rank) { return true; };
  const SectionPlan plan = SectionPlan::from(message, nullptr, anybody);
  const std::size_t index = message.header.ready;
  if (plan.purpose != Purpose::copy || index >= plan.sections.size()) return;
  if (plan.sections[index].maker != family_.rank) return;
  tell_unformed(message.header.round, index, plan.sections[index].version, plan.members);
}

Message Node::about_section(Round round, std::size_t index, std::uint32_t version) const {
  Message message{header(Kind::formed, round)};
  message.header.last = index;
  message.header.fingerprint = version;
  return message;
}

// Tell the members not to wait for this section of a copy.
void Node::tell_unformed(Round round, std::size_t index, std::uint32_t version,
                         const std::vector<Rank>& members) {
  Message message = about_section(round, index, version);
  message.header.flags = failed;
  for (const Rank rank : members) {
    if (is_sibling(rank)) wire_.send(rank, message);
  }
}

// Learn a plan. Unchanged sections stay; pieces of all other sections must be fetched again.
void Node::learn_sections(SectionPlan plan) {
  if (sections_.round != next_) {
    if (formed_.round != next_) drop_formed();
    sections_ = {.round = next_,
                 .fingerprint = up_.call.fingerprint,
                 .layout = laid_out(up_.call.total),
                 .messages = messages_of(up_.call.total),
                 .slices = limits_.slices};
  }
  Sections& sections = sections_;
  // if there is too little memory for these, nothing has changed
  std::vector<Sections::Known> all;
  for (std::size_t i = 0; i < plan.sections.size(); ++i) {
    const Section& section = plan.sections[i];
    const bool same = i < sections.all.size() && sections.all[i].section == section;
    all.push_back(same ? sections.all[i]
                       : Sections::Known{.section = section,
                                         .formed = section.first,
                                         .taken = section.first});
  }
  Entry* entry = history_.find(next_);
  if (entry) entry->arrived.resize(entry->layout.size());
  if (plan.purpose == Purpose::message) sections.arrived.resize(sections.layout.size());
  sections.purpose = plan.purpose;
  sections.members = std::move(plan.members);
  sections.flow.begin(wire_.now());
  const auto before = std::exchange(sections.all, std::move(all));
  const auto stays = [&](std::uint32_t piece) {
    const std::size_t i = sections.of_piece(piece);
    return i < before.size() && i < sections.all.size() && before[i].section == sections.all[i].section;
  };
  std::erase_if(sections.asked, [&](const auto& each) { return !stays(each.first); });
  if (sections.purpose == Purpose::message) {
    for (std::uint32_t p = 0; p < sections.layout.size(); ++p) sections.arrived[p] = sections.arrived[p] && stays(p);
  } else if (entry) {
    asked_pieces_.clear();
    for (std::uint32_t p = 0; p < entry->layout.size(); ++p) entry->arrived[p] = entry->arrived[p] && stays(p);
  }
  std::erase_if(sections.forming, [&](const Forming& each) {
    return each.index >= sections.all.size() || sections.all[each.index].section != each.section;
  });
  if (sections.all.empty()) sections = {};
}

// The root has announced this result. Forget sections of another sum: the message that takes them back was lost, or
// there was too little memory for it. Their pieces must not be mixed with pieces of the result.
void Node::check_sections(const Header& result) {
  if (sections_.round != result.round || sections_.purpose != Purpose::result) return;
  if (sections_.version() == result.done) return;
  if (Entry* entry = history_.find(result.round)) entry->arrived.assign(entry->layout.size(), false);
  end_sections();
}

// Whether some sections come from another host. On one host it saves no time to copy sections before the round
// is decided. Afterwards they can be copied directly to where the program wants them.
bool Node::from_afar() const {
  return std::ranges::any_of(sections_.all, [&](const Sections::Known& known) {
    return known.section.maker != family_.rank && !wire_.direct(known.section.maker);
  });
}

// Return the round's entry in the history, with its own memory.
Entry* Node::begin_entry() {
  Entry* entry = history_.find(sections_.round);
  if (!entry) {
    Entry begun{.round = sections_.round, .fingerprint = sections_.fingerprint, .layout = sections_.layout};
    place(begun);
    entry = &history_.add(std::move(begun));
  }
  entry->arrived.resize(entry->layout.size());
  return entry;
}

// Where the pieces of sections are written.
Node::Destination Node::destination() {
  if (sections_.purpose == Purpose::message) {
    return {sections_.layout, up_.sum_at, sections_.arrived, Copy::cached};
  }
  return destination(*begin_entry());
}

Node::Destination Node::destination(Entry& entry) const {
  return {entry.layout, entry.at, entry.arrived, for_program(entry.layout.bytes())};
}

bool Node::is_sibling(Rank rank) const {
  return std::ranges::find(family_.siblings, rank) != family_.siblings.end();
}

bool Node::has_begun(const Section& section) const {
  return formed_.round == next_ && formed_.find(section.version);
}

void Node::begin_forming(const SectionPlan& plan, std::size_t job) {
  const Section& section = plan.sections[job];
  if (formed_.round != next_) formed_ = {.round = next_, .layout = sections_.layout};
  formed_.begin(section, pool_);
  sections_.forming.push_back({.index = job,
                               .section = section,
                               .of_parent = plan.of_parent,
                               .terms = plan.terms,
                               .next = section.first});
}

void Node::end_sections() {
  early_.clear();
  up_.delegated.reset();
  if (!sections_.round) return;
  const Sections ended = std::exchange(sections_, {});  // first, as telling other ranks may run out of memory
  if (ended.purpose != Purpose::copy) return;
  for (const Forming& forming : ended.forming) {
    tell_unformed(ended.round, forming.index, forming.section.version, ended.members);
  }
}

void Node::drop_formed() {
  if (!formed_.round) return;
  withdraw(Object::What::section, formed_.round + 1);
  formed_ = {};
}

// --- Forming a section ---

// Form some pieces of this rank's next section. Returns whether there is more to do at once.
bool Node::form() {
  if (sections_.forming.empty()) return false;
  Forming& forming = sections_.forming.front();
  Formed::Part& part = *formed_.find(forming.section.version);
  std::uint64_t bytes = 0;
  while (forming.next < forming.section.last && bytes < limits_.announced_bytes) {
    std::vector<const std::byte*> inputs;
    bool brought = false;
    unless_copy_lacks_memory(forming.index, [&] { brought = bring_terms(forming, inputs); });
    if (!brought) return true;
    if (inputs.size() < forming.terms.size()) break;
    const Piece piece = formed_.layout[forming.next];
    std::vector<double> coefficients;
    for (const Term& term : forming.terms) coefficients.push_back(term.coefficients[forming.next % sections_.slices]);
    const std::size_t own = forming.of_parent == OfParent::term ? 1 : 0;
    const std::byte* of_parent = own ? inputs.front() : nullptr;
    if (forming.of_parent == OfParent::zero) {
      zeros_.resize(std::max<std::size_t>(zeros_.size(), piece.bytes));
      of_parent = zeros_.data();
    }
    if (piece.count) {
      combine(formed_.layout.segments()[piece.segment].dtype, formed_.at(part, forming.next), of_parent,
              std::span(inputs).subspan(own), std::span(coefficients).subspan(own), piece.count);
    }
    ++forming.next;
    for (std::size_t i = 0; i < forming.terms.size(); ++i) {
      const std::uint32_t number = sections_.number(forming, i, forming.next - 1);
      const bool again = forming.next < forming.section.last && sections_.number(forming, i, forming.next) == number;
      if (!again) forming.slots.erase({number, i});
    }
    bytes += piece.bytes;
  }
  if (forming.next == part.end) return false;
  formed_bytes_ += bytes;
  part.end = forming.next;
  const std::size_t index = forming.index;
  const bool over = forming.next == forming.section.last;
  formed(index, forming.next, formed_.addresses(part));
  for (const Rank rank : sections_.members) {
    if (rank != family_.rank) tell_formed(rank, index);
  }
  if (!up_.delegated) tell_formed(family_.ancestors.front(), index);
  if (over) sections_.forming.pop_front();
  return over ? !sections_.forming.empty() : bytes >= limits_.announced_bytes;
}

// Request the messages of a section, and collect their pieces for the section's next piece, as far as these
// have arrived. Returns false if a message is no longer available.
bool Node::bring_terms(Forming& forming, std::vector<const std::byte*>& inputs) {
  static const std::byte nothing[1] = {};
  const std::size_t count = forming.terms.size(), ahead = terms_ahead_.pieces();
  for (std::uint32_t p = forming.next; p < forming.section.last; ++p) {
    for (std::size_t turn = 0; turn < count; ++turn) {
      const std::size_t i = (turn + forming.index) % count;  // each maker begins with a different term
      const Term& term = forming.terms[i];
      const std::uint32_t number = sections_.number(forming, i, p);
      const Piece piece = sections_.of_term(forming, i, number);
      if (!piece.bytes || term.rank == family_.rank || forming.slots.contains({number, i})) continue;
      const bool direct = wire_.direct(term.rank);
      if (direct ? p > forming.next : forming.pending >= ahead) continue;
      Buffer memory = pool_.take(piece.bytes);
      Forming::Slot& slot = forming.slots[{number, i}];
      slot.buffer = std::move(memory);
      slot.asked = wire_.now();
      fetched_bytes_ += piece.bytes;
      const std::size_t vector = piece.segment % term.addresses.size();
      switch (wire_.fetch(term.rank, {sections_.kind_of_term(forming, i), sections_.round, term.version}, number,
                          term.addresses[vector] + piece.offset, slot.buffer.data(),
                          piece.bytes, Copy::cached)) {
        case Wire::Fetch::done:
          slot.arrived = true;
          break;
        case Wire::Fetch::pending:
          ++forming.pending;
          break;
        case Wire::Fetch::gone:
          cannot_form(forming.index, term.rank);
          return false;
      }
    }
    if (!forming.pending || forming.pending >= ahead) break;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Term& term = forming.terms[i];
    const std::uint32_t number = sections_.number(forming, i, forming.next);
    if (!sections_.of_term(forming, i, number).bytes) {
      inputs.push_back(nothing);
    } else if (term.rank == family_.rank) {
      const auto own = read({sections_.kind_of_term(forming, i), sections_.round, term.version}, number);
      if (!own) {
        cannot_form(forming.index, term.rank);
        return false;
      }
      inputs.push_back(own->data());
    } else if (const auto slot = forming.slots.find({number, i}); slot != forming.slots.end() && slot->second.arrived) {
      inputs.push_back(slot->second.buffer.data());
    } else {
      break;
    }
  }
  return true;
}

// Tell the parent that a message is no longer available. For a copy tell the members, which can also get the
// result directly from the parent.
void Node::cannot_form(std::size_t index, Rank term) {
  const Section section = sections_.all[index].section;
  std::erase_if(sections_.forming, [&](const Forming& forming) { return forming.section == section; });
  if (up_.delegated) return lose_term(term);
  if (sections_.purpose == Purpose::copy) {
    sections_.all[index].gone = true;
    return tell_unformed(sections_.round, index, section.version, sections_.members);
  }
  Message message = about_section(sections_.round, index, section.version);
  message.header.flags = failed;
  message.header.ready = static_cast<std::uint32_t>(term);
  wire_.send(family_.ancestors.front(), message);
}

// Call `act`. If it runs out of memory, give up a copy: a decided round must not fail because there is too
// little memory to pass on its result.
void Node::unless_copy_lacks_memory(std::size_t index, const std::function<void()>& act) {
  try {
    act();
  } catch (const std::bad_alloc&) {
    if (sections_.purpose != Purpose::copy) throw;
    cannot_form(index, upstream_.parent());
  }
}

void Node::lose_term(Rank rank) {
  if (Child* child = child_of(rank); child && child->offer.round == next_) {
    child->offer.withdraw();
    check_offers();
  } else {
    abandon_sections();
  }
}

// Take a piece of a message from which a section is formed. Returns false if no section waits for the piece.
bool Node::term_arrived(Rank from, Object object, std::uint32_t piece,
                          std::span<const std::byte> data) {
  if (!sections_.round || object.round != sections_.round) return false;
  for (Forming& forming : sections_.forming) {
    for (std::size_t i = 0; i < forming.terms.size(); ++i) {
      if (forming.terms[i].rank != from || forming.terms[i].version != object.version) continue;
      if (sections_.kind_of_term(forming, i) != object.what) continue;
      const auto slot = forming.slots.find({piece, i});
      if (slot == forming.slots.end() || slot->second.arrived) continue;
      if (data.empty()) {
        cannot_form(forming.index, from);
        return true;
      }
      std::memcpy(slot->second.buffer.data(), data.data(), data.size());
      slot->second.arrived = true;
      terms_ahead_.arrived(wire_.now() - slot->second.asked);
      --forming.pending;
      return true;
    }
  }
  return false;
}

// --- Formed sections ---

// Return a piece of a section, if this rank has it.
const std::byte* Node::piece_of_section(std::size_t index, std::uint32_t piece) const {
  const Section& section = sections_.all[index].section;
  if (const auto* part = formed_.round == sections_.round ? formed_.find(section.version) : nullptr) {
    return piece < part->end ? formed_.at(*part, piece) : nullptr;
  }
  const Entry* entry = history_.find(sections_.round);
  return entry && piece < entry->arrived.size() && entry->arrived[piece] ? entry->data(piece) : nullptr;
}

// Tell a rank how much of a section is available, and where. If the section is short, send all of it.
void Node::tell_formed(Rank to, std::size_t index) {
  const Sections::Known& known = sections_.all[index];
  Message message = about_section(sections_.round, index, known.section.version);
  message.header.ready = known.formed;
  std::uint64_t bytes = 0;
  bool available = known.formed == known.section.last;
  for (std::uint32_t p = known.section.first; p < known.formed && available; ++p) {
    bytes += sections_.layout[p].bytes;
    available = piece_of_section(index, p) != nullptr;
  }
  if (available && bytes <= wire_.inline_bytes(to)) {
    message.header.flags = inlined;
    for (std::uint32_t p = known.section.first; p < known.formed; ++p) {
      message.append(piece_of_section(index, p), sections_.layout[p].bytes);
    }
  } else if (known.addresses.empty()) {
    message.header.flags = failed;  // this rank got the section within a message, and sends it on with the result
  } else {
    message.header.segments = static_cast<std::uint32_t>(known.addresses.size());
    message.append(known.addresses.data(), known.addresses.size() * sizeof(std::uint64_t));
  }
  wire_.send(to, message);
}

void Node::on_formed(Rank from, const Message& message) {
  const Header& head = message.header;
  if (!calling() || up_.told_little_memory || head.round != next_ || frontier_ != next_) return;
  const bool relayed = !root() && from == family_.ancestors.front();
  const bool of_mine = !relayed && !is_sibling(from);  // about this rank's message, which its children form or formed
  if (of_mine && !up_.delegated) return;
  const bool known = sections_.round == next_ && head.last < sections_.all.size() &&
                     of_mine == up_.delegated.has_value();
  if (!known || head.fingerprint > sections_.all[head.last].section.version) {
    if (of_mine) return;
    std::erase_if(early_, [&](const auto& early) {  // the new message replaces this one
      return early.first == from && early.second.header.last == head.last;
    });
    if (early_.size() < early_of_each * (family_.siblings.size() + 1)) early_.emplace_back(from, message);
    return;
  }
  Sections::Known& reported = sections_.all[head.last];
  if (head.fingerprint != reported.section.version) return;
  if (from != reported.section.maker && !relayed) throw Damaged();
  if (head.flags & failed) {
    reported.gone |= of_mine || relayed || sections_.purpose == Purpose::copy;
    if (of_mine) lose_term(static_cast<Rank>(head.ready));
    return;
  }
  if (head.ready < reported.section.first || head.ready > reported.section.last) throw Damaged();
  if (head.ready <= reported.formed) return;
  if (head.flags & inlined) {
    std::size_t at = 0;
    for (std::uint32_t p = reported.section.first; p < head.ready; ++p) at += sections_.layout[p].bytes;
    if (at != message.body.size()) throw Damaged();
    const Destination to = destination();
    at = 0;
    for (std::uint32_t p = reported.section.first; p < head.ready; ++p) {
      const Piece piece = to.layout[p];
      if (piece.bytes) std::memcpy(to.at[piece.segment] + piece.offset, message.body.data() + at, piece.bytes);
      at += piece.bytes;
      to.arrived[p] = true;
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

// Record that a section's pieces before `ready` are available from its maker, at these addresses.
void Node::formed(std::size_t index, std::uint32_t ready, std::vector<std::uint64_t> addresses) {
  Sections::Known& known = sections_.all[index];
  known.formed = ready;
  known.addresses = std::move(addresses);
  sections_came_on();
  if (!up_.delegated) return;
  up_.delegated->flows[index].move(wire_.now());
  for (const Rank rank : up_.delegated->joined) tell_formed(rank, index);
}

// Record that sections have made progress.
void Node::sections_came_on() {
  const double now = wire_.now();
  sections_.flow.move(now);
  if (!up_.delegated) upstream_.moved(now);
}

// Fetch what has been formed. Returns whether there is more to do at once.
bool Node::take_sections(Destination to) {
  const std::size_t count = sections_.all.size();
  std::uint64_t bytes = 0;
  const std::size_t ahead = results_ahead_.pieces();
  const std::size_t from_one = std::max(results_from_one, ahead / std::max<std::size_t>(count, 1));
  for (std::size_t turn = 1; turn <= count; ++turn) {
    // each rank begins with a different section
    Sections::Known& known = sections_.all[(turn + static_cast<std::size_t>(family_.rank)) % count];
    const Rank maker = known.section.maker;
    std::size_t on_their_way = 0;
    for (std::uint32_t p = known.taken; p < known.formed && !known.gone; ++p) {
      if (to.arrived[p]) continue;
      const Piece piece = to.layout[p];
      std::byte* place = piece.bytes ? to.at[piece.segment] + piece.offset : nullptr;
      if (maker == family_.rank || !piece.bytes) {
        if (piece.bytes) copy(place, piece_of_section(sections_.of_piece(p), p), piece.bytes, to.how);
        to.arrived[p] = true;
        continue;
      }
      if (sections_.asked.contains(p)) {
        ++on_their_way;
        continue;
      }
      const bool direct = wire_.direct(maker);
      if (direct && bytes >= limits_.announced_bytes) return true;
      if (!direct && (sections_.asked.size() >= ahead || on_their_way >= from_one)) {
        break;
      }
      fetched_bytes_ += piece.bytes;
      switch (wire_.fetch(maker, {Object::What::section, sections_.round, known.section.version}, p,
                          known.addresses[piece.segment] + piece.packed, place, piece.bytes, to.how)) {
        case Wire::Fetch::done:
          to.arrived[p] = true;
          bytes += piece.bytes;
          break;
        case Wire::Fetch::pending:
          sections_.asked[p] = {maker, wire_.now()};
          ++on_their_way;
          break;
        case Wire::Fetch::gone:
          known.gone = true;
          break;
      }
    }
    known.take(to.arrived);
  }
  if (bytes) sections_came_on();
  return false;
}

// Whether the whole sum has arrived. With `or_gone`: whether everything that is still available has arrived.
bool Node::all_taken(bool or_gone) const {
  const auto is_taken = [&](const Sections::Known& known) {
    return known.taken == known.section.last || (or_gone && known.gone);
  };
  return std::ranges::all_of(sections_.all, is_taken);
}

// Take a piece of a section, or the news that the piece is no longer available.
void Node::section_arrived(Rank from, Object object, std::uint32_t piece,
                           std::span<const std::byte> data) {
  const auto asked = sections_.asked.find(piece);
  if (object.round != sections_.round || asked == sections_.asked.end()) return;
  Sections::Known& known = sections_.all[sections_.of_piece(piece)];
  if (asked->second.first != from || known.section.version != object.version) return;
  results_ahead_.arrived(wire_.now() - asked->second.second);
  sections_.asked.erase(asked);
  if (data.empty()) {
    known.gone = true;
    return;
  }
  const Destination to = destination();
  const Piece range = to.layout[piece];
  std::memcpy(to.at[range.segment] + range.offset, data.data(), data.size());
  to.arrived[piece] = true;
  known.take(to.arrived);
  sections_came_on();
  if (up_.delegated) up_.delegated->flows[sections_.of_piece(piece)].move(wire_.now());
}

// Continue with the sections of the round at the frontier. Returns whether there is more to do at once. Returns
// nothing if there are no sections, or if the rest must come from above.
std::optional<bool> Node::follow_sections() {
  if (!sections_.round || sections_.round != frontier_ || sections_.purpose == Purpose::message) return {};
  const auto announcement = announced_.find(frontier_);
  const bool decided = announcement != announced_.end();
  bool more = false;
  if (!decided || !announcement->second.failed) {
    Entry* entry = history_.find(frontier_);
    if (!entry && decided) entry = entry_at_frontier(announcement->second);
    if (!entry && from_afar()) entry = begin_entry();
    if (entry) entry->arrived.resize(entry->layout.size());
    if (entry) more = take_sections(destination(*entry));
    if (!decided || !entry) return more;
    if (!all_taken()) {
      if (!sections_.decided_at) sections_.decided_at = wire_.now();
      const double since = std::max(sections_.flow.moved, sections_.decided_at);
      // the first piece of a copy may still be on its way
      const bool copies = sections_.purpose == Purpose::copy;
      const double least = copies ? limits_.silent_seconds : limits_.orphan_seconds;
      const double patience = std::max(least, 2 * sections_.flow.longest);
      if (!all_taken(true) && wire_.now() - since < patience) return more;
    }
  }
  end_sections();
  return {};
}

// Return when to ask or give up a rank that is silent about the sections.
double Node::sections_at() const {
  if (calling() && up_.sufficient_at) return latecomers_until();
  return sections_.round ? wire_.now() + limits_.orphan_seconds
                         : std::numeric_limits<double>::infinity();
}

}  // namespace jaxcoded
