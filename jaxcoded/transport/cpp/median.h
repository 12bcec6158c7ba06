// Medians.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace jaxcoded {

// Return the median, or 0 without values. Reorders the values.
inline double median(std::span<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The latest values of a quantity.
class Latest {
 public:
  void add(double value) {
    values_[next_] = value;
    next_ = (next_ + 1) % most;
    size_ = std::min(size_ + 1, most);
  }
  std::size_t size() const { return size_; }
  double median() const {
    auto values = values_;
    return jaxcoded::median({values.data(), size_});
  }

 private:
  static constexpr std::size_t most = 31;

  std::array<double, most> values_ = {};
  std::size_t size_ = 0, next_ = 0;  // `next_`: which value is replaced next
};

}  // namespace jaxcoded
