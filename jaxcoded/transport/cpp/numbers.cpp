#include "numbers.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// One build serves all processors. If the loader can choose, newer processors use separate code with wider
// vectors and half-precision conversions.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define JAXCODED_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define JAXCODED_CLONES
#endif

namespace jaxcoded {
namespace {

struct Float16 {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

// Without a branch: GCC does not vectorize `first ? a : b` if `a` or `b` comes from a float.
inline std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = -static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }

inline float wide(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

// Without branches, so that it is vectorized, and without a subnormal float32, which would take a hundred
// times as long. Infinities and NaN keep their bits.
inline float wide(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::int32_t rest = x.bits & 0x7fff;
  const float subnormal = static_cast<float>(rest) * 0x1p-24f;
  const std::uint32_t moved = (static_cast<std::uint32_t>(rest) << 13) + 0x38000000u;
  const std::uint32_t normal = choose(rest < 0x7c00, moved, moved + 0x38000000u);
  const std::uint32_t bits = choose(rest < 0x0400, std::bit_cast<std::uint32_t>(subnormal), normal);
  return std::bit_cast<float>(bits | sign);
}

template <class T>
T narrow(float x);

// Rounds to nearest, ties to even.
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u : rounded)};
}

template <>
inline Float16 narrow<Float16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Adding this power of two rounds subnormal results at the right place.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t half = choose(magnitude < 0x38800000u, small, normal);
  half = choose(magnitude >= 0x477ff000u, 0x7c00u, half);  // rounds to infinity
  half = choose(magnitude > 0x7f800000u, 0x7e00u, half);   // NaN
  return {static_cast<std::uint16_t>(sign | half)};
}

template <>
inline float narrow<float>(float x) {
  return x;
}

inline void put(double* out, double x) { *out = x; }

template <class T>
inline void put(T* out, float x) {
  *out = narrow<T>(x);
}

// Standard IEEE 754 arithmetic during this object's lifetime, whatever mode its thread has otherwise. XLA's
// threads flush subnormal numbers to zero, but a sum must have the same bits on every thread.
class Arithmetic {
 public:
  Arithmetic() : before_(get()) { set(standard()); }
  ~Arithmetic() { set(before_); }
  Arithmetic(const Arithmetic&) = delete;
  Arithmetic& operator=(const Arithmetic&) = delete;

 private:
#if defined(__SSE2__)  // this takes a tenth of the time of the functions for all processors
  using State = unsigned int;
  static State get() { return _mm_getcsr(); }
  static void set(State state) { _mm_setcsr(state); }
  static State standard() { return 0x1f80; }
#else
  using State = std::fenv_t;
  static State get() {
    State state;
    std::fegetenv(&state);
    return state;
  }
  static void set(const State& state) { std::fesetenv(&state); }
  static const State& standard() { return *FE_DFL_ENV; }
#endif
  State before_;
};

// The length of a block of the sum, so that the running sum stays in the first cache.
constexpr std::size_t block = 512;

template <class T, class Sum>
[[gnu::always_inline]] inline void combine_as(T* out, const T* own,
                                              std::span<const std::byte* const> inputs,
                                              std::span<const double> coefficients,
                                              std::size_t count) {
  Sum sum[block];
  for (std::size_t start = 0; start < count; start += block) {
    const std::size_t n = std::min(block, count - start);
    std::size_t k = 0;
    if (own) {
      for (std::size_t i = 0; i < n; ++i) sum[i] = wide(own[start + i]);
    } else if (!inputs.empty()) {
      const T* input = reinterpret_cast<const T*>(inputs[0]) + start;
      const Sum a = static_cast<Sum>(coefficients[0]);
      for (std::size_t i = 0; i < n; ++i) sum[i] = a * wide(input[i]);
      k = 1;
    } else {
      std::fill_n(sum, n, Sum{0});
    }
    for (; k < inputs.size(); ++k) {
      const T* input = reinterpret_cast<const T*>(inputs[k]) + start;
      const Sum a = static_cast<Sum>(coefficients[k]);
      for (std::size_t i = 0; i < n; ++i) sum[i] += a * wide(input[i]);
    }
    for (std::size_t i = 0; i < n; ++i) put(out + start + i, sum[i]);
  }
}

#define JAXCODED_COMBINE(name, T, Sum)                                                   \
  JAXCODED_CLONES void name(std::byte* out, const std::byte* own,                        \
                            std::span<const std::byte* const> inputs,                    \
                            std::span<const double> coefficients, std::size_t count) {   \
    combine_as<T, Sum>(reinterpret_cast<T*>(out), reinterpret_cast<const T*>(own), inputs, \
                       coefficients, count);                                             \
  }

JAXCODED_COMBINE(combine_float16, Float16, float)
JAXCODED_COMBINE(combine_bfloat16, BFloat16, float)
JAXCODED_COMBINE(combine_float32, float, float)
JAXCODED_COMBINE(combine_float64, double, double)

#undef JAXCODED_COMBINE

template <class T>
void widen_as(double* out, const T* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = wide(from[i]);
}

// Without a branch, so that it is vectorized.
template <class T>
bool finite_as(const T* from, std::size_t count) {
  using Wide = decltype(wide(T{}));
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) {
    all &= std::abs(wide(from[i])) <= std::numeric_limits<Wide>::max();
  }
  return all;
}

}  // namespace

void combine(DType dtype, std::byte* out, const std::byte* own,
             std::span<const std::byte* const> inputs, std::span<const double> coefficients,
             std::size_t count) {
  if (own && inputs.empty()) {
    if (out != own) std::memcpy(out, own, count * size_of(dtype));
    return;
  }
  const Arithmetic defined;
  switch (dtype) {
    case DType::float16:
      return combine_float16(out, own, inputs, coefficients, count);
    case DType::bfloat16:
      return combine_bfloat16(out, own, inputs, coefficients, count);
    case DType::float32:
      return combine_float32(out, own, inputs, coefficients, count);
    case DType::float64:
      return combine_float64(out, own, inputs, coefficients, count);
    case DType::bytes:
      return;
  }
}

bool finite(DType dtype, const std::byte* from, std::size_t count) {
  switch (dtype) {
    case DType::float16:
      return finite_as(reinterpret_cast<const Float16*>(from), count);
    case DType::bfloat16:
      return finite_as(reinterpret_cast<const BFloat16*>(from), count);
    case DType::float32:
      return finite_as(reinterpret_cast<const float*>(from), count);
    case DType::float64:
      return finite_as(reinterpret_cast<const double*>(from), count);
    default:
      return true;
  }
}

void widen(DType dtype, double* out, const std::byte* from, std::size_t count) {
  switch (dtype) {
    case DType::float16:
      return widen_as(out, reinterpret_cast<const Float16*>(from), count);
    case DType::bfloat16:
      return widen_as(out, reinterpret_cast<const BFloat16*>(from), count);
    case DType::float32:
      return widen_as(out, reinterpret_cast<const float*>(from), count);
    case DType::float64:
      return widen_as(out, reinterpret_cast<const double*>(from), count);
    case DType::bytes:
      std::fill_n(out, count, 0.0);
  }
}

}  // namespace jaxcoded
