// One call of a collective at this rank.
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "parity.h"

namespace jaxcoded {

// Copies a call's vectors between a GPU and the host while the call is in progress.
class Feed {
 public:
  virtual ~Feed() = default;

  // How many bytes of a vector of this rank, from its start, have arrived at `own`.
  virtual std::uint64_t ready(std::size_t vector) const = 0;
  // These bytes of the result have been written to `out`. The calls for a vector come in order, without gaps.
  virtual void given(std::size_t vector, std::uint64_t offset, std::uint64_t bytes) = 0;
  // Why the rest of `own` will not arrive, in words; empty if it may still arrive.
  virtual std::string failure() = 0;
};

// The number of examples in a sum, if it is known. The first number of the sum should equal it.
struct Examples {
  double number = 0;   // 0: not known
  double allowed = 0;  // how far that number may be off by rounding, as a share
};

// For each vector of an audited block, the eps of the numbers in which the vector is computed. It bounds how
// far the block's two results may differ; see node_audit.cpp. The last vector of the call holds the reports
// that are compared.
using Audits = std::vector<double>;

struct Call {
  std::uint64_t fingerprint = 0;  // equal on ranks that make the same call
  std::string signature;          // what is called
  std::string why_not;            // why the round must fail, known to every rank; or empty
  bool up = true;                 // the ranks' vectors are summed; otherwise the root's vectors are passed on
  bool down = true;               // every rank gets the result; otherwise only the root does
  std::string lacks = {};         // why this rank contributes nothing; empty if its program decided so
  bool skipped = false;           // this rank contributes nothing
  bool lacks_memory = false;      // this rank has too little memory for the call and cannot keep its result
  std::vector<Segment> message;   // this rank's vectors: for each part of its message, those of `total`
  std::vector<Segment> total;     // the vectors of the result
  std::vector<const std::byte*> own;  // where the vectors of `message` are; valid, like `out`, until the call is over.
                                      // The last ones may follow, see `Node::extend`
  std::vector<std::byte*> out;        // where the result goes; may be the same memory as `own`
  bool complete = true;               // otherwise only the first parts are here, and `out` is not known yet
  bool shared = false;                // the round itself settles which rank computes which blocks of `own`
  std::vector<double> costs = {};     // of the blocks of such a round, see `Ledger::begin`
  std::vector<bool> erased;           // children that are left out or lack too many of their own, by row; empty: none
  std::vector<Apart> apart;           // elements to compare separately; equal on all ranks
  Examples examples;                  // equal on all ranks
  Audits audits;                      // equal on all ranks
  Feed* feed = nullptr;               // copies `own` from and `out` to a GPU; null if both are in host memory.
                                      // Unless the call goes both up and down, all of `own` is already in host memory

  // Whether other ranks can fetch the vectors while the program waits for a block. Otherwise a second round
  // sums the vectors.
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
