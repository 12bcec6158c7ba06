// One call of a collective at this rank.
#pragma once

#include <string>
#include <vector>

#include "layout.h"
#include "parity.h"

namespace jaxcoded {

// Vectors that are copied while the call is in progress: those of a GPU.
class Feed {
 public:
  virtual ~Feed() = default;

  // So many bytes from the start of this rank's own vector have arrived where `own` points.
  virtual std::uint64_t ready(std::size_t vector) const = 0;
  // These bytes of the result are where `out` points. Called in order, for all that comes before the end.
  virtual void given(std::size_t vector, std::uint64_t offset, std::uint64_t bytes) = 0;
  // Why the rest of `own` will not arrive, in words; empty if it may.
  virtual std::string failure() = 0;
};

// The number of examples in a sum, if it is known: its first number should equal it.
struct Examples {
  double number = 0;   // 0: not known
  double allowed = 0;  // for rounding, as a share
};

// How the two results of an audited block are compared: for each of its vectors, the eps of the numbers
// in which it is computed; see node_audit.cpp. The last of the call's vectors holds what is compared.
using Audits = std::vector<double>;

struct Call {
  std::uint64_t fingerprint = 0;  // equal on ranks that call the same
  std::string signature;          // what is called
  std::string why_not;            // why the round must fail, known to every rank; or empty
  bool up = true;                 // the ranks' vectors are summed; otherwise the root's are passed on
  bool down = true;               // every rank gets the result; otherwise the root alone
  std::string lacks = {};         // why this rank contributes nothing; empty if its program decided so
  bool skipped = false;           // this rank has nothing to contribute,
  bool lacks_memory = false;      // and no memory for what others have
  std::vector<Segment> message;   // this rank's vectors: those of `total`, for each of its parts
  std::vector<Segment> total;     // those of the result
  std::vector<const std::byte*> own;  // where they are; valid, as `out`, until the call is over.
                                      // The last ones may follow, see `Node::extend`
  std::vector<std::byte*> out;        // where the result goes; may be where `own` is
  bool complete = true;               // or only its first parts are here, and `out` is not known yet
  bool shared = false;                // the round itself settles which rank computes what of `own`
  std::vector<double> costs = {};     // of its blocks, see `Ledger::begin`
  std::vector<bool> erased;           // children left out, by row, or for want of theirs; empty: none
  std::vector<Apart> apart;           // elements to compare separately, equal on all ranks,
  Examples examples;                  // as are these
  Audits audits;                      // and these
  Feed* feed = nullptr;               // brings `own` and takes `out`; null if both are in host memory.
                                      // All of `own` is, unless the call goes both up and down

  // Whether others can fetch the vectors while the program waits for a block; otherwise the vectors
  // follow in a second round.
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
