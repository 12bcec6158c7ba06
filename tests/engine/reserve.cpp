// What a thread's turn gets if there is no other memory, after another thread has filled the reserve again.
#include "reserve.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <semaphore>
#include <thread>

using namespace jaxcoded;

namespace {

constexpr int needed = 100;
constexpr std::size_t bytes = 200;
char* volatile kept[needed];

// Let this process get no more address space, or lift the limit.
void limit(bool on) {
  std::size_t pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (!file || std::fscanf(file, "%zu", &pages) != 1) std::exit(2);
  std::fclose(file);
  rlimit its;
  getrlimit(RLIMIT_AS, &its);
  its.rlim_cur = on ? pages * static_cast<std::size_t>(getpagesize()) : its.rlim_max;
  setrlimit(RLIMIT_AS, &its);
}

// Take all memory that malloc has for this thread, except the reserve, and link it in a list.
void exhaust() {
  void** all = nullptr;
  while (auto* const next = static_cast<void**>(std::malloc(bytes))) {
    *next = all;
    all = next;
  }
}

// How many allocations, of `most`, a turn gets.
int turn(int most) {
  const reserve::Turn turn;
  int got = 0;
  try {
    for (; got < most; ++got) kept[got] = new char[bytes];
  } catch (const std::bad_alloc&) {
  }
  return got;
}

}  // namespace

int main() {
  std::free(std::malloc(16 << 20));  // as NumPy does: from now on, shorter blocks come from a thread's arena
  reserve::keep();
  int got = 0;
  std::binary_semaphore used(0), filled(0), over(0);
  const auto own_arena = [] { std::free(std::malloc(bytes)); };
  std::thread other([&] {
    own_arena();
    used.acquire();
    {
      const reserve::Turn turn;
    }
    filled.release();
    over.acquire();
  });
  std::thread([&] {
    own_arena();
    limit(true);
    exhaust();
    turn(1);
    limit(false);
    used.release();
    filled.acquire();
    limit(true);
    exhaust();
    got = turn(needed);
    limit(false);
    over.release();
  }).join();
  other.join();
  if (got == needed) return 0;
  std::printf("%d of %d allocations\n", got, needed);
  return 1;
}
