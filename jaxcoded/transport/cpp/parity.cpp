#include "parity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace jaxcoded {
namespace {

using Vector = std::vector<double>;

// Of a unit vector, what is left of it if it is a combination of others.
constexpr double nothing = 1e-9;

// Elements at a time, so that sums stay in the first cache.
constexpr std::size_t block = 256;

double product(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// What is left of a vector without its share in these orthonormal ones.
Vector rest(Vector v, const std::vector<Vector>& basis) {
  for (int pass = 0; pass < 2; ++pass) {  // the first one leaves its own rounding
    for (const Vector& b : basis) {
      const double share = product(v, b);
      for (std::size_t i = 0; i < v.size(); ++i) v[i] -= share * b[i];
    }
  }
  return v;
}

void normalize(Vector& v) {
  const double norm = std::sqrt(product(v, v));
  if (norm > 0) {
    for (double& x : v) x /= norm;
  }
}

// An orthonormal basis of what is orthogonal to all of these vectors.
std::vector<Vector> complement(std::size_t dimension, const std::vector<Vector>& vectors) {
  std::vector<Vector> known;
  const auto add = [&](Vector v) {
    normalize(v);
    Vector left = rest(std::move(v), known);
    if (product(left, left) <= nothing * nothing) return;
    normalize(left);
    known.push_back(std::move(left));
  };
  for (const Vector& v : vectors) add(v);
  const std::size_t given = known.size();
  while (known.size() < dimension) {
    Vector best;
    for (std::size_t i = 0; i < dimension; ++i) {  // the most that is left of a unit vector
      Vector unit(dimension);
      unit[i] = 1;
      unit = rest(std::move(unit), known);
      if (best.empty() || product(unit, unit) > product(best, best)) best = std::move(unit);
    }
    normalize(best);
    known.push_back(rest(std::move(best), known));
    normalize(known.back());
  }
  return {known.begin() + static_cast<std::ptrdiff_t>(given), known.end()};
}

// Combinations of checks in which these rows do not occur.
template <class Rows>
std::vector<Vector> combinations(const std::vector<Parity::Check>& checks, const Rows& rows) {
  std::vector<Vector> columns;
  for (const std::size_t row : rows) {
    Vector column;
    for (const Parity::Check& check : checks) column.push_back(check[row]);
    columns.push_back(std::move(column));
  }
  return complement(checks.size(), columns);
}

Parity::Check combined(const Vector& combination, const std::vector<Parity::Check>& checks) {
  Parity::Check out(checks.empty() ? 0 : checks.front().size());
  for (std::size_t c = 0; c < checks.size(); ++c) {
    for (std::size_t row = 0; row < out.size(); ++row) out[row] += combination[c] * checks[c][row];
  }
  return out;
}

// What a sum may be off, as a share of what is added. Ranks that hold the same examples compute
// their gradients in other orders and batches, and lose as many digits as gradients of examples
// cancel. In float32 that was 2e-6 at most in trainings that were looked at, and some 1e-3 where
// matrices are multiplied in fewer bits, as GPUs do; what a plan's amplification may make of it is
// 1e-3 as well. Types of 16 bits were off by one eps. Mistakes are off by 0.01 and mostly more.
double allowed(DType dtype) {
  constexpr double computed = 0x1p-8;
  constexpr double roundings = 8;
  switch (dtype) {
    case DType::float16:
      return computed + roundings * 0x1p-10;
    case DType::bfloat16:
      return computed + roundings * 0x1p-7;
    default:
      return computed;
  }
}

}  // namespace

Parity::Parity(std::vector<Check> checks, std::size_t parts)
    : checks_(std::move(checks)), parts_(parts) {}

void Parity::begin(const std::vector<bool>& rows, std::vector<DType> vectors) {
  if (rows != rows_) {
    rows_ = rows;
    std::vector<std::size_t> absent;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (!rows[row]) absent.push_back(row);
    }
    active_.clear();
    for (const Vector& combination : combinations(checks_, absent)) {
      active_.push_back(combined(combination, checks_));
      for (const std::size_t row : absent) active_.back()[row] = 0;
    }
  }
  sums_.clear();
  for (const DType dtype : vectors) {
    sums_.push_back({dtype, Vector(rows.size()), std::vector<Check>(active_.size(), Check(active_.size()))});
  }
}

void Parity::add(std::size_t vector, std::span<const std::byte* const> messages, std::size_t count) {
  Sums& sums = sums_[vector];
  if (active_.empty() || sums.dtype == DType::bytes) return;
  const std::size_t size = size_of(sums.dtype);
  std::vector<double> wide(rows_.size() * block), checked(active_.size() * block);
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t n = std::min(block, count - first);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (!rows_[row]) continue;
      double* const values = &wide[row * block];
      widen(sums.dtype, values, messages[row] + first * size, n);
      sums.squares[row] += std::inner_product(values, values + n, values, 0.0);
    }
    std::ranges::fill(checked, 0.0);
    for (std::size_t c = 0; c < active_.size(); ++c) {
      double* const sum = &checked[c * block];
      for (std::size_t row = 0; row < rows_.size(); ++row) {
        const double h = active_[c][row];
        if (h == 0) continue;
        const double* const values = &wide[row * block];
        for (std::size_t i = 0; i < n; ++i) sum[i] += h * values[i];
      }
      for (std::size_t d = 0; d <= c; ++d) {
        const double more = std::inner_product(sum, sum + n, &checked[d * block], 0.0);
        sums.products[c][d] += more;
        if (d != c) sums.products[d][c] += more;
      }
    }
  }
}

std::size_t Parity::children() const { return rows_.size() / parts_; }

// Combinations of the active checks that have nothing to do with a child.
std::vector<Vector> Parity::without(std::size_t child) const {
  std::vector<std::size_t> rows(parts_);
  std::iota(rows.begin(), rows.end(), child * parts_);
  return combinations(active_, rows);
}

// The norm of the sum that should be 0, as a share of the norm of what is added.
double Parity::mismatch(const Check& combination, const Sums& sums) const {
  const Check check = combined(combination, active_);
  double added = 0;
  for (std::size_t row = 0; row < check.size(); ++row) {
    added += check[row] * check[row] * sums.squares[row];
  }
  double found = 0;
  for (std::size_t c = 0; c < active_.size(); ++c) {
    found += combination[c] * product(combination, sums.products[c]);
  }
  return added > 0 ? std::sqrt(std::max(found, 0.0) / added) : 0;
}

bool Parity::holds(const Check& combination) const {
  return std::ranges::all_of(sums_, [&](const Sums& sums) {
    return mismatch(combination, sums) <= allowed(sums.dtype);
  });
}

std::optional<Contradiction> Parity::contradiction() const {
  Contradiction out;
  std::vector<bool> concerned(children());
  for (const Sums& sums : sums_) {
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (std::isfinite(sums.squares[row])) continue;
      out.finite = false;
      concerned[row / parts_] = true;
    }
  }
  double worst = 0;
  for (std::size_t c = 0; out.finite && c < active_.size(); ++c) {
    Check unit(active_.size());
    unit[c] = 1;
    if (holds(unit)) continue;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (active_[c][row] != 0) concerned[row / parts_] = true;
    }
    for (const Sums& sums : sums_) {
      const double found = mismatch(unit, sums);
      if (found / allowed(sums.dtype) <= worst) continue;
      worst = found / allowed(sums.dtype);
      out.mismatch = found;
      out.allowed = allowed(sums.dtype);
    }
  }
  std::vector<std::size_t> alone;
  for (std::size_t child = 0; child < children(); ++child) {
    if (!concerned[child]) continue;
    out.children.push_back(child);
    if (!out.finite) continue;
    const std::vector<Vector> others = without(child);
    if (std::ranges::all_of(others, [&](const Check& it) { return holds(it); })) {
      alone.push_back(child);
    }
  }
  if (out.children.empty()) return std::nullopt;
  out.each = !alone.empty();
  if (out.each) out.children = std::move(alone);
  return out;
}

}  // namespace jaxcoded
