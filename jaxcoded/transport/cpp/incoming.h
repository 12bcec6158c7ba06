// How the messages of a rank's children are cut into pieces, compared with the rank's own message.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace jaxcoded {

struct Incoming {
  std::size_t parts = 1;    // parts of a child's message for each part of this rank's message
  std::size_t vectors = 0;  // vectors in each part
  Layout incoming = {};     // one part of a child's message for each part of this rank's message
  Layout all_parts = {};    // all of a child's message, if it has several parts

  // `message`: this rank's message, in parts of `vectors` vectors each.
  static Incoming of(std::vector<Segment> message, std::size_t vectors, std::size_t slices, std::size_t parts,
                     std::uint64_t piece_bytes) {
    Incoming out{.parts = parts, .vectors = vectors};
    for (Segment& segment : message) segment.count /= slices;
    if (parts > 1) {
      std::vector<Segment> all;
      const auto step = static_cast<std::ptrdiff_t>(vectors);
      for (auto part = message.begin(); part != message.end(); part += step) {
        for (std::size_t p = 0; p < parts; ++p) all.insert(all.end(), part, part + step);
      }
      out.all_parts = Layout(std::move(all), piece_bytes);
    }
    out.incoming = Layout(std::move(message), piece_bytes);
    return out;
  }

  // The layout of a child's message.
  const Layout& of_child() const { return parts > 1 ? all_parts : incoming; }

  // Return the piece of this part of a child's message that goes into this piece of `incoming`.
  std::uint32_t piece_of_part(std::size_t part, std::uint32_t piece) const {
    if (parts == 1 || !incoming[piece].count) return piece;
    const std::size_t segment = incoming[piece].segment;
    const std::size_t of_parts = segment / vectors * parts + part;
    return all_parts.first(of_parts * vectors + segment % vectors) + piece - incoming.first(segment);
  }
};

}  // namespace jaxcoded
