#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#include <tuple>

namespace jaxcoded {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t most_spare = std::size_t{1} << 30;

// Sizes are rounded up, by at most an eighth, so that rounds of almost equal size share memory.
std::size_t rounded(std::size_t bytes) {
  const std::size_t least = std::max<std::size_t>(bytes, 256);
  const std::size_t step = std::max<std::size_t>(std::bit_floor(least) / 8, 64);
  return (least + step - 1) / step * step;
}

// Take memory from a source. If the source has too little memory, `give_back` first makes others return their
// unused memory.
template <class GiveBack>
std::byte* allocated(Source& source, std::size_t bytes, GiveBack give_back) {
  try {
    return source.allocate(bytes);
  } catch (...) {  // this may also be an error of a GPU's driver
    give_back();
  }
  return source.allocate(bytes);
}

// Note a free block. Returns false if there is no memory for the note: destructors give memory back, and must
// not throw.
bool noted(std::multimap<std::size_t, std::byte*>& free, std::byte* data, std::size_t bytes) {
  try {
    free.emplace(bytes, data);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
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

std::byte* Spare::allocate(std::size_t bytes) {
  {
    const std::scoped_lock lock(mutex_);
    if (const auto entry = free_.find(bytes); entry != free_.end()) {
      std::byte* data = entry->second;
      free_.erase(entry);
      kept_ -= bytes;
      return data;
    }
  }
  return allocated(source_, bytes, [this] {
    give_back(0);
    if (other_) other_->give_back(0);
  });
}

void Spare::release(std::byte* data, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (!noted(free_, data, bytes)) return source_.release(data, bytes);
  kept_ += bytes;
  trim(most_spare);
}

void Spare::give_back(std::size_t most) {
  const std::scoped_lock lock(mutex_);
  trim(most);
}

void Spare::trim(std::size_t most) {
  while (kept_ > most) {
    const auto largest = std::prev(free_.end());  // the largest block costs the most to keep
    kept_ -= largest->first;
    source_.release(largest->second, largest->first);
    free_.erase(largest);
  }
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
  const auto entry = free_.lower_bound(capacity);
  if (entry != free_.end()) {
    std::tie(capacity, data) = *entry;
    free_.erase(entry);
    kept_ -= capacity;
  } else {
    data = allocated(source_, capacity, [this] { trim(0); });
  }
  used_ += capacity;
  return {this, data, capacity};
}

void Pool::give(std::byte* data, std::size_t capacity) {
  used_ -= capacity;
  if (capacity > most_ || !noted(free_, data, capacity)) return source_.release(data, capacity);
  kept_ += capacity;
  trim(most_);
}

void Pool::trim(std::size_t most) {
  while (kept_ > most) {
    const auto least = free_.begin();  // the smallest block serves the fewest requests
    kept_ -= least->first;
    source_.release(least->second, least->first);
    free_.erase(least);
  }
}

}  // namespace jaxcoded
