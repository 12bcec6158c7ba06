#include "reserve.h"

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <new>

namespace jaxcoded::reserve {
namespace {

// The reserve is address space without pages, until something is written to it. It is mapped separately, since
// memory that one thread gives back to malloc is not available to other threads.
constexpr std::size_t bytes = std::size_t{4} << 20;

std::atomic<void*> aside = nullptr;
std::new_handler before = nullptr;
std::atomic<int> turns = 0;  // of all threads
thread_local int own = 0;    // of this thread

void give() {
  const bool others = turns.load() > own;
  if (void* const memory = others ? nullptr : aside.exchange(nullptr)) return void(munmap(memory, bytes));
  if (!before) throw std::bad_alloc();
  before();
}

}  // namespace

void keep() {
  fill();
  if (const auto previous = std::set_new_handler(give); previous != give) before = previous;
}

Turn::Turn() {
  fill();  // threads without a turn may have used the reserve
  ++own;
  ++turns;
}

Turn::~Turn() {
  --turns;
  --own;
}

bool fill() noexcept {
  if (aside.load()) return true;
  void* nothing = nullptr;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  if (!aside.compare_exchange_strong(nothing, memory)) munmap(memory, bytes);
  return true;
}

}  // namespace jaxcoded::reserve
