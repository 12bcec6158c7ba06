// Memory of a process that others of its host map, to copy vectors out of it without the kernel: that
// takes a third of the time.
//
// As with all that is fetched, a reader looks afterwards whether it was still valid: memory is used
// again. It stays where it is when its process has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "pool.h"
#include "sealed.h"

namespace jaxcoded {

// Where it is; of no bytes if there is none.
struct SharedPlace {
  std::int64_t descriptor = -1;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

// This process's own. Where there is none, or no more of it, what it allocates is of the heap.
class SharedMemory : public Source {
 public:
  // `magic`: what it begins with, which says whose it is.
  explicit SharedMemory(std::uint64_t magic);
  ~SharedMemory() override;
  SharedMemory(const SharedMemory&) = delete;

  SharedPlace place() const;
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* data, std::size_t bytes) override;

 private:
  Descriptor file_;
  std::byte* memory_ = nullptr;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // bytes from each place on
};

// Another process's, mapped for reading. Nothing is found in it where it cannot be mapped.
class PeerMemory {
 public:
  PeerMemory(std::int64_t pid, std::uint64_t magic, const SharedPlace& place);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  // One for all groups that have to do with that process.
  static std::shared_ptr<const PeerMemory> of(std::int64_t pid, std::uint64_t magic,
                                              const SharedPlace& place);

  // Where these bytes of that process are here; null if they are not in its shared memory.
  const std::byte* find(std::uint64_t address, std::size_t bytes) const;

 private:
  const std::byte* memory_ = nullptr;
  SharedPlace place_;
};

}  // namespace jaxcoded
