// Memory of a process that other processes of its host map. The other processes copy vectors out of this memory
// without the kernel, in a third of the kernel's time.
//
// As with all fetches, a reader checks afterwards whether the data was still valid, since memory is reused.
// Readers can still use the memory when its process has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "pool.h"
#include "sealed.h"

namespace jaxcoded {

// Where the memory is; no bytes if there is none.
struct SharedPlace {
  std::int64_t descriptor = -1;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

// This process's own memory. If there is none, or too little, allocations come from the heap.
class SharedMemory : public Source {
 public:
  // `magic`: the word at its beginning, which identifies the process.
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
  std::map<std::size_t, std::size_t> free_;  // by offset: the length of each free stretch
};

// Another process's memory, mapped for reading. If it cannot be mapped, `find` returns null.
class PeerMemory {
 public:
  PeerMemory(std::int64_t pid, std::uint64_t magic, const SharedPlace& place);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  // Return the same object for all groups that this process shares with the other process.
  static std::shared_ptr<const PeerMemory> of(std::int64_t pid, std::uint64_t magic,
                                              const SharedPlace& place);

  // Return where these bytes of the other process are mapped; null if they are not in its shared memory.
  const std::byte* find(std::uint64_t address, std::size_t bytes) const;

 private:
  const std::byte* memory_ = nullptr;
  SharedPlace place_;
};

}  // namespace jaxcoded
