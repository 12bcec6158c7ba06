// Random numbers that depend only on the seed, not on the standard library.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace jaxcoded {

// SplitMix64 (Steele, Lea, Flood 2014).
inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mixed(seed)) {}

  std::uint64_t bits() { return mixed(state_ += 0x9e3779b97f4a7c15u); }
  double real() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // in [0, 1)
  bool chance(double share) { return real() < share; }
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(bits() % end); }
  std::size_t between(std::size_t first, std::size_t last) { return first + below(last - first + 1); }
  double exponential(double mean) { return -mean * std::log1p(-real()); }

  template <class T>
  const T& pick(const std::vector<T>& from) { return from[below(from.size())]; }
  template <class T>
  T pick(std::initializer_list<T> from) { return from.begin()[below(from.size())]; }
  // Return this many of the elements, in a random order.
  template <class T>
  std::vector<T> sample(std::vector<T> from, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) std::swap(from[i], from[between(i, from.size() - 1)]);
    from.resize(count);
    return from;
  }
  template <class T>
  std::vector<T> some(const std::vector<T>& from) { return sample(from, between(0, from.size())); }

 private:
  std::uint64_t state_;
};

}  // namespace jaxcoded
