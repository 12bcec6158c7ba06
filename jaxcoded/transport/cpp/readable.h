// Makes texts of other ranks readable.
#pragma once

#include <string>
#include <string_view>

namespace jaxcoded {

// Return a text with "?" in place of bytes that are not UTF-8, which Python rejects, and in place of zeros, at
// which XLA would end the text.
inline std::string readable(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char first = byte(i);
    std::size_t length = 0;
    if (first > 0 && first < 0x80) length = 1;
    if (first >= 0xC2 && first < 0xE0) length = 2;
    if (first >= 0xE0 && first < 0xF0) length = 3;
    if (first >= 0xF0 && first < 0xF5) length = 4;
    bool good = length > 0 && length <= text.size() - i;
    for (std::size_t k = 1; good && k < length; ++k) good = (byte(i + k) & 0xC0) == 0x80;
    if (good && length > 2) {  // not an overlong encoding, not a surrogate, and not above U+10FFFF
      const unsigned char second = byte(i + 1);
      good = !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second >= 0xA0) &&
             !(first == 0xF0 && second < 0x90) && !(first == 0xF4 && second >= 0x90);
    }
    out += good ? text.substr(i, length) : "?";
    i += good ? length : 1;
  }
  return out;
}

}  // namespace jaxcoded
