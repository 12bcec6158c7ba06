// The calls of ranks, in words, by their fingerprints.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace jaxcoded {

class Signatures {
 public:
  static constexpr std::size_t most = 1024;  // the most signatures that are kept
  static constexpr std::size_t most_bytes = 16 << 20;  // the most bytes that these signatures take
  // Fingerprints whose calls another rank knows.
  using Known = std::set<std::uint64_t>;

  void learn(std::uint64_t fingerprint, std::string_view words) {
    if (words_.size() >= most || bytes_ >= most_bytes) {
      words_.clear();
      bytes_ = 0;
    }
    if (words_.try_emplace(fingerprint, words).second) bytes_ += words.size();
  }
  std::string of(std::uint64_t fingerprint) const {
    const auto entry = words_.find(fingerprint);
    return entry == words_.end() ? "something else" : entry->second;
  }
  // Return a call's words to send to a rank that does not know them, and add them to `known`. Null if the other
  // rank already knows the words, or if this rank does not.
  const std::string* news(std::uint64_t fingerprint, Known& known) const {
    if (known.size() >= most) known.clear();
    const auto entry = words_.find(fingerprint);
    const bool untold = entry != words_.end() && known.insert(fingerprint).second;
    return untold ? &entry->second : nullptr;
  }

 private:
  std::map<std::uint64_t, std::string> words_;
  std::size_t bytes_ = 0;
};

}  // namespace jaxcoded
