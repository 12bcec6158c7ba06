// What a child offers of its message in a round: made anew for each.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "message.h"
#include "pool.h"
#include "share.h"

namespace jaxcoded {

struct Offer {
  Round round = 0;  // 0: it has offered nothing yet
  std::uint64_t fingerprint = 0;
  std::uint64_t order = 0;  // among all offers
  double seen = 0;          // when the first word of it came

  std::uint32_t ready = 0;  // pieces
  std::uint32_t exact = 0;  // of these
  bool skips = false;       // the child has nothing to contribute,
  std::string why = {};     // as those below it have not
  bool withdrawn = false;
  Progress progress = {};  // where the work is shared
  std::vector<std::uint64_t> addresses = {};
  std::vector<std::byte> body = {};  // the message itself, if it came along
  struct Slot {
    Buffer buffer;
    bool here = false;
  };
  std::map<std::uint32_t, Slot> slots = {};  // pieces asked for

  // The child says how much can be had now. False if it has said more already.
  bool grow(const Message& message) {
    const Header& head = message.header;
    std::size_t start = 0;
    Progress its = head.flags & shares ? Progress::from(message, start) : Progress();
    // too little memory for it changes nothing
    std::vector<std::uint64_t> places;
    std::vector<std::byte> whole;
    if (head.flags & inlined) {
      whole.assign(message.body.begin() + static_cast<std::ptrdiff_t>(start), message.body.end());
    } else {
      places = message.values<std::uint64_t>(start, head.segments);
    }
    if (head.flags & shares) {
      if (its.before(progress)) return false;
      if (its.version() != progress.version()) slots.clear();
      if (progress.before(its)) {  // less may be there than before, or more again
        ready = 0;
        withdrawn = false;
      }
      progress = std::move(its);
    } else if (head.ready == 0) {
      why = message.text();
      skips = true;
    }
    if (head.ready < ready) return false;
    addresses = std::move(places);
    body = std::move(whole);
    if (!(head.flags & approximate)) exact = head.ready;
    ready = head.ready;
    return true;
  }
  // Whether a piece is here.
  bool has(std::uint32_t piece) const {
    const auto slot = slots.find(piece);
    return !body.empty() || (slot != slots.end() && slot->second.here);
  }
  // Nothing more can be had.
  void withdraw() {
    withdrawn = true;
    slots.clear();
  }
  // Whether what the child says of its message fits what is to be read of it.
  bool fits(const Layout& layout) const {
    if (ready == 0) return true;
    if (ready > layout.size()) return false;
    return body.empty() ? addresses.size() == layout.segments().size()
                        : body.size() >= layout.bytes();
  }
};

}  // namespace jaxcoded
