// A parent's code, and how the sum is put together from the messages that came. What
// jaxcoded/codes/_gradient_code.py does in NumPy, with the same answers; here no thread waits for
// Python, and the bits do not depend on anybody's linear algebra.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "least_squares.h"

namespace jaxcoded {

// What `jaxcoded.GradientCode` says of a code. A row is a message of a child, which may have several
// parts: row `child * parts + part`.
struct CodeTensor {
  enum class Decoding { exact, least_squares, one_step };

  std::size_t rows = 0, partitions = 0, slices = 1;
  std::vector<double> values = {};  // rows × partitions × slices
  std::size_t parts = 1;
  std::size_t stragglers = 0;  // children
  Decoding decoding = Decoding::exact;
  // What suffices: the first `parts` parts of all children but any `late`, and the first `first` of
  // those.
  struct Promise {
    std::size_t late, parts, first;
  };
  std::vector<Promise> promises = {};  // besides all parts of all children but `stragglers`
  // What bounds the amplification of any set of messages that suffices.
  double limit = std::numeric_limits<double>::infinity();

  const double* row(std::size_t row) const { return values.data() + row * partitions * slices; }
  std::size_t children() const { return rows / parts; }
};

class GradientCode {
 public:
  explicit GradientCode(CodeTensor tensor);

  const CodeTensor& tensor() const { return tensor_; }
  // Rows of one class are equal, so that one of them will do. In the order of their first rows.
  const std::vector<std::size_t>& classes() const { return classes_; }
  std::size_t class_count() const { return first_.size(); }
  // The partitions in each row.
  const std::vector<std::vector<std::size_t>>& held() const { return held_; }

  // Coefficients (slices × rows) with which the messages give the exact sum, amplified within the
  // limit; without any values if they do not. Of a class the first that came is used.
  Matrix exact(const std::vector<bool>& answered) const;
  // Whether a parent goes on with them.
  bool sufficient(const std::vector<bool>& answered) const;
  // The best that can be made of them.
  Matrix best(const std::vector<bool>& answered) const;

 private:
  // Classes that have partitions in common with each other alone. Every exact solution is
  // A = A₀ + Y·N with the left null space N, so leaving out E asks only for Y·N_E = −A₀_E, a system
  // with as many unknowns as there are surplus rows. All of it is kept transposed.
  struct Block {
    std::vector<std::size_t> classes;
    std::vector<double> units;
    Matrix equations;   // Mᵀ: (partitions · slices) × classes
    Matrix target;      // what Mᵀ·Aᵀ must be
    Matrix everything;  // A₀ᵀ: classes × slices
    Matrix surplus;     // Nᵀ: classes × surplus

    Matrix magnitudes;  // partitions × classes
    double weight = 0;  // of a solution, for its bound

    std::vector<std::size_t> missing(const std::vector<bool>& heard) const;
    void put(const Matrix& solution, Matrix& all) const;
    bool solves(const Matrix& solution) const;
    double amplification(const Matrix& solution) const;
    double bound(const Matrix& solution) const;
    Matrix in_whole_numbers(Matrix solution) const;
    Matrix exact(const std::vector<std::size_t>& missing) const;
    Matrix best(const std::vector<std::size_t>& missing, double limit) const;
    Matrix damped(const std::vector<std::size_t>& missing, double damping) const;
  };
  struct Solution {
    Matrix coefficients;  // classes × slices
    double bound = 0;     // of what they amplify
  };

  std::vector<bool> heard_classes(const std::vector<bool>& answered) const;
  std::optional<Solution> solved(const std::vector<bool>& heard) const;
  std::optional<std::vector<bool>> promised(const std::vector<bool>& heard) const;
  Matrix least_squares(const std::vector<bool>& answered) const;
  Matrix by_row(const Matrix& coefficients, const std::vector<bool>& answered) const;
  void find_blocks();
  Block block(std::vector<std::size_t> classes, const std::vector<std::size_t>& partitions) const;

  CodeTensor tensor_;
  std::vector<std::size_t> classes_;  // by row
  std::vector<std::size_t> first_;    // by class
  std::vector<double> units_;         // by class: the size of its messages, a power of 2
  std::vector<std::vector<std::size_t>> held_;
  std::vector<Block> blocks_;
  bool complete_ = true;  // some row has each partition
};

}  // namespace jaxcoded
