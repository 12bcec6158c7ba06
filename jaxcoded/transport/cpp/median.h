// What something is as a rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace jaxcoded {

// The median, 0 of nothing.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The latest values of something.
class Latest {
 public:
  void add(double value) {
    if (values_.size() < most) {
      values_.push_back(value);
    } else {
      values_[next_] = value;
      next_ = (next_ + 1) % most;
    }
  }
  std::size_t size() const { return values_.size(); }
  double median() const { return jaxcoded::median(values_); }

 private:
  static constexpr std::size_t most = 31;

  std::vector<double> values_;
  std::size_t next_ = 0;  // to be replaced
};

}  // namespace jaxcoded
