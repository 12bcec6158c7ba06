// Linear systems of a few hundred unknowns, solved by orthogonal transformations.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace jaxcoded {

struct Matrix {
  Matrix() = default;
  Matrix(std::size_t r, std::size_t c) : rows(r), columns(c), values(r * c) {}

  double* operator[](std::size_t row) { return values.data() + row * columns; }
  const double* operator[](std::size_t row) const { return values.data() + row * columns; }
  Matrix transposed() const;
  Matrix taken(std::span<const std::size_t> which) const;  // the rows `which`

  std::size_t rows = 0, columns = 0;
  std::vector<double> values;  // row by row
};

Matrix operator*(const Matrix& a, const Matrix& b);

// A matrix that Householder reflections have made upper triangular.
class Triangular {
 public:
  // With `zero`, columns are exchanged so that the longest remaining column comes next, until no remaining
  // column is longer than `zero`.
  explicit Triangular(Matrix a, std::optional<double> zero = {});

  std::size_t rank() const { return scales_.size(); }
  double operator()(std::size_t row, std::size_t column) const { return a_[row][column]; }
  const std::vector<std::size_t>& order() const { return order_; }  // of the columns
  void rotate(Matrix& b) const;  // Qᵀ b
  void rotate_back(Matrix& b) const;  // Q b

 private:
  Matrix a_;  // R, and below it the reflections' directions
  std::vector<double> scales_;
  std::vector<std::size_t> order_;
};

// A matrix of any shape and rank, factored for its least-norm least-squares solutions: the complete orthogonal
// factorization (Golub and Van Loan, Matrix Computations, 5.4.7 and 5.5.2). A column counts as dependent on
// others if its remainder is short compared with `size`, by default the length of the longest column.
class Factored {
 public:
  explicit Factored(Matrix a, std::optional<double> size = {});

  // Return the x (columns × n) with the least ‖x‖ among all x with the least ‖a·x − b‖.
  Matrix solve(Matrix b) const;
  // Return an orthonormal basis of all x with a·x = 0, as columns.
  Matrix null_space() const;

 private:
  Matrix in_place(const Matrix& x) const;

  std::size_t columns_;
  Triangular left_;   // of the columns of `a`
  Triangular right_;  // of the remaining part of the rows of `a`
};

}  // namespace jaxcoded
