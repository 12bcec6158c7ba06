// How far this rank's call has come on its way up. Each round has a new `WayUp`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "call.h"
#include "decoder.h"
#include "incoming.h"
#include "message.h"
#include "pool.h"
#include "sections.h"
#include "share.h"

namespace jaxcoded {

struct WayUp : Incoming {
  Call call = {};
  double started = 0;    // when this rank called
  bool in_time = false;  // the round was not decided when this rank called

  Layout outgoing = {};   // this rank's message

  // Where the sum is formed.
  Buffer sum = {};
  Buffer own_copy = {};  // a copy of vectors that the sum overwrites, if it may be formed again
  std::vector<std::byte*> sum_at = {};  // the address of each segment

  // How much is summed.
  struct Extent {
    std::uint32_t pieces = 0;                  // pieces of `incoming`
    std::vector<std::uint64_t> elements = {};  // by segment
  };
  Extent decoded = {};
  bool complete = false;  // the sum is complete, or no longer needed

  // What the sum is formed from.
  std::shared_ptr<const Decoding> decoding = {};
  std::vector<std::size_t> brought = {};  // rows whose messages are fetched for the check
  bool own_finite = true;                 // whether this rank's vectors are finite, as far as they are checked
  // For each child whose message may be wrong: whether the other messages fit together. For this, messages are
  // checked a second time.
  struct Without {
    std::size_t child;
    Parity others;
  };
  std::vector<Without> without = {};
  double waiting_since = 0;               // when this rank began to wait for a piece
  std::optional<double> moving_since = {};  // when the messages that had come sufficed for the first time
  std::set<Rank> stalled = {};            // children whose pieces do not come

  // With shared work: what this rank computes.
  Share share = Share();
  double added_at = 0;  // when the latest block was added
  double busy = 0;      // seconds spent on computing blocks
  std::uint32_t blocks = 0;     // the number of computed blocks
  double cost = 0;              // what they cost together, in units of a usual block
  double computing_since = 0;   // when the current block began
  bool audits = false;  // whether this rank must first compute the audited block
  std::vector<Version> versions = {};  // versions of the vectors that the pieces so far were formed from
  bool lent = false;        // `call.own` stays valid as long as the program waits
  std::uint64_t orders = 0;  // how many orders this rank has given as the root, or received as a child

  // What the parent knows of the call.
  bool offering = false;      // an offer was made
  bool held_back = false;     // an offer waits until the parent sends something
  std::uint32_t offered = 0;  // pieces of `outgoing` that were offered

  bool told_little_memory = false;

  // After the deadline.
  bool overdue = false;
  bool told_overdue = false;   // the parent knows that this rank is overdue
  bool forsaken = false;       // no rank above answers
  bool approximating = false;  // pieces from `exact` on use only messages that have arrived
  Extent exact = {};

  // If children form the sum in sections.
  std::optional<Delegated> delegated = {};
  bool whole = false;        // in this round the sum is not formed in sections any more
  double sufficient_at = 0;  // when enough messages had arrived, while this rank waits for latecomers

  std::uint32_t given = 0;  // pieces of the result that were copied to `call.out`

  void lay_out(const Decoder& decoder, std::uint64_t piece_bytes) {
    static_cast<Incoming&>(*this) =
        Incoming::of(call.message, call.total.size(), decoder.slices(), decoder.parts(), piece_bytes);
    outgoing = Layout(call.message, piece_bytes);
    decoded.elements.assign(call.message.size(), 0);
    exact = decoded;
  }
  // Whether the layouts can be used. If memory ran out before, the call only waits for its end.
  bool laid_out() const { return exact.elements.size() == call.message.size(); }

  bool all_decoded() const { return decoded.pieces == incoming.size(); }

  // Return the piece of a child's message that goes into this piece of `incoming`.
  std::uint32_t piece_of_row(std::size_t row, std::uint32_t piece) const {
    return piece_of_part(row % parts, piece);
  }

  // Return the first piece of this rank's message, or of the result at the root, that is not summed yet. The
  // pieces before `piece` are known to be summed.
  std::uint32_t summed(const Layout& layout, std::uint32_t piece) const {
    if (all_decoded()) return layout.size();
    for (; piece < layout.size(); ++piece) {
      const Piece range = layout[piece];
      if (!range.count) break;
      const std::uint64_t part = incoming.segments()[range.segment].count;
      const std::uint64_t known = decoded.elements[range.segment];
      const std::uint64_t last = range.first + range.count - 1;
      if (known < part && (range.first / part != last / part || last % part >= known)) break;
    }
    return piece;
  }
};

}  // namespace jaxcoded
