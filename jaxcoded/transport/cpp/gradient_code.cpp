#include "gradient_code.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

// A·B may miss the target by so much where it is exact. More than in codes/_blocks.py: what that
// takes for decodable must be so here, where ill-conditioned systems come out with other roundings.
constexpr double exact_within = 1e-5;
// Numbers as near to whole ones as this are taken for them, if that is exact.
constexpr double whole_within = 1e-9;

}  // namespace

GradientCode::GradientCode(CodeTensor tensor) : tensor_(std::move(tensor)), held_(tensor_.rows) {
  const std::size_t width = tensor_.partitions * tensor_.slices;
  std::map<std::vector<double>, std::size_t> known;
  for (std::size_t row = 0; row < tensor_.rows; ++row) {
    const double* values = tensor_.row(row);
    const auto [its, added] =
        known.try_emplace(std::vector<double>(values, values + width), first_.size());
    classes_.push_back(its->second);
    for (std::size_t i = 0; i < width; ++i) {
      const std::size_t partition = i / tensor_.slices;
      const bool last = !held_[row].empty() && held_[row].back() == partition;
      if (values[i] != 0 && !last) held_[row].push_back(partition);
    }
    if (!added) continue;
    first_.push_back(row);
    double largest = 0;
    for (std::size_t i = 0; i < width; ++i) largest = std::max(largest, std::abs(values[i]));
    int exponent = 0;
    std::frexp(largest, &exponent);
    units_.push_back(std::ldexp(1.0, exponent - 1));
  }
  find_blocks();
}

void GradientCode::find_blocks() {
  std::vector<std::vector<std::size_t>> holders(tensor_.partitions);  // classes
  for (std::size_t number = 0; number < first_.size(); ++number) {
    for (std::size_t partition : held_[first_[number]]) holders[partition].push_back(number);
  }
  complete_ = std::ranges::none_of(holders, [](const auto& some) { return some.empty(); });
  std::vector<bool> seen(first_.size());
  std::vector<bool> reached(tensor_.partitions);
  for (std::size_t begin = 0; begin < first_.size(); ++begin) {
    if (seen[begin] || held_[first_[begin]].empty()) continue;
    std::vector<std::size_t> classes{begin};
    std::vector<std::size_t> partitions;
    seen[begin] = true;
    for (std::size_t i = 0; i < classes.size(); ++i) {  // grows while it is walked
      for (std::size_t partition : held_[first_[classes[i]]]) {
        if (reached[partition]) continue;
        reached[partition] = true;
        partitions.push_back(partition);
        for (std::size_t other : holders[partition]) {
          if (!seen[other]) classes.push_back(other);
          seen[other] = true;
        }
      }
    }
    std::ranges::sort(classes);
    std::ranges::sort(partitions);
    blocks_.push_back(block(std::move(classes), partitions));
  }
}

GradientCode::Block GradientCode::block(std::vector<std::size_t> classes,
                                        const std::vector<std::size_t>& partitions) const {
  const std::size_t m = tensor_.slices;
  Block out;
  out.equations = Matrix(partitions.size() * m, classes.size());
  out.target = Matrix(partitions.size() * m, m);
  for (std::size_t p = 0; p < partitions.size(); ++p) {
    for (std::size_t v = 0; v < m; ++v) {
      double* equation = out.equations[p * m + v];
      for (std::size_t c = 0; c < classes.size(); ++c) {
        equation[c] = tensor_.row(first_[classes[c]])[partitions[p] * m + v] / units_[classes[c]];
      }
      out.target[p * m + v][v] = 1;
    }
  }
  for (std::size_t its : classes) out.units.push_back(units_[its]);
  out.classes = std::move(classes);
  const Factored factored(out.equations);
  out.everything = out.in_whole_numbers(factored.solve(out.target));
  out.surplus = factored.null_space();
  return out;
}

bool GradientCode::Block::solves(const Matrix& solution) const {
  const Matrix found = equations * solution;
  for (std::size_t i = 0; i < found.values.size(); ++i) {
    if (!(std::abs(found.values[i] - target.values[i]) <= exact_within)) return false;
  }
  return true;
}

// So that repetition codes decode by 0 and 1 exactly.
Matrix GradientCode::Block::in_whole_numbers(Matrix solution) const {
  Matrix whole = solution;
  for (std::size_t c = 0; c < whole.rows; ++c) {
    for (std::size_t u = 0; u < whole.columns; ++u) {
      const double coefficient = whole[c][u] / units[c];
      const double near = std::rint(coefficient);
      if (std::abs(coefficient - near) > whole_within) return solution;
      whole[c][u] = near * units[c];
    }
  }
  return (equations * whole).values == target.values ? whole : solution;
}

// Empty if there is no exact solution without these.
Matrix GradientCode::Block::exact(const std::vector<std::size_t>& missing) const {
  Matrix solution = everything;
  if (!missing.empty()) {
    Matrix lacking = everything.taken(missing);
    for (double& value : lacking.values) value = -value;
    // rows of an orthonormal basis: lengths are small against 1, not against the longest one,
    // which may be rounding
    const Matrix change = surplus * Factored(surplus.taken(missing), 1.0).solve(std::move(lacking));
    for (std::size_t i = 0; i < solution.values.size(); ++i) solution.values[i] += change.values[i];
    for (std::size_t c : missing) std::fill_n(solution[c], solution.columns, 0.0);
    solution = in_whole_numbers(std::move(solution));
  }
  return solves(solution) ? solution : Matrix();
}

Matrix GradientCode::Block::best(const std::vector<std::size_t>& heard) const {
  const Matrix solution =
      Factored(equations.transposed().taken(heard).transposed()).solve(target);
  Matrix out(classes.size(), target.columns);
  for (std::size_t i = 0; i < heard.size(); ++i) {
    std::copy_n(solution[i], solution.columns, out[heard[i]]);
  }
  return out;
}

Matrix GradientCode::exact(const std::vector<bool>& answered) const {
  return complete_ ? coefficients(answered, false) : Matrix();
}

bool GradientCode::sufficient(const std::vector<bool>& answered) const {
  if (tensor_.decoding == CodeTensor::Decoding::exact) return exact(answered).rows != 0;
  std::size_t complete = 0;
  for (std::size_t child = 0; child < tensor_.children(); ++child) {
    const auto first = answered.begin() + static_cast<std::ptrdiff_t>(child * tensor_.parts);
    const auto last = first + static_cast<std::ptrdiff_t>(tensor_.parts);
    complete += std::find(first, last, false) == last;
  }
  return complete >= tensor_.children() - tensor_.stragglers;
}

Matrix GradientCode::best(const std::vector<bool>& answered) const {
  if (tensor_.decoding != CodeTensor::Decoding::one_step) return coefficients(answered, true);
  // the same for all that came, such that those of the partitions are 1 on average
  const double sum = std::accumulate(tensor_.values.begin(), tensor_.values.end(), 0.0);
  const auto came = static_cast<double>(std::ranges::count(answered, true));
  Matrix out(1, tensor_.rows);
  for (std::size_t row = 0; row < tensor_.rows; ++row) {
    if (!answered[row]) continue;
    out[0][row] = static_cast<double>(tensor_.partitions) /
                  (sum / static_cast<double>(tensor_.rows) * came);
  }
  return out;
}

Matrix GradientCode::coefficients(const std::vector<bool>& answered, bool approximate) const {
  std::vector<std::size_t> used(first_.size(), tensor_.rows);  // row of each class, if any
  for (std::size_t row = tensor_.rows; row-- > 0;) {
    if (answered[row]) used[classes_[row]] = row;
  }
  Matrix out(tensor_.slices, tensor_.rows);
  for (const Block& block : blocks_) {
    std::vector<std::size_t> heard, missing;
    for (std::size_t c = 0; c < block.classes.size(); ++c) {
      (used[block.classes[c]] < tensor_.rows ? heard : missing).push_back(c);
    }
    Matrix solution = block.exact(missing);
    if (solution.values.empty()) {
      if (!approximate) return {};
      solution = block.best(heard);
    }
    for (std::size_t c : heard) {
      for (std::size_t u = 0; u < tensor_.slices; ++u) {
        out[u][used[block.classes[c]]] = solution[c][u] / units_[block.classes[c]];
      }
    }
  }
  return out;
}

}  // namespace jaxcoded
