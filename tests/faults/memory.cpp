// Too little memory: some of the engine's allocations fail. This library must be preloaded.
//
// Vectors need aligned memory, which distinguishes them from all other allocations. If an allocation for a
// vector fails, nothing helps. Other allocations succeed once `std::new_handler` has given back some memory.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::uintptr_t first = 0, last = 0;  // addresses of the engine
std::atomic<long> vectors = 0, others = 0;
long every_vector = 0, every_other = 0;  // one of this many fails; 0: none
std::atomic<std::size_t> refused = 0;     // bytes of the last vector that failed: another attempt fails, too
std::atomic<std::size_t> never = 0;       // allocations of this length always fail, except for vectors; 0: none

bool of_the_engine(void* caller) {
  const auto address = reinterpret_cast<std::uintptr_t>(caller);
  return address >= first && address < last;
}

bool fails(std::atomic<long>& count, long every, void* caller) {
  return every && of_the_engine(caller) && ++count % every == 0;
}

void* taken(void* memory) {
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" void little_memory(long each_vector, long each_other) {
  const auto find = [](dl_phdr_info* info, std::size_t, void*) {
    if (!std::strstr(info->dlpi_name, "/_engine.")) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
      first = info->dlpi_addr + part.p_vaddr;
      last = first + part.p_memsz;
    }
    return 1;
  };
  if (!dl_iterate_phdr(find, nullptr)) std::abort();
  every_vector = each_vector;
  every_other = each_other;
  refused = 0;
}

extern "C" void refuse_bytes(std::size_t bytes) {
  little_memory(0, 0);
  never = bytes;
}

// How many allocations have failed.
extern "C" long memory_failures() {
  return (every_vector ? vectors / every_vector : 0) + (every_other ? others / every_other : 0);
}

void* operator new(std::size_t bytes) {
  if (never && bytes == never && of_the_engine(__builtin_return_address(0))) throw std::bad_alloc();
  if (fails(others, every_other, __builtin_return_address(0))) {
    const std::new_handler more = std::get_new_handler();
    if (!more) throw std::bad_alloc();
    more();
  }
  return taken(std::malloc(bytes ? bytes : 1));
}

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  if (bytes == refused || fails(vectors, every_vector, __builtin_return_address(0))) {
    refused = bytes;
    throw std::bad_alloc();
  }
  const auto least = static_cast<std::size_t>(alignment);
  return taken(std::aligned_alloc(least, (bytes + least - 1) / least * least));
}
