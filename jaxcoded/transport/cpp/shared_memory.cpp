#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

namespace jaxcoded {
namespace {

// How many bytes of addresses are reserved, in this process and in each reader. Reserved addresses take no
// memory.
constexpr std::size_t most = std::size_t{4} << 30;
constexpr std::size_t least = 32 << 10;  // shorter blocks are not worth whole pages
// In older kernels each signal ends an attempt, and a timer may send signals regularly.
constexpr int most_attempts = 3;

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t in_pages(std::size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// Map the file. Null if this is impossible, or if this process's address space is limited.
std::byte* map(const Descriptor& file, std::size_t bytes, int protection) {
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return nullptr;
  void* memory = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file.number(), 0);
  if (memory == MAP_FAILED) return nullptr;
  // a core file would fill the whole mapping with pages
  madvise(memory, bytes, MADV_DONTDUMP);
  return static_cast<std::byte*>(memory);
}

}  // namespace

SharedMemory::SharedMemory(std::uint64_t magic) {
  try {
    file_ = make_sealed("jaxcoded-memory", most);
  } catch (const std::exception&) {
    return;
  }
  memory_ = map(file_, most, PROT_READ | PROT_WRITE);
  if (!memory_) return;
  std::memcpy(memory_, &magic, sizeof magic);
  free_[page_bytes()] = most - page_bytes();
}

SharedMemory::~SharedMemory() {
  if (memory_) munmap(memory_, most);
}

SharedPlace SharedMemory::place() const {
  if (!memory_) return {};
  return {file_.number(), reinterpret_cast<std::uintptr_t>(memory_), most};
}

std::byte* SharedMemory::allocate(std::size_t bytes) {
  const std::size_t wanted = in_pages(bytes);
  std::unique_lock lock(mutex_);
  const auto hole = bytes < least ? free_.end() : std::ranges::find_if(free_, [&](const auto& entry) {
    return entry.second >= wanted;
  });
  if (hole == free_.end()) return heap.allocate(bytes);
  // If the file system has no memory, a write to the mapping would kill this process.
  bool allocated = false;
  for (int attempt = 0; attempt < most_attempts && !allocated; ++attempt) {
    allocated = fallocate(file_.number(), 0, static_cast<off_t>(hole->first),
                          static_cast<off_t>(wanted)) == 0;
    if (!allocated && errno != EINTR) break;
  }
  if (!allocated) return heap.allocate(bytes);
  auto taken = free_.extract(hole);  // this node is reused, so noting the rest takes no memory
  const std::size_t at = taken.key();
  if (taken.mapped() > wanted) {
    taken.key() += wanted;
    taken.mapped() -= wanted;
    free_.insert(std::move(taken));
  }
  return memory_ + at;
}

void SharedMemory::release(std::byte* data, std::size_t bytes) {
  if (!memory_ || data < memory_ || data >= memory_ + most) return heap.release(data, bytes);
  const auto at = static_cast<std::size_t>(data - memory_);
  const std::size_t length = in_pages(bytes);
  std::unique_lock lock(mutex_);
  fallocate(file_.number(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
            static_cast<off_t>(length));
  auto freed = free_.end();
  try {
    freed = free_.emplace(at, length).first;
  } catch (const std::bad_alloc&) {
    return;  // destructors call this: these addresses stay unused, but they take no memory
  }
  if (const auto next = std::next(freed); next != free_.end() && at + length == next->first) {
    freed->second += next->second;
    free_.erase(next);
  }
  if (freed == free_.begin()) return;
  if (const auto before = std::prev(freed); before->first + before->second == at) {
    before->second += freed->second;
    free_.erase(freed);
  }
}

std::shared_ptr<const PeerMemory> PeerMemory::of(std::int64_t pid, std::uint64_t magic,
                                                 const SharedPlace& place) {
  static std::mutex mutex;
  static std::map<std::uint64_t, std::weak_ptr<const PeerMemory>> known;
  std::unique_lock lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const PeerMemory>& peer = known[magic];
  std::shared_ptr<const PeerMemory> out = peer.lock();
  if (!out) peer = out = std::make_shared<const PeerMemory>(pid, magic, place);
  return out;
}

PeerMemory::PeerMemory(std::int64_t pid, std::uint64_t magic, const SharedPlace& place) {
  if (!place.bytes) return;
  Descriptor file;
  try {
    file = open_sealed(pid, place.descriptor, place.bytes, false);
  } catch (const std::exception&) {  // no descriptors are left: the kernel must copy
  }
  if (!file) return;
  memory_ = map(file, place.bytes, PROT_READ);
  place_ = place;
  std::uint64_t current = 0;
  if (memory_) std::memcpy(&current, memory_, sizeof current);
  if (current == magic) return;
  if (memory_) munmap(const_cast<std::byte*>(memory_), place.bytes);
  memory_ = nullptr;
}

PeerMemory::~PeerMemory() {
  if (memory_) munmap(const_cast<std::byte*>(memory_), place_.bytes);
}

const std::byte* PeerMemory::find(std::uint64_t address, std::size_t bytes) const {
  if (!memory_ || address < place_.address) return nullptr;
  const std::uint64_t at = address - place_.address;
  return at <= place_.bytes && bytes <= place_.bytes - at ? memory_ + at : nullptr;
}

}  // namespace jaxcoded
