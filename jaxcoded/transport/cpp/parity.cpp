#include "parity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

using Vector = std::vector<double>;

// A unit vector whose remainder is shorter than this is a combination of others: the remainder is rounding.
constexpr double nothing = 1e-9;

// Elements that are added at a time, so that sums stay in the first cache; a multiple of `lanes`.
constexpr std::size_t block = 256;
// How many sums are formed side by side, so that the compiler vectorizes them.
constexpr std::size_t lanes = 8;

double product(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Return a vector minus its projection on the space of these orthonormal vectors.
Vector rest(Vector v, const std::vector<Vector>& basis) {
  for (int pass = 0; pass < 2; ++pass) {  // the first pass leaves its own rounding
    for (const Vector& b : basis) {
      const double share = product(v, b);
      for (std::size_t i = 0; i < v.size(); ++i) v[i] -= share * b[i];
    }
  }
  return v;
}

double norm(const Vector& v) { return std::sqrt(product(v, v)); }

void normalize(Vector& v) {
  const double size = norm(v);
  if (size > 0) {
    for (double& x : v) x /= size;
  }
}

// Return an orthonormal basis of the space orthogonal to all of these vectors.
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
    for (std::size_t i = 0; i < dimension; ++i) {  // the unit vector with the longest remainder
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

// Return combinations of checks that do not use these rows.
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

// Return the rounding on the way to this parent, relative to the largest number. A message of 16 bits is
// rounded when it is made. Sums, in at least float32, are rounded in every layer.
double carried(DType dtype, const Below& below) {
  const double sums = below.layers * (below.widest + 3);
  switch (dtype) {
    case DType::float16:
      return 0x1p-11 + sums * 0x1p-24;
    case DType::bfloat16:
      return 0x1p-8 + sums * 0x1p-24;
    case DType::float64:
      return (1 + sums) * 0x1p-53;
    default:
      return (1 + sums) * 0x1p-24;
  }
}

// Return the rounding relative to all numbers of the message. Gradients near 0, as when a model fits its data,
// are differences of larger numbers. So are messages of 16 bits, which were rounded in the layers below.
double noise(DType dtype, const Below& below) {
  switch (dtype) {
    case DType::float16:
      return of_all + below.layers * 0x1p-11;
    case DType::bfloat16:
      return of_all + below.layers * 0x1p-8;
    case DType::float64:
      return 8 * 0x1p-52;
    default:
      return of_all;
  }
}

double eps(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 0x1p-10;
    case DType::bfloat16:
      return 0x1p-7;
    case DType::float64:
      return 0x1p-52;
    default:
      return 0x1p-23;
  }
}

}  // namespace

// Ranks that hold the same examples compute gradients in different orders and batches. The more the examples'
// gradients cancel, the more digits they lose. In float32 the error was at most 2e-6 in the training runs
// examined, and some 1e-3 if matrices are multiplied in fewer bits, as on GPUs. Types of 16 bits, in which
// numbers are rounded from layer to layer of the model, were off by one eps. Mistakes are off by at least 0.01.
double of_programs(double eps) {
  constexpr double all = 0x1p-8, narrow = 0x1p-12;
  return all + (eps > narrow ? roundings * eps : 0);
}

double near_zero(double eps) {
  if (eps == 0x1p-10) return 0x1p-25;  // in float16: half the distance between neighbouring numbers
  return eps > 0x1p-52 ? 0x1p-126 : 0x1p-1022;  // processors may round numbers below the smallest normal one to 0
}

void Parity::Size::add(const double* values, std::size_t count) {
  double sums[lanes] = {}, most[lanes] = {};
  for (std::size_t first = 0; first < count; first += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const double x = values[first + lane], size = std::abs(x);
      sums[lane] += x * x;
      most[lane] = size > most[lane] ? size : most[lane];
    }
  }
  for (const double sum : sums) squares += sum;
  for (const double size : most) largest = std::max(largest, size);
}

Parity::Size& Parity::Size::operator+=(const Size& other) {
  squares += other.squares;
  largest = std::max(largest, other.largest);
  return *this;
}

double Parity::in(Norm norm, const Size& size) {
  return norm == Norm::maximum ? size.largest : std::sqrt(size.squares);
}

Parity::Parity(std::vector<Check> checks, std::vector<double> sizes, std::vector<Below> below)
    : checks_(std::move(checks)), sizes_(std::move(sizes)), below_(std::move(below)) {}

// Return the index of the sums for elements of this kind in this vector.
std::size_t Parity::sums_of(std::size_t vector, int kind) {
  std::size_t s = 0;
  while (s < sums_.size() && (sums_[s].vector != vector || sums_[s].kind != kind)) ++s;
  if (s == sums_.size()) {
    sums_.push_back({.dtype = sums_[vector].dtype, .vector = vector, .kind = kind,
                     .rows = std::vector<Size>(rows_.size()), .checks = std::vector<Size>(active_.size())});
  }
  return s;
}

void Parity::begin(const std::vector<bool>& rows, std::span<const Segment> vectors,
                   const std::vector<Apart>& apart, double program_eps) {
  vectors_.clear();
  for (const Segment& vector : vectors) {
    vectors_.insert(vectors_.end(), {static_cast<std::uint64_t>(vector.dtype), vector.count});
  }
  program_eps_ = program_eps;
  if (rows != rows_) {
    rows_.clear();  // if the rest runs out of memory, the next call forms the checks
    std::vector<std::size_t> absent;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (!rows[row]) absent.push_back(row);
    }
    active_.clear();
    for (const Vector& combination : combinations(checks_, absent)) {
      Check& check = active_.emplace_back(combined(combination, checks_));
      for (const std::size_t row : absent) check[row] = 0;
      // a check must not contain a message that does not belong to it, not even with a tiny factor
      for (double& h : check) h = std::abs(h) < nothing * norm(check) ? 0 : h;
    }
    rows_ = rows;
  }
  finite_.assign(rows.size(), true);
  sums_.clear();
  for (std::size_t v = 0; v < vectors.size(); ++v) {
    sums_.push_back({.dtype = vectors[v].dtype, .vector = v, .kind = -1,
                     .rows = std::vector<Size>(rows.size()), .checks = std::vector<Size>(active_.size())});
  }
  runs_.assign(vectors.size(), {});
  for (const Apart& part : apart) {
    const std::uint64_t size = vectors[part.vector].count;
    if (!size) continue;
    const std::uint64_t first = part.first % size;  // in a message with slices, all slices have the same places
    runs_[part.vector].push_back({first, std::min(first + part.count, size), sums_of(part.vector, part.kind)});
  }
  for (std::vector<Run>& runs : runs_) std::ranges::sort(runs, {}, &Run::first);
}

void Parity::add(std::size_t vector, std::uint64_t first,
                 std::span<const std::byte* const> messages, std::size_t count) {
  if (sums_[vector].dtype == DType::bytes) return;
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

// Add `count` elements of these messages, from element `from` on.
void Parity::add_run(Sums& sums, std::span<const std::byte* const> messages, std::uint64_t from,
                     std::size_t count) {
  sums.count += static_cast<double>(count);
  const std::size_t size = size_of(sums.dtype);
  std::vector<double> wide(rows_.size() * block), checked(block);
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t n = std::min(block, count - first);
    const std::size_t padded = (n + lanes - 1) / lanes * lanes;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (!rows_[row]) continue;
      double* const values = &wide[row * block];
      widen(sums.dtype, values, messages[row] + (from + first) * size, n);
      std::fill(values + n, values + padded, 0.0);
      Size row_size;
      row_size.add(values, padded);
      sums.rows[row] += row_size;
      if (!std::isfinite(row_size.squares)) {  // the squares may also be too large for a double, which does no harm
        const auto number = [](double x) { return std::isfinite(x); };
        finite_[row] = finite_[row] && std::all_of(values, values + n, number);
      }
    }
    for (std::size_t c = 0; c < active_.size(); ++c) {
      std::fill_n(checked.begin(), padded, 0.0);
      for (std::size_t row = 0; row < rows_.size(); ++row) {
        const double h = active_[c][row];
        if (h == 0) continue;
        const double* const values = &wide[row * block];
        for (std::size_t i = 0; i < padded; ++i) checked[i] += h * values[i];
      }
      sums.checks[c].add(checked.data(), padded);
    }
  }
}

std::vector<std::size_t> Parity::not_finite() const {
  std::vector<std::size_t> out;
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    const std::size_t child = row / parts();
    if (!finite_[row] && (out.empty() || out.back() != child)) out.push_back(child);
  }
  return out;
}

// After everything was added, sum up the sizes of each message over all vectors, for `scale`. Add numbers of
// kind 0 to the rest of their vector, see `Apart`.
void Parity::add_up() {
  all_.assign(rows_.size(), {});
  for (const Sums& sums : sums_) {
    for (std::size_t row = 0; row < all_.size(); ++row) all_[row] += sums.rows[row];
  }
  for (Sums& sums : sums_) {
    if (sums.kind != 0) continue;
    const Sums& rest = sums_[sums.vector];
    sums.count += rest.count;
    for (std::size_t row = 0; row < rows_.size(); ++row) sums.rows[row] += rest.rows[row];
    for (std::size_t c = 0; c < active_.size(); ++c) sums.checks[c] += rest.checks[c];
  }
}

// Return the size of the gradients in these messages, estimated from the child with the second largest size,
// since a single child may be off by any amount.
double Parity::scale(const Check& check, const std::vector<Size>& rows, Norm norm) const {
  double first = 0, second = 0;
  std::size_t concerned = 0;
  for (std::size_t child = 0; child < below_.size(); ++child) {
    double size = 0;
    bool has = false;
    for (std::size_t row = child * parts(); row < (child + 1) * parts(); ++row) {
      if (check[row] == 0) continue;
      has = true;
      if (sizes_[row] > 0) size = std::max(size, in(norm, rows[row]) / sizes_[row]);
    }
    concerned += has;
    second = std::max(second, std::min(first, size));
    first = std::max(first, size);
  }
  return concerned > 1 ? second : first;
}

// Return how large rounding can make a sum that should be 0.
double Parity::bound(const Check& check, const Sums& sums, Norm norm) const {
  const double in_sum = scale(check, sums.rows, norm);
  double everywhere = scale(check, all_, norm);
  if (const auto before = remembered_.find(vectors_); before != remembered_.end()) {
    everywhere = std::max(everywhere, before->second[static_cast<std::size_t>(norm)]);
  }
  double tiny = std::max(near_zero(eps(sums.dtype)), near_zero(program_eps_));
  if (norm == Norm::euclidean) tiny *= std::sqrt(sums.count);
  double out = 0;
  for (std::size_t row = 0; row < check.size(); ++row) {
    const Below& below = below_[row / parts()];
    out += std::abs(check[row]) * (roundings + 1) * below.absolute_amplification * tiny;
    const double share =
        of_programs(std::max(eps(sums.dtype), program_eps_)) + carried(sums.dtype, below);
    const double factor = std::abs(check[row]) * sizes_[row] * below.amplification;
    if (factor > 0) out += factor * (share * in_sum + noise(sums.dtype, below) * everywhere);  // may be infinite
  }
  return out;
}

std::optional<Contradiction> Parity::contradiction() {
  add_up();
  Contradiction out;
  std::vector<bool> concerned(below_.size());
  double worst = 0;
  for (std::size_t c = 0; c < active_.size(); ++c) {
    const Check& check = active_[c];
    for (const Sums& sums : sums_) {
      for (const Norm norm : norms) {
        const double mismatch = in(norm, sums.checks[c]), allowed = bound(check, sums, norm);
        if (mismatch <= allowed) continue;  // false for NaN
        double added = 0;
        for (std::size_t row = 0; row < check.size(); ++row) {
          if (check[row] != 0) added += std::abs(check[row]) * in(norm, sums.rows[row]);
        }
        if (!std::isfinite(added)) continue;  // if squares are too large for a double, the other norm decides
        for (std::size_t row = 0; row < check.size(); ++row) {
          if (check[row] != 0) concerned[row / parts()] = true;
        }
        const double excess =
            allowed > 0 ? mismatch / allowed : std::numeric_limits<double>::infinity();
        if (excess <= worst) continue;
        worst = excess;
        out.mismatch = mismatch / added;
        out.allowed = allowed / added;
      }
    }
  }
  for (std::size_t child = 0; child < concerned.size(); ++child) {
    if (concerned[child]) out.children.push_back(child);
  }
  if (out.children.empty()) return std::nullopt;
  return out;
}

void Parity::remember() {
  for (std::size_t row = 0; compares() && row < rows_.size(); ++row) {
    if (rows_[row]) wrong_.erase(row / parts());
  }
  if (remembered_.size() >= most_remembered && !remembered_.contains(vectors_)) remembered_.clear();
  for (const Check& check : active_) {
    for (const Norm norm : norms) {
      double& largest = remembered_[vectors_][static_cast<std::size_t>(norm)];
      const double size = scale(check, all_, norm);
      if (std::isfinite(size)) largest = std::max(largest, size);
    }
  }
}

bool Parity::newly_wrong(const std::vector<std::size_t>& children) {
  bool newly = false;
  for (const std::size_t child : children) newly |= wrong_.insert(child).second;
  return newly;
}

}  // namespace jaxcoded
