// How a message is cut into pieces.
#pragma once

#include <sys/sysinfo.h>

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace jaxcoded {

// A vector of one element type. A message has one for each type in it.
struct Segment {
  DType dtype;
  std::uint64_t count;  // elements

  std::uint64_t bytes() const { return count * size_of(dtype); }
  bool operator==(const Segment&) const = default;
};

inline std::uint64_t bytes_of(const std::vector<Segment>& segments) {
  std::uint64_t out = 0;
  for (const Segment& segment : segments) out += segment.bytes();
  return out;
}

// This machine's memory, swapped or not. No message is longer: what another rank says of its length
// is nonsense then, and there would be no room for it.
inline std::uint64_t most_bytes() {
  static const std::uint64_t bytes = [] {
    struct sysinfo its {};
    sysinfo(&its);
    return (std::uint64_t{its.totalram} + its.totalswap) * its.mem_unit;
  }();
  return bytes;
}

// Elements [first, first + count) of a segment: what is decoded and handed on as a whole.
struct Piece {
  std::size_t segment;
  std::uint64_t first;
  std::uint64_t count;
  std::uint64_t offset;  // bytes from the segment's start
  std::uint64_t bytes;
};

// The pieces of a message. There is always one, if need be of no elements: a message of nothing
// is a message too.
class Layout {
 public:
  Layout() : Layout({}, 1) {}

  Layout(std::vector<Segment> segments, std::uint64_t piece_bytes) : segments_(std::move(segments)) {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      const Segment& segment = segments_[s];
      starts_.push_back(bytes_);
      firsts_.push_back(size());
      bytes_ += (segment.bytes() + alignment - 1) / alignment * alignment;
      const std::uint64_t size = size_of(segment.dtype);
      const std::uint64_t step = std::max<std::uint64_t>(piece_bytes / size, 1);
      for (std::uint64_t first = 0; first < segment.count; first += step) {
        const std::uint64_t count = std::min(step, segment.count - first);
        pieces_.push_back({s, first, count, first * size, count * size});
      }
    }
    if (pieces_.empty()) pieces_.push_back({0, 0, 0, 0, 0});
  }

  const std::vector<Segment>& segments() const { return segments_; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(pieces_.size()); }
  const Piece& operator[](std::uint32_t piece) const { return pieces_[piece]; }

  // Bytes of a copy in one block of memory, in which segment `s` starts at `start(s)`.
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t start(std::size_t segment) const { return starts_[segment]; }

  // The first piece of a segment; one that does not exist for the segment after the last.
  std::uint32_t first(std::size_t segment) const {
    return segment < firsts_.size() ? firsts_[segment] : size();
  }

 private:
  static constexpr std::uint64_t alignment = 64;

  std::vector<Segment> segments_;
  std::vector<Piece> pieces_;
  std::vector<std::uint64_t> starts_;
  std::vector<std::uint32_t> firsts_;
  std::uint64_t bytes_ = 0;
};

}  // namespace jaxcoded
