// A long sum is formed in sections, each by one rank of a family (delegated decoding).
//
// The parent decides which rank forms which section, from whose messages. Every rank fetches the sections of
// the root's sum from their makers. Once the root has all of them, the round is decided. Below the root, only
// the parent fetches the sections, which form its message. Its children fetch the result in sections.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "decoder.h"
#include "incoming.h"
#include "layout.h"
#include "message.h"
#include "pool.h"

namespace jaxcoded {

// Pieces of the sum, from `first` up to before `last`.
struct Section {
  std::uint32_t first = 0, last = 0;
  Rank maker = 0;            // the rank that forms it
  std::uint32_t version = 0;  // from 1 on; a section may be formed again, from other messages

  bool operator==(const Section&) const = default;
};

// A message that is a term of the sum.
struct Term {
  Rank rank = 0;
  std::uint32_t part = 0;                     // of the rank's message
  std::vector<double> coefficients = {};      // one for each slice of the sum
  std::uint64_t version = 0;                   // of the vector, if work is shared
  std::vector<std::uint64_t> addresses = {};  // by segment
};

// What the sections of a family form together.
enum class Purpose : std::uint8_t {
  result,   // the sum of the round, which every rank fetches
  message,  // the parent's message, which only the parent fetches
  copy,     // the parent's copy of the round's result, which the other ranks fetch
};

// The shape of a sum that is formed in sections.
struct SumShape {
  std::uint32_t pieces = 0;
  std::size_t segments = 0;
  std::uint32_t slices = 1;  // one piece of a message makes one piece of each slice
  std::uint32_t parts = 1;   // of a message
};

// How a section uses the parent's own vector or, for a copy, the parent's result.
enum class OfParent : std::uint8_t {
  none,  // the vector is not added
  term,  // the vector is the first term
  zero,  // the vector is all zeros, which no rank has to fetch
};

// The version numbers of a parent's sections. 0 means none.
class SectionVersions {
 public:
  constexpr explicit SectionVersions(std::uint32_t last = 0) : last_(last) {}
  constexpr std::uint32_t next() { return ++last_ ? last_ : ++last_; }

 private:
  std::uint32_t last_;
};

static_assert(SectionVersions().next() == 1 && SectionVersions(0xFFFFFFFF).next() == 1);

// What the parent tells a rank about a round: all sections, the ranks to which makers report (`members`), and
// the terms of the section that this rank forms.
struct SectionPlan {
  Purpose purpose = Purpose::result;
  std::vector<Section> sections = {};
  std::vector<Rank> members = {};
  OfParent of_parent = OfParent::none;
  std::vector<Term> terms = {};

  void append_to(Message& message) const {
    const auto add = [&](std::uint64_t value) { message.append(&value, sizeof value); };
    add(sections.size());
    add(members.size());
    add(terms.size());
    add(terms.empty() ? 0 : terms.front().addresses.size());
    add(static_cast<std::uint64_t>(of_parent));
    add(static_cast<std::uint64_t>(purpose));
    for (const Section& section : sections) {
      add(std::uint64_t{section.first} << 32 | section.last);
      add(static_cast<std::uint64_t>(section.maker) << 32 | section.version);
    }
    for (const Rank rank : members) add(static_cast<std::uint64_t>(rank));
    for (const Term& term : terms) {
      add(static_cast<std::uint64_t>(term.rank) << 32 | term.part);
      for (const double coefficient : term.coefficients) add(std::bit_cast<std::uint64_t>(coefficient));
      add(term.version);
      message.append(term.addresses.data(), term.addresses.size() * sizeof(std::uint64_t));
    }
  }

  // Read a plan. All its ranks must belong to the family. `sum`: null for a reader that needs no terms.
  template <class Member>
  static SectionPlan from(const Message& message, const SumShape* sum, Member is_member) {
    const auto all = message.all<std::uint64_t>();
    std::size_t at = 0;
    const auto next = [&] {
      if (at >= all.size()) throw Damaged();
      return all[at++];
    };
    const std::uint64_t sections = next(), members = next(), terms = next(), addresses = next();
    SectionPlan out;
    const std::uint64_t of_parent = next();
    if (of_parent > static_cast<std::uint64_t>(OfParent::zero)) throw Damaged();
    out.of_parent = static_cast<OfParent>(of_parent);
    const std::uint64_t purpose = next();
    if (purpose > static_cast<std::uint64_t>(Purpose::copy)) throw Damaged();
    out.purpose = static_cast<Purpose>(purpose);
    if (std::max({sections, members, terms}) > all.size()) throw Damaged();
    if (sum && terms && addresses != sum->segments) throw Damaged();
    const auto rank = [&](std::uint64_t number) {
      const auto value = static_cast<Rank>(number);
      if (number > std::numeric_limits<std::uint32_t>::max() || !is_member(value)) throw Damaged();
      return value;
    };
    std::uint32_t end = 0;
    for (std::uint64_t i = 0; i < sections; ++i) {
      const std::uint64_t range = next(), whose = next();
      const Section section{.first = static_cast<std::uint32_t>(range >> 32),
                            .last = static_cast<std::uint32_t>(range),
                            .maker = rank(whose >> 32),
                            .version = static_cast<std::uint32_t>(whose)};
      const bool known = std::ranges::any_of(
          out.sections, [&](const Section& other) { return other.version == section.version; });
      if (section.first != end || section.last <= end || !section.version || known) throw Damaged();
      if (sum && section.last % sum->slices) throw Damaged();
      end = section.last;
      out.sections.push_back(section);
    }
    if (sum && sections && end != sum->pieces) throw Damaged();
    for (std::uint64_t i = 0; i < members; ++i) out.members.push_back(rank(next()));
    if (!sum) return out;
    for (std::uint64_t i = 0; i < terms; ++i) {
      Term& term = out.terms.emplace_back();
      const std::uint64_t whose = next();
      term.rank = rank(whose >> 32);
      term.part = static_cast<std::uint32_t>(whose);
      if (term.part >= sum->parts) throw Damaged();
      for (std::uint32_t u = 0; u < sum->slices; ++u) term.coefficients.push_back(std::bit_cast<double>(next()));
      term.version = next();
      for (std::uint64_t s = 0; s < addresses; ++s) term.addresses.push_back(next());
    }
    if (at != all.size()) throw Damaged();
    return out;
  }
};

// A section that this rank forms.
struct Forming {
  std::size_t index = 0;
  Section section = {};
  OfParent of_parent = OfParent::none;
  std::vector<Term> terms = {};
  std::uint32_t next = 0;  // the next piece to form

  struct Slot {
    Buffer buffer = {};
    bool arrived = false;
    double asked = 0;  // when it was requested
  };
  std::map<std::pair<std::uint32_t, std::size_t>, Slot> slots = {};  // by piece of a message, and term
  std::size_t pending = 0;  // slots whose pieces are on their way
};

// The sections of a round that this rank has formed, for the ranks that fetch them.
struct Formed {
  struct Part {
    Section section = {};
    std::uint32_t end = 0;  // pieces before this one are formed
    Buffer buffer = {};
    std::uint64_t base = 0;  // the address at which the whole vector would begin
  };
  Round round = 0;
  Layout layout = {};
  std::list<Part> parts = {};  // an empty list needs no memory, unlike an empty deque

  // Add a section, none of whose pieces is formed yet.
  void begin(const Section& section, Pool& pool) {
    const std::uint64_t start = place(section.first), end = section.last < layout.size() ? place(section.last) : layout.bytes();
    constexpr std::uint64_t aligned = 64;
    Buffer memory = pool.take(end - start + aligned);
    Part& part = parts.emplace_back(section, section.first, std::move(memory));
    part.base = reinterpret_cast<std::uintptr_t>(part.buffer.data()) + start % aligned - start;
  }
  Part* find(std::uint64_t version) {
    for (Part& part : parts) {
      if (part.section.version == version) return &part;
    }
    return nullptr;
  }
  const Part* find(std::uint64_t version) const { return const_cast<Formed*>(this)->find(version); }
  std::byte* at(const Part& part, std::uint32_t piece) const {
    return reinterpret_cast<std::byte*>(part.base + place(piece));
  }
  // Return the address at which each segment would begin, for ranks that fetch the section.
  std::vector<std::uint64_t> addresses(const Part& part) const {
    std::vector<std::uint64_t> out;
    for (std::size_t s = 0; s < layout.segments().size(); ++s) out.push_back(part.base + layout.start(s));
    return out;
  }

 private:
  std::uint64_t place(std::uint32_t piece) const {
    return layout[piece].count ? layout.start(layout[piece].segment) + layout[piece].packed : 0;
  }
};

// The progress of one section or of all sections, piece by piece.
struct Flow {
  double moved = 0;    // when the last piece came
  double longest = 0;  // longest time without a piece, including time in which this process was stopped
  static constexpr double most = 5;  // at most this many seconds count

  void begin(double now) { *this = {.moved = now}; }
  void wait(double now) { moved = now; }  // nothing can move now, and no rank can change that
  void move(double now) {
    longest = std::max(longest, std::min(now - moved, most));
    moved = now;
  }
};

// The rounds in which a parent forms its sums without other ranks, since some ranks may not reach each other. Each
// pause is twice as long as the one before, until a sum has been formed in sections without trouble.
class Pause {
 public:
  // Begin a pause in this round.
  void begin(Round round) {
    rounds_ = std::clamp<Round>(2 * rounds_, least, most);
    last_ = round + rounds_;
  }
  Round rounds() const { return rounds_; }
  bool lasts(Round round) const { return round <= last_; }
  void over() { rounds_ = 0; }

 private:
  static constexpr Round least = 8, most = 1024;

  Round rounds_ = 0, last_ = 0;
};

// What a rank of the family knows about a round whose sum is formed in sections.
struct Sections {
  Round round = 0;  // 0: none
  std::uint64_t fingerprint = 0;  // of the call, which may have been broken off
  Purpose purpose = Purpose::result;
  Layout layout = {};
  Incoming messages = {};    // from which the sum is formed
  std::uint32_t slices = 1;  // pieces of the sum that one piece of a message makes
  struct Known {
    Section section = {};
    std::uint32_t formed = 0;  // the maker has the pieces before this one
    std::vector<std::uint64_t> addresses = {};  // where the maker has these pieces
    bool gone = false;         // the maker no longer has these pieces
    std::uint32_t taken = 0;   // pieces before this one have arrived
    void take(const std::vector<bool>& arrived) {
      while (taken < formed && arrived[taken]) ++taken;
    }
  };
  std::vector<Known> all = {};
  std::vector<Rank> members = {};
  std::vector<bool> arrived = {};  // which pieces of this rank's message have arrived
  std::map<std::uint32_t, std::pair<Rank, double>> asked = {};  // pieces on their way: from which rank, and since when
  std::list<Forming> forming = {};  // an empty list needs no memory
  Flow flow = {};         // of all sections
  double decided_at = 0;  // when this rank heard that the root has the whole sum

  // Return which piece of a term's vector goes into this piece of the sum.
  std::uint32_t number(const Forming& forming, std::size_t term, std::uint32_t piece) const {
    if (is_of_parent(forming, term)) return piece;
    return messages.piece_of_part(forming.terms[term].part, piece / slices);
  }
  Piece of_term(const Forming& forming, std::size_t term, std::uint32_t number) const {
    return is_of_parent(forming, term) ? layout[number] : messages.of_child()[number];
  }
  Object::What kind_of_term(const Forming& forming, std::size_t term) const {
    if (!is_of_parent(forming, term)) return Object::What::message;
    return purpose == Purpose::copy ? Object::What::result : Object::What::own;
  }

  // Return the version of the newest section. A change of the plan makes a newer one.
  std::uint32_t version() const {
    std::uint32_t out = 0;
    for (const Known& known : all) out = std::max(out, known.section.version);
    return out;
  }
  std::size_t of_piece(std::uint32_t piece) const {
    std::size_t index = 0;
    while (index < all.size() && piece >= all[index].section.last) ++index;
    return index;
  }

 private:
  static bool is_of_parent(const Forming& forming, std::size_t term) {
    return forming.of_parent == OfParent::term && term == 0;
  }
};

// At the parent: the sections that it has assigned.
struct Delegated {
  OfParent of_parent = OfParent::none;
  std::vector<std::shared_ptr<const Decoding>> decodings = {};  // for each section
  std::vector<Flow> flows = {};                                 // of each section
  std::vector<Rank> members = {};  // ranks to which the makers report
  std::vector<Rank> joined = {};   // ranks that came later, to which the parent reports
  std::vector<std::size_t> attempts = {};  // for each section, how often another rank was chosen to form it again
  std::size_t turns = 0;                   // which member is considered next to form a section again
  int changes = 0;                         // how often other messages were chosen because some were late
  double since = 0;
};

}  // namespace jaxcoded
