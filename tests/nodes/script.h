// The calls that programs make, what they contribute, and what their results must be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "group.h"
#include "layout.h"

namespace jaxcoded {

using Bytes = std::vector<std::byte>;
using Numbers = std::vector<double>;

double rounded(DType dtype, double number);
Bytes narrowed(DType dtype, const Numbers& numbers);
Numbers widened(DType dtype, std::span<const std::byte> bytes);

struct Planned {
  enum class Kind : std::uint8_t { allreduce, reduce, broadcast } kind = Kind::allreduce;
  std::vector<Segment> segments = {};  // of the result
  std::uint64_t seed = 0;              // of the gradients
  std::string why_not = {};            // why the call must fail
  const std::vector<std::vector<bool>>* erased = nullptr;  // by rank
  bool shared = false;                 // the call's work is shared. Without segments, the next call sums the blocks
  bool audited = false;                // two ranks report on one of the shared blocks, in the last segment
  std::vector<double> costs = {};      // of the blocks of shared work; empty: all have the usual cost
  bool sums_blocks = false;            // the call sums the vectors that were computed in the previous round
  Rank liar = -1;                      // a rank whose vectors are wrong
  bool replans = false;                // ranks that have the result use the other plan from then on
  bool replanned = false;              // the caller uses the other plan
  const Group* group = nullptr;        // with the caller's plan

  std::size_t summed() const { return segments.size() - audited; }  // segments that are sums of gradients
  std::string signature() const;
  std::uint64_t fingerprint() const;

  // Return an element of an example's gradient, in a segment.
  double gradient(std::size_t segment, std::size_t example, std::uint64_t element) const;
  // Return the sum of the gradients of these examples.
  Numbers sum(std::size_t segment, std::size_t first = 0, std::size_t end = examples) const;
  Numbers absolute_sum(std::size_t segment) const;
  // Return a rank's vectors, one part after the other, before they are rounded.
  std::vector<Numbers> own(Rank rank) const;
};

// The right values of one call, computed in double when they are first needed.
class Expected {
 public:
  explicit Expected(const Planned& call) : group_(*call.group), call_(call) {}

  void check_result(Rank rank, std::size_t segment, const Numbers& actual) const;
  // Check a part of a rank's message to its parent.
  void check_message(Rank rank, std::size_t vector, std::uint64_t first, const Numbers& actual);

 private:
  double rounding(DType dtype) const;
  void form_messages();

  const Group& group_;
  const Planned& call_;
  std::vector<std::vector<Numbers>> messages_;  // of each rank
  std::vector<double> scale_;
};

}  // namespace jaxcoded
