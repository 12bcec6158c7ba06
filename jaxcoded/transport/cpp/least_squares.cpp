#include "least_squares.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

// Lengths below this share of the length that they are compared with count as rounding.
constexpr double rounding = 1e-11;

double longest_column(const Matrix& a) {
  std::vector<double> squares(a.columns);
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < a.columns; ++j) squares[j] += a[i][j] * a[i][j];
  }
  double most = 0;
  for (double square : squares) most = std::max(most, square);
  return std::sqrt(most);
}

// b ← (1 − scale·v·vᵀ) b from column `first` on; v is column `c` of `a` from row `c` on, and begins
// with 1.
void reflect(const Matrix& a, std::size_t c, double scale, Matrix& b, std::size_t first) {
  std::vector<double> along(b.columns - first);
  for (std::size_t i = c; i < b.rows; ++i) {
    const double v = i == c ? 1 : a[i][c];
    const double* row = b[i] + first;
    for (std::size_t j = 0; j < along.size(); ++j) along[j] += v * row[j];
  }
  for (std::size_t i = c; i < b.rows; ++i) {
    const double v = (i == c ? 1 : a[i][c]) * scale;
    double* row = b[i] + first;
    for (std::size_t j = 0; j < along.size(); ++j) row[j] -= v * along[j];
  }
}

// Return the nonzero rows of R as columns.
Matrix upper_rows(const Triangular& triangular, std::size_t columns) {
  Matrix out(columns, triangular.rank());
  for (std::size_t i = 0; i < triangular.rank(); ++i) {
    for (std::size_t j = i; j < columns; ++j) out[j][i] = triangular(i, j);
  }
  return out;
}

}  // namespace

Matrix Matrix::transposed() const {
  Matrix out(columns, rows);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < columns; ++j) out[j][i] = (*this)[i][j];
  }
  return out;
}

Matrix Matrix::taken(std::span<const std::size_t> which) const {
  Matrix out(which.size(), columns);
  for (std::size_t i = 0; i < which.size(); ++i) {
    std::copy_n((*this)[which[i]], columns, out[i]);
  }
  return out;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.columns);
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t k = 0; k < a.columns; ++k) {
      const double scale = a[i][k];
      if (scale == 0) continue;
      for (std::size_t j = 0; j < b.columns; ++j) out[i][j] += scale * b[k][j];
    }
  }
  return out;
}

Triangular::Triangular(Matrix a, std::optional<double> zero)
    : a_(std::move(a)), order_(a_.columns) {
  std::iota(order_.begin(), order_.end(), 0);
  for (std::size_t c = 0; c < std::min(a_.rows, a_.columns); ++c) {
    if (zero) {
      std::vector<double> squares(a_.columns);
      for (std::size_t i = c; i < a_.rows; ++i) {
        for (std::size_t j = c; j < a_.columns; ++j) squares[j] += a_[i][j] * a_[i][j];
      }
      const auto next = static_cast<std::size_t>(
          std::max_element(squares.begin() + static_cast<std::ptrdiff_t>(c), squares.end()) -
          squares.begin());
      if (!(std::sqrt(squares[next]) > *zero)) break;
      std::swap(order_[c], order_[next]);
      for (std::size_t i = 0; i < a_.rows; ++i) std::swap(a_[i][c], a_[i][next]);
    }
    double square = 0;
    for (std::size_t i = c; i < a_.rows; ++i) square += a_[i][c] * a_[i][c];
    const double first = a_[c][c];
    const double end = std::copysign(std::sqrt(square), -first);
    scales_.push_back(end == 0 ? 0 : (end - first) / end);
    if (end == 0) continue;
    for (std::size_t i = c + 1; i < a_.rows; ++i) a_[i][c] /= first - end;
    a_[c][c] = end;
    reflect(a_, c, scales_.back(), a_, c + 1);
  }
}

void Triangular::rotate(Matrix& b) const {
  for (std::size_t c = 0; c < rank(); ++c) reflect(a_, c, scales_[c], b, 0);
}

void Triangular::rotate_back(Matrix& b) const {
  for (std::size_t c = rank(); c-- > 0;) reflect(a_, c, scales_[c], b, 0);
}

Factored::Factored(Matrix a, std::optional<double> size)
    : columns_(a.columns),
      left_(a, rounding * size.value_or(longest_column(a))),
      right_(upper_rows(left_, a.columns)) {}

Matrix Factored::solve(Matrix b) const {
  left_.rotate(b);
  // a = Q [Sᵀ 0] Zᵀ Pᵀ with the triangle S of `right_`: forward substitution
  Matrix x(columns_, b.columns);
  for (std::size_t i = 0; i < left_.rank(); ++i) {
    std::copy_n(b[i], b.columns, x[i]);
    for (std::size_t k = 0; k < i; ++k) {
      const double factor = right_(k, i);
      for (std::size_t j = 0; j < b.columns; ++j) x[i][j] -= factor * x[k][j];
    }
    for (std::size_t j = 0; j < b.columns; ++j) x[i][j] /= right_(i, i);
  }
  right_.rotate_back(x);
  return in_place(x);
}

Matrix Factored::null_space() const {
  const std::size_t rank = left_.rank();
  Matrix x(columns_, columns_ - rank);
  for (std::size_t j = 0; j < x.columns; ++j) x[rank + j][j] = 1;
  right_.rotate_back(x);
  return in_place(x);
}

// Move the rows of `x` to the original places of `a`'s columns.
Matrix Factored::in_place(const Matrix& x) const {
  Matrix out(x.rows, x.columns);
  for (std::size_t i = 0; i < x.rows; ++i) {
    std::copy_n(x[i], x.columns, out[left_.order()[i]]);
  }
  return out;
}

}  // namespace jaxcoded
