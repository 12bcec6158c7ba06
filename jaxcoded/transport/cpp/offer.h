// What a child offers of its message in a round. Each round has a new `Offer`.
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
  Round round = 0;  // 0: the child has offered nothing yet
  std::uint64_t fingerprint = 0;
  std::uint64_t order = 0;  // the offer's place in the order in which offers are used
  double seen = 0;          // when the child's first message of the round came

  std::uint32_t ready = 0;  // pieces
  std::uint32_t exact = 0;  // how many of these pieces are exact
  bool skips = false;       // the child has nothing to contribute
  std::string why = {};     // why the child has nothing to contribute
  bool withdrawn = false;
  Progress progress = {};  // with shared work
  std::vector<std::uint64_t> addresses = {};
  std::vector<std::byte> body = {};  // the message itself, if the offer contained it
  struct Slot {
    Buffer buffer;
    bool arrived = false;
  };
  std::map<std::uint32_t, Slot> slots = {};  // pieces that were requested

  // Record how much of its message the child offers now. Returns false if the child has already offered more.
  bool grow(const Message& message) {
    const Header& head = message.header;
    std::size_t start = 0;
    Progress reported = head.flags & shares ? Progress::from(message, start) : Progress();
    // if there is too little memory for these copies, nothing has changed yet
    std::vector<std::uint64_t> places;
    std::vector<std::byte> whole;
    if (head.flags & inlined) {
      whole.assign(message.body.begin() + static_cast<std::ptrdiff_t>(start), message.body.end());
    } else {
      places = message.values<std::uint64_t>(start, head.segments);
    }
    if (head.flags & shares) {
      if (reported.before(progress)) return false;
      if (reported.version() != progress.version()) slots.clear();
      if (progress.before(reported)) {  // fewer pieces may be available now, or withdrawn pieces may be available again
        ready = 0;
        withdrawn = false;
      }
      progress = std::move(reported);
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
  // Whether a piece has arrived here.
  bool has(std::uint32_t piece) const {
    const auto slot = slots.find(piece);
    return !body.empty() || (slot != slots.end() && slot->second.arrived);
  }
  // Record that nothing is available any more.
  void withdraw() {
    withdrawn = true;
    slots.clear();
  }
  // Whether the child's description of its message fits the layout with which it is read.
  bool fits(const Layout& layout) const {
    if (ready == 0) return true;
    if (ready > layout.size()) return false;
    return body.empty() ? addresses.size() == layout.segments().size()
                        : body.size() >= layout.bytes();
  }
};

}  // namespace jaxcoded
