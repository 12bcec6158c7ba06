// Which messages of the children suffice, and how they are combined.
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
  std::vector<std::size_t> rows;                  // messages that are needed
  std::vector<std::vector<double>> coefficients;  // for each slice, one for each of `rows`
};

// The questions of a node to its code, and the answers known so far.
class Decoder {
 public:
  explicit Decoder(CodeTensor tensor = {});  // by default a leaf's

  const GradientCode& code() const { return *code_; }
  const CodeTensor& tensor() const { return code().tensor(); }
  std::size_t rows() const { return tensor().rows; }
  std::size_t slices() const { return tensor().slices; }
  std::size_t parts() const { return tensor().parts; }
  // This many messages suffice, and with fewer it is not worth asking the code, unless no more may come.
  std::size_t enough() const { return enough_; }
  // All of a sum must come from the same messages, as it is approximate.
  bool pinned() const { return tensor().decoding != CodeTensor::Decoding::exact; }

  // In a group that looks for mistakes: whether messages fit together. Null otherwise.
  Parity* parity() { return parity_ ? &*parity_ : nullptr; }
  bool checked() const { return parity_.has_value(); }
  void check(Parity parity) { parity_ = std::move(parity); }

  // The first of these messages, in this order, that suffice; null if all of them do not.
  // `possible`: the messages that may come at all.
  std::shared_ptr<const Decoding> decode(const std::vector<std::size_t>& order,
                                         const std::vector<bool>& possible);
  // The best sum that these messages allow. Never null.
  std::shared_ptr<const Decoding> approximate(const std::vector<bool>& answered);

  // How often the code was asked.
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
  // Earlier answers, by the messages in their order and by how many make it worth asking the code. A node
  // asks again whenever it looks.
  std::map<std::pair<std::vector<std::size_t>, std::size_t>, std::shared_ptr<const Decoding>> found_;
  std::vector<bool> possible_;  // when `least_` was counted
  std::size_t least_ = 0;
};

}  // namespace jaxcoded
