// Which messages of the children suffice, and how they are combined.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace jaxcoded {

struct Decoding {
  std::vector<std::size_t> rows;                  // messages that are needed
  std::vector<std::vector<double>> coefficients;  // for each slice, one for each of `rows`
};

// A parent's code, asked once for each set of messages. A row is a message of a child, which may
// have several parts: row `child * parts + part`.
class Decoder {
 public:
  // Coefficients (slices × rows, row-major) for the messages that came; empty if they do not
  // suffice, unless an approximation will do.
  using Code = std::function<std::vector<double>(const std::vector<bool>&, bool approximate)>;

  // `enough`: so many messages suffice, and fewer are not worth asking the code. `pinned`: all of a
  // sum must come from the same messages, as it is approximate. `classes`: rows of one class are the
  // same message up to a factor, so that one of them will do.
  Decoder(std::size_t slices, std::size_t parts, std::size_t enough, bool pinned,
          std::vector<int> classes, Code code)
      : slices_(slices),
        parts_(parts),
        enough_(enough),
        pinned_(pinned),
        classes_(std::move(classes)),
        code_(std::move(code)) {}

  std::size_t slices() const { return slices_; }
  std::size_t parts() const { return parts_; }
  std::size_t enough() const { return enough_; }
  bool pinned() const { return pinned_; }
  std::size_t rows() const { return classes_.size(); }

  // Null if the messages that came do not suffice. `possible`: those that may come at all.
  std::shared_ptr<const Decoding> decode(const std::vector<bool>& answered,
                                         const std::vector<bool>& possible) {
    const std::vector<bool> set = representatives(answered);
    const auto heard = std::ranges::count(set, true);
    if (heard < std::min(std::ranges::count(representatives(possible), true),
                         static_cast<std::ptrdiff_t>(enough_))) {
      return nullptr;
    }
    auto found = known_.find(set);
    if (found == known_.end()) {
      if (known_.size() >= most_known) known_.clear();
      found = known_.emplace(set, decoding(set, false)).first;
    }
    return found->second;
  }

  // The best that can be made of these messages. Never null.
  std::shared_ptr<const Decoding> approximate(const std::vector<bool>& answered) {
    auto found = approximations_.find(answered);
    if (found == approximations_.end()) {
      if (approximations_.size() >= most_known) approximations_.clear();
      found = approximations_.emplace(answered, decoding(answered, true)).first;
    }
    return found->second;
  }

 private:
  static constexpr std::size_t most_known = 4096;

  // The first of each class: sums then do not depend on which copies were heard.
  std::vector<bool> representatives(const std::vector<bool>& answered) const {
    std::vector<bool> out(answered.size());
    std::vector<bool> taken(answered.size());
    for (std::size_t row = 0; row < answered.size(); ++row) {
      const auto its = static_cast<std::size_t>(classes_[row]);
      out[row] = answered[row] && !taken[its];
      taken[its] = taken[its] || answered[row];
    }
    return out;
  }

  std::shared_ptr<const Decoding> decoding(const std::vector<bool>& set, bool approximate) const {
    std::vector<double> all = code_(set, approximate);
    if (approximate) all.resize(slices_ * set.size());  // of a code that has failed
    if (all.empty() && slices_ * set.size() != 0) return nullptr;
    Decoding out;
    out.coefficients.resize(slices_);
    for (std::size_t row = 0; row < set.size(); ++row) {
      bool needed = false;
      for (std::size_t u = 0; u < slices_; ++u) needed |= all[u * set.size() + row] != 0;
      if (!needed) continue;
      out.rows.push_back(row);
      for (std::size_t u = 0; u < slices_; ++u) {
        out.coefficients[u].push_back(all[u * set.size() + row]);
      }
    }
    return std::make_shared<const Decoding>(std::move(out));
  }

  std::size_t slices_;
  std::size_t parts_;
  std::size_t enough_;
  bool pinned_;
  std::vector<int> classes_;
  Code code_;
  std::map<std::vector<bool>, std::shared_ptr<const Decoding>> known_, approximations_;
};

}  // namespace jaxcoded
