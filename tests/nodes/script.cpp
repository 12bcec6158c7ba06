#include "script.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "random.h"

namespace jaxcoded {
namespace {

__extension__ using Half = _Float16;

std::uint16_t bfloat16_bits(float number) {
  const auto bits = std::bit_cast<std::uint32_t>(number);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
void store(std::byte*& to, T number) {
  std::memcpy(to, &number, sizeof number);
  to += sizeof number;
}

double eps_of(DType dtype) {
  switch (dtype) {
    case DType::float16: return 0x1p-10;
    case DType::bfloat16: return 0x1p-7;
    case DType::float32: return 0x1p-23;
    default: return 0x1p-52;
  }
}

}  // namespace

Bytes narrowed(DType dtype, const Numbers& numbers) {
  Bytes out(numbers.size() * size_of(dtype));
  std::byte* to = out.data();
  for (const double number : numbers) {
    switch (dtype) {
      case DType::float16: store(to, static_cast<Half>(number)); break;
      case DType::bfloat16: store(to, bfloat16_bits(static_cast<float>(number))); break;
      case DType::float32: store(to, static_cast<float>(number)); break;
      default: store(to, number);
    }
  }
  return out;
}

Numbers widened(DType dtype, std::span<const std::byte> bytes) {
  Numbers out(bytes.size() / size_of(dtype));
  widen(dtype, out.data(), bytes.data(), out.size());
  return out;
}

double rounded(DType dtype, double number) {
  switch (dtype) {
    case DType::float16: return static_cast<double>(static_cast<Half>(number));
    case DType::bfloat16:
      return std::bit_cast<float>(std::uint32_t{bfloat16_bits(static_cast<float>(number))} << 16);
    case DType::float32: return static_cast<float>(number);
    default: return number;
  }
}

std::string Planned::signature() const {
  std::string out = kind == Kind::broadcast ? "broadcast" : kind == Kind::reduce ? "reduce" : "allreduce";
  out.append(" ").append(std::to_string(seed)).append(" of ");
  for (const Segment& segment : segments) {
    out += std::string(1, static_cast<char>('a' + static_cast<int>(segment.dtype)));
    out += std::to_string(segment.count);
  }
  if (replanned) out += ", replanned";
  return out;
}

std::uint64_t Planned::fingerprint() const {
  std::uint64_t out = 1;
  for (const char letter : signature()) out = mixed(out * 257 + static_cast<unsigned char>(letter));
  return out;
}

double Planned::gradient(std::size_t segment, std::size_t example, std::uint64_t element) const {
  const std::uint64_t place = ((seed * 8 + segment) * examples + example) << 24 | element;
  return rounded(segments[segment].dtype, static_cast<double>(mixed(place) >> 11) * 0x1p-52 - 1);
}

Numbers Planned::sum(std::size_t segment, std::size_t first, std::size_t end) const {
  Numbers out(segments[segment].count);
  for (std::size_t example = first; example < end; ++example) {
    for (std::uint64_t i = 0; i < out.size(); ++i) out[i] += gradient(segment, example, i);
  }
  return out;
}

Numbers Planned::absolute_sum(std::size_t segment) const {
  Numbers out(segments[segment].count);
  for (std::size_t example = 0; example < examples; ++example) {
    for (std::uint64_t i = 0; i < out.size(); ++i) out[i] += std::abs(gradient(segment, example, i));
  }
  return out;
}

std::vector<Numbers> Planned::own(Rank rank) const {
  std::vector<Numbers> out;
  if (kind == Kind::broadcast) {
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const std::size_t example = static_cast<std::size_t>(rank) % examples;
      out.push_back(sum(s, example, example + 1));
    }
    return out;
  }
  const Group::Shares& shares = group->shares[static_cast<std::size_t>(rank)];
  for (std::size_t part = 0; part < shares.parts; ++part) {
    for (std::size_t s = 0; s < segments.size(); ++s) {
      const std::uint64_t count = segments[s].count / shares.slices;
      Numbers& vector = out.emplace_back(count);
      for (std::size_t e = 0; e < shares.held.size(); ++e) {
        for (std::size_t u = 0; u < shares.slices; ++u) {
          const double coefficient = shares.coefficients[(e * shares.parts + part) * shares.slices + u];
          for (std::uint64_t i = 0; i < count; ++i) {
            vector[i] += coefficient * gradient(s, shares.held[e], u * count + i);
          }
        }
      }
    }
  }
  if (rank != liar) return out;
  for (Numbers& vector : out) {
    double largest = 1;
    for (const double number : vector) largest = std::max(largest, std::abs(number));
    for (std::uint64_t i = 0; i < vector.size(); ++i) {
      vector[i] += largest * (static_cast<double>(mixed(seed + i) >> 11) * 0x1p-51 - 2);
    }
  }
  return out;
}

// Return a bound for the error of a sum, relative to the sum of absolute values. Every rounding, by half a
// machine epsilon, is amplified by at most κ. A 16-bit message is rounded once when it is made and once in
// every layer. In wider messages every addition counts; in float64 also the additions of `own` and `sum`, and
// the rounding of a decoding's coefficients (in 1,500 drawn plans they were off by at most 66 κ half epsilons).
double Expected::rounding(DType dtype) const {
  std::size_t depth = 0, fanout = 0;
  for (const Family& family : group_.families) {
    depth = std::max(depth, family.ancestors.size());
    fanout = std::max(fanout, family.children.size());
  }
  const bool narrow = size_of(dtype) < 4;
  double roundings = 1 + static_cast<double>(depth * (narrow ? 1 : fanout + 3));
  if (dtype == DType::float64) roundings += static_cast<double>(2 * examples + 100 * depth);
  return roundings * eps_of(dtype) / 2 * group_.amplification * 1.01 + 1e-15;
}

void Expected::check_result(Rank rank, std::size_t segment, const Numbers& actual) const {
  const bool passed_on = call_.kind == Planned::Kind::broadcast;
  const Numbers exact = passed_on ? call_.own(group_.root())[segment] : call_.sum(segment);
  const Numbers size = call_.absolute_sum(segment);
  const double bound = passed_on ? 0 : rounding(call_.segments[segment].dtype);
  check(actual.size() == exact.size(), "rank", rank, "has a result of another length");
  for (std::size_t i = 0; i < actual.size(); ++i) {
    // unlike `error > bound`, this comparison fails for NaN
    const bool right = std::abs(actual[i] - exact[i]) <= bound * size[i];
    check(right, "rank", rank, "has", actual[i], "in place of", exact[i], "in segment", segment, "at", i);
  }
}

void Expected::form_messages() {
  const std::size_t count = call_.segments.size();
  scale_.assign(count, 1);
  for (std::size_t rank = 0; rank < group_.size(); ++rank) {
    messages_.push_back(call_.own(static_cast<Rank>(rank)));
  }
  std::vector<std::size_t> order;
  for (std::size_t rank = 0; rank < group_.size(); ++rank) order.push_back(rank);
  std::ranges::stable_sort(order, std::greater{},  // the deepest ranks first
                           [&](std::size_t rank) { return group_.families[rank].ancestors.size(); });
  for (const std::size_t rank : order) {
    const Group::Combination& of = group_.combinations[rank];
    const std::vector<Rank>& children = group_.families[rank].children;
    const std::size_t rows = children.size() * of.parts;
    for (std::size_t v = 0; v < messages_[rank].size(); ++v) {
      Numbers& vector = messages_[rank][v];
      for (std::size_t row = 0; row < rows; ++row) {
        const Numbers& message = messages_[static_cast<std::size_t>(children[row / of.parts])]
                                          [(v / count * of.parts + row % of.parts) * count + v % count];
        for (std::size_t u = 0; u < of.slices; ++u) {
          for (std::size_t i = 0; i < message.size(); ++i) {
            vector[u * message.size() + i] += of.coefficients[u * rows + row] * message[i];
          }
        }
      }
      for (const double number : vector) scale_[v % count] = std::max(scale_[v % count], std::abs(number));
    }
  }
}

void Expected::check_message(Rank rank, std::size_t vector, std::uint64_t first, const Numbers& actual) {
  if (messages_.empty()) form_messages();
  const std::size_t segment = vector % call_.segments.size();
  const double bound = rounding(call_.segments[segment].dtype) * scale_[segment] * examples;
  const Numbers& exact = messages_[static_cast<std::size_t>(rank)][vector];
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const bool right = std::abs(actual[i] - exact[first + i]) <= bound;
    check(right, "the message of rank", rank, "has", actual[i], "in place of", exact[first + i]);
  }
}

}  // namespace jaxcoded
