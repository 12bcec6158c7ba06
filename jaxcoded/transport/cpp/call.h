// One call of a collective at this rank.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "layout.h"
#include "parity.h"

namespace jaxcoded {

// Copies a call's vectors between a GPU and the host while the call is in progress.
class Feed {
 public:
  virtual ~Feed() = default;

  // Return how many bytes of this rank's vector, from its start, have arrived at its address in `Call::own`.
  virtual std::uint64_t ready(std::size_t vector) const = 0;
  // Called when these bytes of the result are in `Call::out`. The bytes of each vector come in order, without
  // gaps.
  virtual void given(std::size_t vector, std::uint64_t offset, std::uint64_t bytes) = 0;
  // Return why the rest of `Call::own` will not arrive, in words; empty if the rest may still arrive.
  virtual std::string failure() = 0;
};

// The number of examples in a sum, if it is known. The first element of the sum should equal this number.
struct Examples {
  double number = 0;   // 0: not known
  double allowed = 0;  // how far rounding may move the first element, relative to `number`
};

// For each vector of an audited block, the machine epsilon of the numbers that the vector is computed in, and
// its length. They bound how far the block's two results may differ; see node_audit.cpp. The call's last vector
// holds the reports to compare.
using Audits = std::vector<std::pair<double, double>>;

struct Call {
  std::uint64_t fingerprint = 0;  // equal on ranks that make the same call
  std::string signature;          // the call in words
  std::string why_not;            // why the round must fail, for a reason that every rank knows; otherwise empty
  bool up = true;                 // the ranks' vectors are summed; otherwise the root's vectors are passed on
  bool down = true;               // every rank gets the result; otherwise only the root does
  std::string lacks = {};         // why this rank contributes nothing; empty if its program chose to skip
  bool skipped = false;           // this rank contributes nothing
  bool lacks_memory = false;      // this rank has too little memory for the call and cannot keep its result
  std::vector<Segment> message;   // this rank's vectors: each part of its message has as many as `total`
  std::vector<Segment> total;     // the vectors of the result
  std::vector<const std::byte*> own;  // addresses of `message`'s vectors; valid, like `out`, until the call is over.
                                      // The last addresses may follow, see `Node::extend`
  std::vector<std::byte*> out;        // where the result goes; may be the same memory as `own`
  bool complete = true;               // false: only the first parts have been passed, and `out` is not known yet
  bool shared = false;                // the round itself settles which rank computes which blocks of `own`
  std::vector<double> costs = {};     // with shared work: the cost of each block, see `Ledger::begin`
  std::vector<bool> erased;           // by child: left out, or lacks too many of its own children; empty: none
  std::vector<Apart> apart;           // elements to compare separately; equal on all ranks
  Examples examples;                  // equal on all ranks
  Audits audits;                      // equal on all ranks
  Feed* feed = nullptr;               // copies `own` from a GPU and `out` to it; null if both are in host memory.
                                      // Unless the call goes both up and down, all of `own` is already in host memory

  // Whether other ranks can fetch the vectors while the program waits for a block. If not, the next round sums
  // the vectors.
  bool lends() const { return shared && !message.empty(); }
  // Whether this rank has something to add to a sum.
  bool sums() const { return up && !skipped && why_not.empty(); }
  bool leaves_out(std::size_t child) const { return !erased.empty() && erased[child]; }
  void leave_out(std::size_t child, std::size_t children) {
    erased.resize(children);
    erased[child] = true;
  }
};

}  // namespace jaxcoded
