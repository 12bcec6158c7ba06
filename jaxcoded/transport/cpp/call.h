// One call of a collective at this rank.
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "parity.h"

namespace jaxcoded {

// Vectors that are on their way while the call is in progress: those of a GPU.
class Feed {
 public:
  virtual ~Feed() = default;

  // So many bytes from the start of this rank's own vector are where `own` says.
  virtual std::uint64_t ready(std::size_t vector) const = 0;
  // These bytes of the result are where `out` says. In order, as far as they come before the end.
  virtual void given(std::size_t vector, std::uint64_t offset, std::uint64_t bytes) = 0;
  // Why the rest of `own` will not come, in words; empty if it may.
  virtual std::string failure() = 0;
};

// The number of examples that a sum is of, as far as it is known: what its first number should be.
struct Examples {
  double number = 0;   // 0: not known
  double allowed = 0;  // for rounding, as a share
};

// What of a block is compared that two ranks have computed: of each of its vectors the eps of the
// numbers in which it is computed; see node_audit.cpp. The last of the call's vectors tells of it.
using Audits = std::vector<double>;

struct Call {
  std::uint64_t fingerprint = 0;  // equal on ranks that call the same
  std::string signature;          // what is called
  std::string why_not;            // why the round must fail, known to every rank; or empty
  bool up = true;                 // the ranks' vectors are summed; otherwise the root's are told
  bool down = true;               // every rank gets the result; otherwise the root alone
  std::string lacks = {};         // why it contributes nothing; empty if the program says so
  bool skipped = false;           // this rank has nothing to contribute,
  bool lacks_memory = false;      // and no memory for what others have
  std::vector<Segment> message;   // this rank's vectors: those of `total`, for each of its parts
  std::vector<Segment> total;     // those of the result
  std::vector<const std::byte*> own;  // where they are; valid, as `out`, until the call is over.
                                      // The last ones may follow, see `Node::extend`
  std::vector<std::byte*> out;        // where the result goes; may be where `own` is
  bool complete = true;               // or only its first parts, and `out` is not known yet
  bool shared = false;                // who computes what of `own` is settled meanwhile
  std::vector<double> costs = {};     // of its blocks, see `Ledger::begin`
  std::vector<bool> erased;           // children left out, by row, or for want of theirs; empty: none
  std::vector<Apart> apart;           // what is not compared with the rest, equal on all ranks,
  Examples examples;                  // and this too
  Audits audits;                      // and this
  Feed* feed = nullptr;               // what brings `own` and takes `out`; null if both are here.
                                      // All of `own` is, unless the call goes both up and down

  // Whether the vectors are there while the program waits for a block; otherwise they follow in a
  // round of their own.
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
