// Copies of vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jaxcoded {

// Whether a copy goes through the caches or past them. A write through the caches first reads the old memory
// into them, which doubles the time.
enum class Copy : std::uint8_t { cached, past_caches };

// Return the kind of copy for a vector of this length, which the program uses next.
constexpr Copy for_program(std::uint64_t bytes) {
  constexpr std::uint64_t stays = 512 << 10;  // up to this length a vector is still in a cache when the program uses it
  return bytes > stays ? Copy::past_caches : Copy::cached;
}

inline void copy(std::byte* to, const std::byte* from, std::size_t bytes, [[maybe_unused]] Copy how) {
#if defined(__SSE2__)
  constexpr std::size_t line = 64;
  if (how == Copy::past_caches && bytes >= 16 * line) {
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(to) % line;
    std::memcpy(to, from, before);
    to += before, from += before, bytes -= before;
    for (; bytes >= line; to += line, from += line, bytes -= line) {
      const auto* in = reinterpret_cast<const __m128i*>(from);
      auto* out = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                    d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();  // without this, other threads may see writes past the caches in any order
  }
#endif
  if (bytes) std::memcpy(to, from, bytes);
}

}  // namespace jaxcoded
