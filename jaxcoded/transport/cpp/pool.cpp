#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <tuple>

namespace jaxcoded {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

// Sizes are rounded up, by an eighth at most, so that rounds of almost equal size share memory.
std::size_t rounded(std::size_t bytes) {
  const std::size_t least = std::max<std::size_t>(bytes, 256);
  const std::size_t step = std::max<std::size_t>(std::bit_floor(least) / 8, 64);
  return (least + step - 1) / step * step;
}

}  // namespace

std::byte* Heap::allocate(std::size_t capacity) {
  const bool large = capacity >= huge_page;
  const std::align_val_t alignment{large ? huge_page : 64};
  auto* data = static_cast<std::byte*>(::operator new(capacity, alignment));
  if (large) madvise(data, capacity, MADV_HUGEPAGE);
  return data;
}

void Heap::release(std::byte* data, std::size_t capacity) {
  ::operator delete(data, std::align_val_t{capacity >= huge_page ? huge_page : 64});
}

Buffer::~Buffer() {
  if (data_) pool_->give(data_, capacity_);
}

Pool::~Pool() {
  for (auto [capacity, data] : free_) source_.release(data, capacity);
}

Buffer Pool::take(std::size_t bytes) {
  std::size_t capacity = rounded(bytes);
  std::byte* data = nullptr;
  const auto found = fit_ == Fit::same ? free_.find(capacity) : free_.lower_bound(capacity);
  if (found != free_.end()) {
    std::tie(capacity, data) = *found;
    free_.erase(found);
    kept_ -= capacity;
  } else {
    data = source_.allocate(capacity);
  }
  used_ += capacity;
  return {this, data, capacity};
}

void Pool::give(std::byte* data, std::size_t capacity) {
  used_ -= capacity;
  kept_ += capacity;
  free_.emplace(capacity, data);
  while (kept_ > most_) {
    // A large block costs most to keep. With `Fit::enough` it also serves most requests.
    const auto least = fit_ == Fit::same ? std::prev(free_.end()) : free_.begin();
    kept_ -= least->first;
    source_.release(least->second, least->first);
    free_.erase(least);
  }
}

}  // namespace jaxcoded
