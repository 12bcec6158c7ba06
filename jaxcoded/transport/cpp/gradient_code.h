// A parent's code, and how the parent forms the sum from the messages that came.
// jaxcoded/codes/_gradient_code.py gives the same answers in NumPy. Here no thread waits for Python, and the
// bits do not depend on the machine's linear algebra.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "least_squares.h"

namespace jaxcoded {

// A code as `jaxcoded.GradientCode` describes it. A child's message may have several parts.
// Row `child * parts + part` belongs to one part of one child's message.
struct CodeTensor {
  enum class Decoding { exact, least_squares, one_step };

  std::size_t rows = 0, partitions = 0, slices = 1;
  std::vector<double> values = {};  // rows × partitions × slices
  std::size_t parts = 1;
  std::size_t stragglers = 0;  // how many children may be missing
  Decoding decoding = Decoding::exact;
  // The code promises that these messages suffice: the first `parts` parts of all children except any `late` of
  // them, and the first `first` parts of those late children.
  struct Promise {
    std::size_t late, parts, first;
  };
  std::vector<Promise> promises = {};  // `GradientCode` adds: all parts of all children but any `stragglers`
  // Messages suffice only if their amplification is at most this.
  double limit = std::numeric_limits<double>::infinity();

  const double* row(std::size_t row) const { return values.data() + row * partitions * slices; }
  std::size_t children() const { return rows / parts; }
};

class GradientCode {
 public:
  explicit GradientCode(CodeTensor tensor);

  const CodeTensor& tensor() const { return tensor_; }
  // The class of each row. Rows of one class are equal, so one of them suffices. Classes are in the order of
  // their first rows.
  const std::vector<std::size_t>& classes() const { return classes_; }
  std::size_t class_count() const { return first_.size(); }
  // The partitions in each row.
  const std::vector<std::vector<std::size_t>>& held() const { return held_; }

  // Return coefficients (slices × rows) with which these messages give the exact sum, with an amplification
  // within the limit; without values if there are none. Only the first message of each class is used.
  Matrix exact(const std::vector<bool>& answered) const;
  // Whether these messages suffice for a parent to continue.
  bool sufficient(const std::vector<bool>& answered) const;
  // Return the coefficients of the best sum that these messages allow.
  Matrix best(const std::vector<bool>& answered) const;

 private:
  // Classes that share partitions only with each other. Every exact solution is A = A₀ + Y·N, where N spans the
  // left null space. To leave out the columns E, solve only Y·N_E = −A₀_E, a system with as many unknowns as
  // there are surplus rows. All matrices are stored transposed.
  struct Block {
    std::vector<std::size_t> classes;
    std::vector<double> units;
    Matrix equations;   // Mᵀ: (partitions · slices) × classes
    Matrix target;      // the value that Mᵀ·Aᵀ must have
    Matrix everything;  // A₀ᵀ: classes × slices
    Matrix surplus;     // Nᵀ: classes × surplus

    Matrix magnitudes;  // partitions × classes
    double weight = 0;  // times a solution's length: a bound for its amplification

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
    double bound = 0;     // for the amplification by the coefficients
  };

  std::vector<bool> heard_classes(const std::vector<bool>& answered) const;
  std::optional<Solution> solved(const std::vector<bool>& heard) const;
  std::optional<std::vector<bool>> promised(const std::vector<bool>& heard) const;
  Matrix least_squares(const std::vector<bool>& answered) const;
  Matrix by_row(const Matrix& coefficients, const std::vector<bool>& answered) const;
  void find_blocks();
  Block block(std::vector<std::size_t> classes, const std::vector<std::size_t>& partitions) const;

  CodeTensor tensor_;
  std::vector<std::size_t> classes_;  // of each row
  std::vector<std::size_t> first_;    // the first row of each class
  std::vector<double> units_;         // for each class, the size of its messages: a power of 2
  std::vector<std::vector<std::size_t>> held_;
  std::vector<Block> blocks_;
  bool complete_ = true;  // each partition is in some row
};

}  // namespace jaxcoded
