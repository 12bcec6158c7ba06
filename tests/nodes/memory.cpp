#include "memory.h"

#include <new>
#include <utility>

namespace jaxcoded::memory {
namespace {

constexpr long never = -1, over = -2;
// How many more allocations succeed before one fails. With this TLS model no function call is needed to read the
// number.
[[gnu::tls_model("initial-exec")]] thread_local long left = never;

// Called before each allocation.
void count() {
  if (left < 0 || left-- > 0) [[likely]] return;
  left = over;
  throw std::bad_alloc();
}

}  // namespace

Failing::Failing(std::optional<std::size_t> count) {
  if (count) left = static_cast<long>(*count);
}

Failing::~Failing() { left = never; }

bool Failing::happened() const { return left == over; }

Exempt::Exempt() : before_(std::exchange(left, never)) {}

Exempt::~Exempt() { left = before_; }

}  // namespace jaxcoded::memory

// The linker's option --wrap makes this module's calls of `operator new` call these functions. A build with a
// sanitizer has no such option.
extern "C" {

[[gnu::weak]] void* __real__Znwm(std::size_t bytes);
[[gnu::weak]] void* __real__ZnwmSt11align_val_t(std::size_t bytes, std::align_val_t alignment);

void* __wrap__Znwm(std::size_t bytes) {
  jaxcoded::memory::count();
  return __real__Znwm(bytes);
}

void* __wrap__ZnwmSt11align_val_t(std::size_t bytes, std::align_val_t alignment) {
  jaxcoded::memory::count();
  return __real__ZnwmSt11align_val_t(bytes, alignment);
}

}  // extern "C"
