#include "gradient_code.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace jaxcoded {
namespace {

// A·B may miss the target by this much and still count as exact. The bound is larger than in codes/_blocks.py:
// what is decodable there must be decodable here, although ill-conditioned systems are rounded differently.
constexpr double exact_within = 1e-5;
// Numbers this close to whole numbers are rounded to them, if the result is exact.
constexpr double whole_within = 1e-9;
// How many times to try half the damping.
constexpr int halvings = 40;

double length(const std::vector<double>& vector) {
  return std::sqrt(std::inner_product(vector.begin(), vector.end(), vector.begin(), 0.0));
}

}  // namespace

GradientCode::GradientCode(CodeTensor tensor) : tensor_(std::move(tensor)), held_(tensor_.rows) {
  tensor_.promises.push_back({tensor_.stragglers, tensor_.parts, 0});
  const std::size_t width = tensor_.partitions * tensor_.slices;
  std::map<std::vector<double>, std::size_t> known;
  for (std::size_t row = 0; row < tensor_.rows; ++row) {
    const double* values = tensor_.row(row);
    const auto [entry, added] =
        known.try_emplace(std::vector<double>(values, values + width), first_.size());
    classes_.push_back(entry->second);
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
  std::vector<std::vector<std::size_t>> holders(tensor_.partitions);  // the classes that hold each partition
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
    for (std::size_t i = 0; i < classes.size(); ++i) {  // `classes` grows in this loop
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
  out.magnitudes = Matrix(partitions.size(), classes.size());
  for (std::size_t p = 0; p < partitions.size(); ++p) {
    std::vector<double> magnitudes(classes.size());
    for (std::size_t v = 0; v < m; ++v) {
      double* equation = out.equations[p * m + v];
      for (std::size_t c = 0; c < classes.size(); ++c) {
        equation[c] = tensor_.row(first_[classes[c]])[partitions[p] * m + v] / units_[classes[c]];
        magnitudes[c] += std::abs(equation[c]);
      }
      out.target[p * m + v][v] = 1;
    }
    std::ranges::copy(magnitudes, out.magnitudes[p]);
    out.weight = std::max(out.weight, length(magnitudes));
  }
  for (std::size_t class_index : classes) out.units.push_back(units_[class_index]);
  out.classes = std::move(classes);
  const Factored factored(out.equations);
  out.everything = out.in_whole_numbers(factored.solve(out.target));
  out.surplus = factored.null_space();
  return out;
}

// Return the classes of the block from which no message came.
std::vector<std::size_t> GradientCode::Block::missing(const std::vector<bool>& heard) const {
  std::vector<std::size_t> out;
  for (std::size_t c = 0; c < classes.size(); ++c) {
    if (!heard[classes[c]]) out.push_back(c);
  }
  return out;
}

// Copy a solution to the rows of its classes in `all`.
void GradientCode::Block::put(const Matrix& solution, Matrix& all) const {
  for (std::size_t c = 0; c < classes.size(); ++c) {
    std::copy_n(solution[c], solution.columns, all[classes[c]]);
  }
}

bool GradientCode::Block::solves(const Matrix& solution) const {
  const Matrix product = equations * solution;
  for (std::size_t i = 0; i < product.values.size(); ++i) {
    if (!(std::abs(product.values[i] - target.values[i]) <= exact_within)) return false;
  }
  return true;
}

double GradientCode::Block::amplification(const Matrix& solution) const {
  Matrix absolute = solution;
  for (double& value : absolute.values) value = std::abs(value);
  const Matrix grown = magnitudes * absolute;
  return grown.values.empty() ? 0 : std::ranges::max(grown.values);
}

// Return a bound for the amplification by the solution (Cauchy-Schwarz). For solutions of least norm the bound
// never grows with more messages, while the amplification itself may.
double GradientCode::Block::bound(const Matrix& solution) const {
  double most = 0;
  for (std::size_t u = 0; u < solution.columns; ++u) {
    std::vector<double> slice(solution.rows);
    for (std::size_t c = 0; c < solution.rows; ++c) slice[c] = solution[c][u];
    most = std::max(most, length(slice));
  }
  return weight * most;
}

// Round to whole numbers if possible, so that repetition codes decode by exactly 0 and 1.
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

// Return the exact solution without these classes; empty if there is none.
Matrix GradientCode::Block::exact(const std::vector<std::size_t>& missing) const {
  Matrix solution = everything;
  if (!missing.empty()) {
    Matrix lacking = everything.taken(missing);
    for (double& value : lacking.values) value = -value;
    // The rows belong to an orthonormal basis, so lengths are compared with 1, not with the longest row. Even
    // the longest row may be only rounding.
    const Matrix change = surplus * Factored(surplus.taken(missing), 1.0).solve(std::move(lacking));
    for (std::size_t i = 0; i < solution.values.size(); ++i) solution.values[i] += change.values[i];
    for (std::size_t c : missing) std::fill_n(solution[c], solution.columns, 0.0);
    solution = in_whole_numbers(std::move(solution));
  }
  return solves(solution) ? solution : Matrix();
}

// Return the solution with the least residual or, if its amplification exceeds the limit, a solution near it.
Matrix GradientCode::Block::best(const std::vector<std::size_t>& missing, double limit) const {
  Matrix solution = exact(missing);
  if (solution.values.empty()) solution = damped(missing, 0);
  if (amplification(solution) <= limit) return solution;
  // This damping δ certainly suffices: no slice of the solution is longer than the target's slice divided by
  // 2δ.
  const auto ones = static_cast<double>(target.rows / target.columns);
  double damping = weight * std::sqrt(ones) / (2 * limit);
  solution = damped(missing, damping);
  for (int i = 0; i < halvings; ++i) {
    Matrix less = damped(missing, damping /= 2);
    if (amplification(less) > limit) break;
    solution = std::move(less);
  }
  return solution;
}

// Return the x, 0 at missing classes, with the least ‖equations·x − target‖² + δ²‖x‖², where δ is `damping`.
Matrix GradientCode::Block::damped(const std::vector<std::size_t>& missing, double damping) const {
  std::vector<std::size_t> heard(classes.size());
  std::iota(heard.begin(), heard.end(), 0);
  for (std::size_t c : missing) std::erase(heard, c);
  const Matrix system = equations.transposed().taken(heard).transposed();
  Matrix both(system.rows + (damping > 0 ? heard.size() : 0), heard.size());
  std::ranges::copy(system.values, both.values.begin());
  for (std::size_t row = system.rows; row < both.rows; ++row) both[row][row - system.rows] = damping;
  Matrix wanted(both.rows, target.columns);
  std::ranges::copy(target.values, wanted.values.begin());
  const Matrix solution = Factored(std::move(both)).solve(std::move(wanted));
  Matrix out(classes.size(), target.columns);
  for (std::size_t i = 0; i < heard.size(); ++i) {
    std::copy_n(solution[i], solution.columns, out[heard[i]]);
  }
  return out;
}

Matrix GradientCode::exact(const std::vector<bool>& answered) const {
  const std::vector<bool> heard = heard_classes(answered);
  std::optional<Solution> solution = solved(heard);
  if (solution && solution->bound > tensor_.limit) {
    const auto enough = promised(heard);
    if (enough != heard) solution = enough ? solved(*enough) : std::nullopt;
  }
  return solution ? by_row(solution->coefficients, answered) : Matrix();
}

std::vector<bool> GradientCode::heard_classes(const std::vector<bool>& answered) const {
  std::vector<bool> heard(first_.size());
  for (std::size_t row = 0; row < tensor_.rows; ++row) {
    if (answered[row]) heard[classes_[row]] = true;
  }
  return heard;
}

std::optional<GradientCode::Solution> GradientCode::solved(const std::vector<bool>& heard) const {
  if (!complete_) return {};
  Solution out{.coefficients = Matrix(first_.size(), tensor_.slices), .bound = 0};
  for (const Block& block : blocks_) {
    const Matrix solution = block.exact(block.missing(heard));
    if (solution.values.empty()) return {};
    out.bound = std::max(out.bound, block.bound(solution));
    block.put(solution, out.coefficients);
  }
  return out;
}

// Return the classes that a promise needs, of the first children that satisfy it; nothing if no promise holds.
std::optional<std::vector<bool>> GradientCode::promised(const std::vector<bool>& heard) const {
  const std::size_t parts = tensor_.parts, children = tensor_.children();
  std::vector<std::size_t> came(children);  // how many first parts of each child came
  for (std::size_t child = 0; child < children; ++child) {
    std::size_t& count = came[child];
    while (count < parts && heard[classes_[child * parts + count]]) ++count;
  }
  for (const auto& promise : tensor_.promises) {
    std::size_t others = children - promise.late;
    std::vector<bool> needed(heard.size());
    const bool holds = std::ranges::min(came) >= promise.first;
    for (std::size_t child = 0; child < children; ++child) {
      const bool other = others && came[child] >= promise.parts;
      others -= other;
      for (std::size_t part = 0; part < (other ? promise.parts : promise.first); ++part) {
        needed[classes_[child * parts + part]] = true;
      }
    }
    if (holds && !others) return needed;
  }
  return {};
}

Matrix GradientCode::by_row(const Matrix& coefficients, const std::vector<bool>& answered) const {
  Matrix out(tensor_.slices, tensor_.rows);
  std::vector<bool> done(first_.size());
  for (std::size_t row = 0; row < tensor_.rows; ++row) {
    const std::size_t class_index = classes_[row];
    if (!answered[row] || done[class_index]) continue;
    done[class_index] = true;
    for (std::size_t u = 0; u < tensor_.slices; ++u) out[u][row] = coefficients[class_index][u] / units_[class_index];
  }
  return out;
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
  if (tensor_.decoding != CodeTensor::Decoding::one_step) return least_squares(answered);
  // the same coefficient for all messages that came, such that the partitions' coefficients are 1 on average
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

Matrix GradientCode::least_squares(const std::vector<bool>& answered) const {
  if (Matrix coefficients = exact(answered); coefficients.rows) return coefficients;
  const std::vector<bool> heard = heard_classes(answered);
  Matrix out(first_.size(), tensor_.slices);
  for (const Block& block : blocks_) {
    block.put(block.best(block.missing(heard), tensor_.limit), out);
  }
  return by_row(out, answered);
}

}  // namespace jaxcoded
