// Lets single allocations of this module fail, as if there were too little memory.
#pragma once

#include <cstddef>
#include <optional>

namespace jaxcoded::memory {

// While this object exists, one allocation of this thread fails, after `count` others have succeeded; none fails
// if `count` is empty.
class Failing {
 public:
  explicit Failing(std::optional<std::size_t> count);
  ~Failing();
  Failing(const Failing&) = delete;
  bool happened() const;  // whether an allocation has failed
};

// While this object exists, allocations of this thread neither fail nor count.
class Exempt {
 public:
  Exempt();
  ~Exempt();
  Exempt(const Exempt&) = delete;

 private:
  long before_;
};

}  // namespace jaxcoded::memory
