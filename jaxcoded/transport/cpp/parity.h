// Whether the messages of a parent's children fit together.
//
// Messages are linear in the gradients from which they are formed. So for every left null vector h of the
// code's matrix, Σ h[row] · message[row] is 0 except for rounding, whatever the gradients are. This sum is a
// parity check. Any two decodings differ by such sums. docs/theory.md has the bound for rounding.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "layout.h"

namespace jaxcoded {

// Elements of one of a call's vectors that are compared separately from its other elements. If large and small
// elements were compared together, a mistake in the small ones would not show.
struct Apart {
  std::size_t vector;
  std::uint64_t first, count;  // in the vector of the result
  int kind;  // elements of one kind are compared together. Kind 0: nothing is known about the
             // numbers, so they are compared with the rest of the vector
};

// Return how far an honest rank's numbers may be from the numbers that other ranks would compute, relative to
// the largest number. `eps`: the machine epsilon of the numbers in which programs compute.
double of_programs(double eps);
// How far a number is rounded at most, however small it is, in numbers with this machine epsilon.
double near_zero(double eps);
// How often an honest rank's program rounds a number, in types of 16 bits.
inline constexpr double roundings = 4;
// How far an honest rank's numbers may be off, relative to all numbers of the message: numbers near 0 may be
// differences of large numbers.
inline constexpr double of_all = 8 * 0x1p-23;

// How much rounding the tree below a child can cause.
struct Below {
  double amplification = 1;  // the largest product of the codes' κ along a path
  double layers = 0;
  double widest = 0;  // the largest number of children of a parent
  double absolute_amplification = 1;  // how far the message is off if each message on the way is rounded by 1
};

// What parity checks found wrong.
struct Contradiction {
  std::vector<std::size_t> children;  // the children that are involved
  double mismatch = 0;  // the sum of a check, which should be 0, relative to the sizes of its terms
  double allowed = 0;   // how large rounding can make `mismatch`
};

class Parity {
 public:
  using Check = std::vector<double>;  // a number for each row

  // `checks`: linearly independent, of about unit size. `sizes`: for each row of the code, the largest size of
  // its message if gradients have size 1. `below`: for each child.
  Parity(std::vector<Check> checks, std::vector<double> sizes, std::vector<Below> below);

  // Begin to compare the messages of exactly these rows, each with these vectors. `program_eps`: the machine
  // epsilon of the gradients' coarsest numbers.
  void begin(const std::vector<bool>& rows, std::span<const Segment> vectors, const std::vector<Apart>& apart,
             double program_eps);
  // Add `count` elements of one vector of all messages, from element `first` on. `messages`: by row.
  void add(std::size_t vector, std::uint64_t first, std::span<const std::byte* const> messages,
           std::size_t count);
  // Whether these rows allow any comparison.
  bool compares() const { return !active_.empty(); }

  // After everything was added, return the children whose messages have NaN or infinities.
  std::vector<std::size_t> not_finite() const;
  // Return what is wrong, if anything. Call this once, and only if `not_finite` is empty.
  std::optional<Contradiction> contradiction();
  // Record that the messages are right. Their sizes enter the bound for rounding in later rounds with the same
  // vectors, whose messages are usually similar.
  void remember();
  // Remember the sizes that `before` has remembered, with another code.
  void remember(const Parity& before) { remembered_ = before.remembered_; }
  // Record that these children are wrong. Returns whether one of them was right in its previous comparison.
  bool newly_wrong(const std::vector<std::size_t>& children);

 private:
  // The size of numbers, in both norms in which they are compared. A mistake in many numbers shows in the first
  // norm, a mistake in a single number in the second.
  struct Size {
    double squares = 0, largest = 0;

    void add(const double* values, std::size_t count);
    Size& operator+=(const Size& other);
  };
  enum class Norm { euclidean, maximum };
  static constexpr Norm norms[] = {Norm::euclidean, Norm::maximum};
  static double in(Norm norm, const Size& size);

  struct Sums {
    DType dtype;
    std::size_t vector;
    int kind;                  // see `Apart`; -1 for the rest
    double count = 0;          // of elements
    std::vector<Size> rows;    // of each row's message
    std::vector<Size> checks;  // of the sums that should be 0
  };
  // Elements [first, end) of a vector, and where they are summed.
  struct Run {
    std::uint64_t first, end;
    std::size_t sums;
  };
  static constexpr std::size_t most_remembered = 1024;

  std::size_t parts() const { return sizes_.size() / below_.size(); }
  std::size_t sums_of(std::size_t vector, int kind);
  void add_run(Sums& sums, std::span<const std::byte* const> messages, std::uint64_t from,
               std::size_t count);
  void add_up();
  double scale(const Check& check, const std::vector<Size>& rows, Norm norm) const;
  double bound(const Check& check, const Sums& sums, Norm norm) const;

  std::vector<Check> checks_;  // all checks
  std::vector<double> sizes_;
  std::vector<Below> below_;
  std::vector<Check> active_;  // combinations of the checks that do not use rows that take no part
  std::vector<bool> rows_;
  std::vector<bool> finite_;  // by row
  std::vector<Sums> sums_;  // of the rest of each vector, then of elements that are compared separately
  std::vector<std::vector<Run>> runs_;  // of elements that are compared separately, by vector, in order
  std::vector<Size> all_;  // for each row, the size of its whole message
  // The largest size of gradients in any round with the same vectors, as estimated from messages.
  std::map<std::vector<std::uint64_t>, std::array<double, 2>> remembered_;  // by dtypes and lengths; by norm
  std::set<std::size_t> wrong_;  // children that were wrong in their latest comparison
  std::vector<std::uint64_t> vectors_ = {};  // the dtype and the length of each vector
  double program_eps_ = 0;
};

}  // namespace jaxcoded
