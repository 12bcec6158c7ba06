// Whether the messages of a parent's children fit together.
//
// Messages are linear in the gradients that they are made of, so with every left null vector h of
// the code's matrix Σ h[row] · message[row] is 0 but for rounding, whatever the gradients are: a
// parity check. Any two decodings differ by such sums.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "layout.h"

namespace jaxcoded {

// Elements of one of a call's vectors that are not compared with the others of it: a mistake in these
// would not show beside them, or theirs not beside these.
struct Apart {
  std::size_t vector;
  std::uint64_t first, count;  // in the vector of the result
  int kind;  // those of one kind are compared together: of kind 0, numbers of which nothing is
             // known, together with all the rest of the vector
};

// What parity checks found wrong.
struct Contradiction {
  std::vector<std::size_t> children;  // that have to do with it
  bool each = false;    // each of them alone would explain it; otherwise several of them are wrong
  bool finite = true;   // or their messages have NaN or infinities
  double mismatch = 0;  // of a sum that should be 0, as a share of the norm of what is added
  double allowed = 0;   // for rounding
};

class Parity {
 public:
  using Check = std::vector<double>;  // a number for each row

  // `checks`: linearly independent, of about unit size. `parts`: rows of each child.
  Parity(std::vector<Check> checks, std::size_t parts);

  // Messages follow of these rows and no others, each of such vectors. `call`: equal for calls whose
  // messages are alike.
  void begin(std::uint64_t call, const std::vector<bool>& rows, std::span<const Segment> vectors,
             const std::vector<Apart>& apart);
  // So many elements of a vector of all of them, from `first` on, by row.
  void add(std::size_t vector, std::uint64_t first, std::span<const std::byte* const> messages,
           std::size_t count);
  // What is wrong with all that was added.
  std::optional<Contradiction> contradiction();

 private:
  struct Sums {
    DType dtype;
    std::size_t vector;
    int kind;                      // see `Apart`; of the rest -1
    std::vector<double> squares;   // of each row's message
    std::vector<Check> products;   // of the checks' sums with each other
  };
  // Elements [first, end) of a vector, and where they are summed.
  struct Run {
    std::uint64_t first, end;
    std::size_t sums;
  };
  // The norm of the sum that should be 0, as a share of the norm of what is added; and what of that
  // rounding explains.
  struct Mismatch {
    double share = 0, allowed = 0;
  };
  static constexpr std::size_t most_calls = 1024;

  std::size_t children() const;
  std::vector<Check> without(std::size_t child) const;
  std::size_t sums_of(std::size_t vector, int kind);
  void add_run(Sums& sums, std::span<const std::byte* const> messages, std::uint64_t from,
               std::size_t count);
  void settle();
  Mismatch mismatch(const Check& combination, const Sums& sums) const;
  bool holds(const Check& combination) const;

  std::vector<Check> checks_;  // all of them,
  std::size_t parts_;
  std::vector<Check> active_;  // and those without rows that do not take part
  std::vector<bool> rows_;
  std::vector<Sums> sums_;  // of the rest of each vector, then of what is apart
  std::vector<std::vector<Run>> runs_;  // of what is apart, by vector, in order
  // Of each row the squares of all of its message, the largest of any round of a call.
  std::map<std::uint64_t, std::vector<double>> largest_;
  std::uint64_t call_ = 0;
};

}  // namespace jaxcoded
