// Element types, and the function with which every parent forms its sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace jaxcoded {

enum class DType : std::uint8_t { bytes, float16, bfloat16, float32, float64 };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float32:
      return 4;
    case DType::float64:
      return 8;
    default:
      return 1;
  }
}

// out[i] = own[i] + Σ_k coefficients[k] · inputs[k][i] for i < count, in one pass.
//
// float16 and bfloat16 are added in float32 and rounded once. `own` may be null, and may be `out`. The sum runs
// in the order of `inputs`. `bytes` cannot be summed: `own` is copied. The result's bits depend neither on the
// processor nor on the state of the calling thread.
void combine(DType dtype, std::byte* out, const std::byte* own,
             std::span<const std::byte* const> inputs, std::span<const double> coefficients,
             std::size_t count);

// Whether none of these numbers is NaN or infinite.
bool finite(DType dtype, const std::byte* from, std::size_t count);

// Convert numbers of this type to double. `bytes`, which are not numbers, become zeros.
void widen(DType dtype, double* out, const std::byte* from, std::size_t count);

}  // namespace jaxcoded
