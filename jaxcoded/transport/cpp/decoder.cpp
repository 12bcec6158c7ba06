#include "decoder.h"

#include <algorithm>
#include <utility>

namespace jaxcoded {

// A growing list of messages, with a cheap test whether they may suffice.
class Decoder::Heard {
 public:
  Heard(const GradientCode& code, bool exact)
      : set(code.tensor().rows),
        code_(code),
        exact_(exact),
        row_of_(code.class_count(), code.tensor().rows),
        holders_(code.tensor().partitions),
        parts_(code.tensor().children()) {
    short_ = holders_.size();
  }

  std::vector<bool> set;  // of several copies, only the first: sums do not depend on which copies came
  std::size_t count = 0;  // of messages that are not copies, or of children with all their parts

  void add(std::size_t row) {
    if (!exact_) {
      set[row] = true;
      count += ++parts_[row / code_.tensor().parts] == code_.tensor().parts;
      return;
    }
    std::size_t& known = row_of_[code_.classes()[row]];
    const bool copy = known < set.size();
    if (row < known) {
      if (copy) set[known] = false;
      set[known = row] = true;
    }
    if (copy) return;
    ++count;
    for (std::size_t partition : code_.held()[row]) {
      short_ -= ++holders_[partition] == code_.tensor().slices;
    }
  }

  // Each slice of a partition needs its own message with that partition.
  bool may_suffice(std::size_t least) const { return count >= least && (!exact_ || !short_); }

 private:
  const GradientCode& code_;
  bool exact_;
  std::vector<std::size_t> row_of_;   // by class
  std::vector<std::size_t> holders_;  // by partition
  std::vector<std::size_t> parts_;    // by child
  std::size_t short_ = 0;             // partitions with too few holders
};

Decoder::Decoder(CodeTensor tensor) : code_(std::make_shared<const GradientCode>(std::move(tensor))) {
  // Any n − s messages suffice. Fewer may suffice if messages have parts,
  enough_ = parts() > 1 && !pinned() ? 1 : this->tensor().children() - this->tensor().stragglers;
  if (pinned() || parts() > 1) return;
  // or if messages are copies: one of each class, except for classes of which all copies may be missing.
  std::vector<std::size_t> copies(code().class_count());
  for (const std::size_t each : code().classes()) ++copies[each];
  std::ranges::sort(copies);
  std::size_t missing = this->tensor().stragglers;
  enough_ = copies.size();
  for (const std::size_t each : copies) {
    if (each > missing) break;
    missing -= each;
    --enough_;
  }
}

std::shared_ptr<const Decoding> Decoder::decode(const std::vector<std::size_t>& order,
                                                const std::vector<bool>& possible) {
  const std::pair key{order, least(possible)};
  if (const auto before = found_.find(key); before != found_.end()) return before->second;
  if (found_.size() >= most_known) found_.clear();
  return found_[key] = first_that_suffice(order, key.second);
}

// Return the least number of messages that may suffice, if only the `possible` messages can come.
std::size_t Decoder::least(const std::vector<bool>& possible) {
  if (pinned()) return enough_;
  if (possible != possible_ || !least_) {
    Heard all(code(), true);
    for (std::size_t row = 0; row < possible.size(); ++row) {
      if (possible[row]) all.add(row);
    }
    possible_ = possible;
    least_ = std::min(enough_, all.count);
  }
  return least_;
}

std::shared_ptr<const Decoding> Decoder::first_that_suffice(const std::vector<std::size_t>& order,
                                                            std::size_t least) {
  const auto first = [&](std::size_t count) -> std::shared_ptr<const Decoding> {
    Heard heard(code(), !pinned());
    for (std::size_t i = 0; i < count; ++i) heard.add(order[i]);
    return heard.may_suffice(least) ? known(known_, heard.set, pinned()) : nullptr;
  };
  auto decoding = first(order.size());
  if (!decoding) return nullptr;
  // If some messages suffice, any larger set that contains them suffices, too.
  std::size_t too_few = 0, suffice = order.size();
  while (too_few < suffice) {
    const std::size_t count = (too_few + suffice) / 2;
    if (auto fewer = first(count)) {
      decoding = std::move(fewer);
      suffice = count;
    } else {
      too_few = count + 1;
    }
  }
  return decoding;
}

std::shared_ptr<const Decoding> Decoder::approximate(const std::vector<bool>& answered) {
  return known(approximations_, answered, true);
}

// Return how to decode from a set of messages. The coefficients are computed only once for each set.
const std::shared_ptr<const Decoding>& Decoder::known(Known& all, const std::vector<bool>& set,
                                                      bool approximate) {
  const auto entry = all.find(set);
  if (entry != all.end()) return entry->second;
  if (all.size() >= most_known) all.clear();
  ++questions_;
  const Matrix coefficients = approximate ? code().best(set) : code().exact(set);
  std::shared_ptr<Decoding> out;
  if (coefficients.rows) {
    out = std::make_shared<Decoding>();
    out->coefficients.resize(slices());
    for (std::size_t row = 0; row < rows(); ++row) {
      bool needed = false;
      for (std::size_t u = 0; u < slices(); ++u) needed |= coefficients[u][row] != 0;
      if (!needed) continue;
      out->rows.push_back(row);
      for (std::size_t u = 0; u < slices(); ++u) {
        out->coefficients[u].push_back(coefficients[u][row]);
      }
    }
  }
  return all[set] = std::move(out);
}

}  // namespace jaxcoded
