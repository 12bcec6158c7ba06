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

// What a sum may be off, as a share of what is added to it. Ranks that hold the same examples compute
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

// And as a share of all that travels with it: gradients that vanish, as where a model fits its data,
// are differences of numbers that do not. In 16 bits they are rounded once more, each by a share of
// itself.
double noise(DType dtype) {
  constexpr double roundings = 8;
  return roundings * (dtype == DType::float64 ? 0x1p-52 : 0x1p-23);
}

}  // namespace

Parity::Parity(std::vector<Check> checks, std::size_t parts)
    : checks_(std::move(checks)), parts_(parts) {}

// Where elements of that kind are summed.
std::size_t Parity::sums_of(std::size_t vector, int kind) {
  std::size_t s = 0;
  while (s < sums_.size() && (sums_[s].vector != vector || sums_[s].kind != kind)) ++s;
  if (s == sums_.size()) {
    sums_.push_back({sums_[vector].dtype, vector, kind, Vector(rows_.size()),
                     std::vector<Check>(active_.size(), Check(active_.size()))});
  }
  return s;
}

void Parity::begin(std::uint64_t call, const std::vector<bool>& rows,
                   std::span<const Segment> vectors, const std::vector<Apart>& apart) {
  call_ = call;
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
  for (std::size_t v = 0; v < vectors.size(); ++v) {
    sums_.push_back({vectors[v].dtype, v, -1, Vector(rows.size()),
                     std::vector<Check>(active_.size(), Check(active_.size()))});
  }
  runs_.assign(vectors.size(), {});
  for (const Apart& it : apart) {
    const std::uint64_t size = vectors[it.vector].count;
    if (!size) continue;
    const std::uint64_t first = it.first % size;  // slices lie upon each other
    runs_[it.vector].push_back({first, std::min(first + it.count, size), sums_of(it.vector, it.kind)});
  }
  for (std::vector<Run>& runs : runs_) std::ranges::sort(runs, {}, &Run::first);
}

void Parity::add(std::size_t vector, std::uint64_t first,
                 std::span<const std::byte* const> messages, std::size_t count) {
  if (active_.empty() || sums_[vector].dtype == DType::bytes) return;
  const std::uint64_t end = first + count;
  std::uint64_t next = first;
  const auto add_to = [&](std::size_t sums, std::uint64_t until) {
    if (until <= next) return;
    add_run(sums_[sums], messages, next - first, until - next);
    next = until;
  };
  for (const Run& run : runs_[vector]) {
    if (run.first >= end) break;
    add_to(vector, run.first);
    add_to(run.sums, std::min(run.end, end));
  }
  add_to(vector, end);
}

// So many elements of these messages, `from` their beginning on.
void Parity::add_run(Sums& sums, std::span<const std::byte* const> messages, std::uint64_t from,
                     std::size_t count) {
  const std::size_t size = size_of(sums.dtype);
  std::vector<double> wide(rows_.size() * block), checked(active_.size() * block);
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t n = std::min(block, count - first);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (!rows_[row]) continue;
      double* const values = &wide[row * block];
      widen(sums.dtype, values, messages[row] + (from + first) * size, n);
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

// All is added: what of the messages is there in all, and which sums are compared.
void Parity::settle() {
  Vector all(rows_.size());
  for (const Sums& sums : sums_) {
    for (std::size_t row = 0; row < all.size(); ++row) all[row] += sums.squares[row];
  }
  if (largest_.size() >= most_calls && !largest_.contains(call_)) largest_.clear();
  Vector& largest = largest_[call_];
  largest.resize(all.size());
  for (std::size_t row = 0; row < all.size(); ++row) {
    if (std::isfinite(all[row])) largest[row] = std::max(largest[row], all[row]);
  }
  for (Sums& sums : sums_) {
    if (sums.kind != 0) continue;
    const Sums& rest = sums_[sums.vector];
    for (std::size_t row = 0; row < rows_.size(); ++row) sums.squares[row] += rest.squares[row];
    for (std::size_t c = 0; c < active_.size(); ++c) {
      for (std::size_t d = 0; d < active_.size(); ++d) sums.products[c][d] += rest.products[c][d];
    }
  }
}

Parity::Mismatch Parity::mismatch(const Check& combination, const Sums& sums) const {
  const Check check = combined(combination, active_);
  const Vector& largest = largest_.at(call_);
  double added = 0, all = 0;
  for (std::size_t row = 0; row < check.size(); ++row) {
    added += check[row] * check[row] * sums.squares[row];
    all += check[row] * check[row] * largest[row];
  }
  double found = 0;
  for (std::size_t c = 0; c < active_.size(); ++c) {
    found += combination[c] * product(combination, sums.products[c]);
  }
  if (added <= 0) return {};
  return {std::sqrt(std::max(found, 0.0) / added),
          allowed(sums.dtype) + noise(sums.dtype) * std::sqrt(all / added)};
}

bool Parity::holds(const Check& combination) const {
  return std::ranges::all_of(sums_, [&](const Sums& sums) {
    const Mismatch found = mismatch(combination, sums);
    return found.share <= found.allowed;
  });
}

std::optional<Contradiction> Parity::contradiction() {
  settle();
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
      const Mismatch found = mismatch(unit, sums);
      if (found.share <= worst * found.allowed) continue;
      worst = found.share / found.allowed;
      out.mismatch = found.share;
      out.allowed = found.allowed;
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
