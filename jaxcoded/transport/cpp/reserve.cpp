#include "reserve.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace jaxcoded::reserve {
namespace {

// Address space: it is in no page before it is written to.
constexpr std::size_t bytes = std::size_t{4} << 20;

std::atomic<void*> aside = nullptr;
std::new_handler before = nullptr;

void give() {
  if (void* const memory = aside.exchange(nullptr)) return std::free(memory);
  if (!before) throw std::bad_alloc();
  before();
}

}  // namespace

void keep() {
  fill();
  before = std::set_new_handler(give);
}

bool fill() noexcept {
  if (aside.load()) return true;
  void* nothing = nullptr;
  void* const memory = std::malloc(bytes);
  if (memory && !aside.compare_exchange_strong(nothing, memory)) std::free(memory);
  return memory != nullptr;
}

}  // namespace jaxcoded::reserve
