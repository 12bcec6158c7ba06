// Whether the messages of a parent's children fit together.
//
// Messages are linear in the gradients that they are made of, so with every left null vector h of
// the code's matrix Σ h[row] · message[row] is 0 but for rounding, whatever the gradients are: a
// parity check. Any two decodings differ by such sums.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "numbers.h"

namespace jaxcoded {

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

  // Messages follow of these rows and no others; of each a vector of each type.
  void begin(const std::vector<bool>& rows, std::vector<DType> vectors);
  // So many elements of a vector of all of them, by row.
  void add(std::size_t vector, std::span<const std::byte* const> messages, std::size_t count);
  // What is wrong with all that was added.
  std::optional<Contradiction> contradiction() const;

 private:
  struct Sums {
    DType dtype;
    std::vector<double> squares;   // of each row's message
    std::vector<Check> products;   // of the checks' sums with each other
  };

  std::size_t children() const;
  std::vector<Check> without(std::size_t child) const;
  double mismatch(const Check& combination, const Sums& sums) const;
  bool holds(const Check& combination) const;

  std::vector<Check> checks_;  // all of them,
  std::size_t parts_;
  std::vector<Check> active_;  // and those without rows that do not take part
  std::vector<bool> rows_;
  std::vector<Sums> sums_;
};

}  // namespace jaxcoded
