// Which messages of the children suffice for the sum, and how they are combined.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gradient_code.h"
#include "parity.h"

namespace jaxcoded {

struct Decoding {
  std::vector<std::size_t> rows;                  // rows whose messages are needed
  std::vector<std::vector<double>> coefficients;  // for each slice, a coefficient for each of `rows`
};

// Determines which messages suffice for a node's sum, and keeps the results.
class Decoder {
 public:
  explicit Decoder(CodeTensor tensor = {});  // by default the decoder of a leaf

  const GradientCode& code() const { return *code_; }
  const CodeTensor& tensor() const { return code().tensor(); }
  std::size_t rows() const { return tensor().rows; }
  std::size_t slices() const { return tensor().slices; }
  std::size_t parts() const { return tensor().parts; }
  // Return the least number of messages that may suffice, unless fewer can come in all.
  std::size_t enough() const { return enough_; }
  // Whether all pieces of a sum must use the same messages, because the sum is approximate.
  bool pinned() const { return tensor().decoding != CodeTensor::Decoding::exact; }

  // In a group with a `check`, return the test whether messages fit together; otherwise null.
  Parity* parity() { return parity_ ? &*parity_ : nullptr; }
  const Parity* parity() const { return parity_ ? &*parity_ : nullptr; }
  bool checked() const { return parity_.has_value(); }
  void check(Parity parity) { parity_ = std::move(parity); }

  // Return how to decode from the shortest beginning of `order` that suffices; null if even all messages in
  // `order` do not suffice. `possible`: the messages that can come at all.
  std::shared_ptr<const Decoding> decode(const std::vector<std::size_t>& order,
                                         const std::vector<bool>& possible);
  // Return how to form the best sum that these messages allow. Never null.
  std::shared_ptr<const Decoding> approximate(const std::vector<bool>& answered);

  // Return how many times coefficients were computed, because they were not kept.
  std::size_t questions() const { return questions_; }

 private:
  static constexpr std::size_t most_known = 4096;
  using Known = std::map<std::vector<bool>, std::shared_ptr<const Decoding>>;

  class Heard;
  std::size_t least(const std::vector<bool>& possible);
  std::shared_ptr<const Decoding> first_that_suffice(const std::vector<std::size_t>& order,
                                                     std::size_t least);
  const std::shared_ptr<const Decoding>& known(Known& all, const std::vector<bool>& set, bool approximate);

  std::shared_ptr<const GradientCode> code_;  // copies share it
  std::size_t enough_;
  std::optional<Parity> parity_;
  Known known_, approximations_;
  std::size_t questions_ = 0;
  // Earlier results of `first_that_suffice`, by its arguments. A node needs the same result many times.
  std::map<std::pair<std::vector<std::size_t>, std::size_t>, std::shared_ptr<const Decoding>> found_;
  std::vector<bool> possible_;  // the `possible` to which `least_` belongs
  std::size_t least_ = 0;
};

}  // namespace jaxcoded
