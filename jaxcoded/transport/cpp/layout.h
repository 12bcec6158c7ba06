// How a message is cut into pieces.
#pragma once

#include <sys/sysinfo.h>

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace jaxcoded {

// A vector of one element type. Each part of a message has a segment for each element type in it.
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

// Return the bytes of this machine's memory, including swap. No message can be longer, so a greater length sent
// by another rank is damaged.
inline std::uint64_t most_bytes() {
  static const std::uint64_t bytes = [] {
    struct sysinfo memory {};
    sysinfo(&memory);
    return (std::uint64_t{memory.totalram} + memory.totalswap) * memory.mem_unit;
  }();
  return bytes;
}

// Elements [first, first + count) of a segment, decoded and passed on as a whole.
struct Piece {
  std::size_t segment = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;  // bytes from the segment's start
  std::uint64_t bytes = 0;
  std::uint64_t packed = 0;  // the offset if the pieces of the segment lie one after the other in memory
};

// The pieces of a message. There is always at least one piece, even without elements, so that an empty message
// can be sent, too. Pieces are computed on request, since a layout is made several times a round.
class Layout {
 public:
  Layout() = default;

  // `slices`: the number of equal slices of each segment. The first pieces of all slices come first, then the
  // second pieces of all slices. One piece of the coded messages makes one piece of each slice.
  Layout(std::vector<Segment> segments, std::uint64_t piece_bytes, std::uint64_t slices = 1)
      : segments_(std::move(segments)) {
    places_.reserve(segments_.size());
    for (const Segment& segment : segments_) {
      const std::uint64_t step = std::max<std::uint64_t>(piece_bytes / size_of(segment.dtype), 1);
      const std::uint64_t turns = segment.count % slices ? 1 : slices;
      const std::uint64_t slice = segment.count / turns;
      places_.push_back({.start = bytes_, .step = step, .slices = turns, .slice = slice, .first = pieces_});
      bytes_ += (segment.bytes() + alignment - 1) / alignment * alignment;
      pieces_ += static_cast<std::uint32_t>((slice + step - 1) / step * turns);
    }
  }

  const std::vector<Segment>& segments() const { return segments_; }
  std::uint32_t size() const { return std::max<std::uint32_t>(pieces_, 1); }

  Piece operator[](std::uint32_t piece) const {
    if (!pieces_) return {};
    std::size_t s = 0;
    if (places_.size() > 1) {  // the last segment that begins at this piece or before; empty segments have no piece
      const auto after = std::ranges::upper_bound(places_, piece, {}, &Place::first);
      s = static_cast<std::size_t>(after - places_.begin()) - 1;
    }
    const Place& place = places_[s];
    const std::uint64_t size = size_of(segments_[s].dtype);
    const std::uint64_t turn = (piece - place.first) / place.slices, slice = (piece - place.first) % place.slices;
    const std::uint64_t in_slice = turn * place.step;
    const std::uint64_t count = std::min(place.step, place.slice - in_slice);
    const std::uint64_t first = slice * place.slice + in_slice;
    const std::uint64_t before = in_slice * place.slices + slice * count;
    return {s, first, count, first * size, count * size, before * size};
  }

  // Return the bytes of a copy of the message in one block of memory, where segment `s` starts at `start(s)`.
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t start(std::size_t segment) const { return places_[segment].start; }

  // Return the first piece of a segment or, for the index after the last segment, the number of pieces.
  std::uint32_t first(std::size_t segment) const {
    return segment < places_.size() ? places_[segment].first : size();
  }

 private:
  static constexpr std::uint64_t alignment = 64;

  struct Place {
    std::uint64_t start;  // bytes
    std::uint64_t step;   // elements of each piece
    std::uint64_t slices;
    std::uint64_t slice;  // elements of each slice
    std::uint32_t first;  // the segment's first piece
  };

  std::vector<Segment> segments_;
  std::vector<Place> places_;
  std::uint64_t bytes_ = 0;
  std::uint32_t pieces_ = 0;
};

}  // namespace jaxcoded
