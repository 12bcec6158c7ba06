// Programs that repeat themselves take memory from a pool. `pool SEEDS` prints what went wrong. Also tests
// other limited memory.
#include "pool.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "reports.h"
#include "reserve.h"

using namespace jaxcoded;

namespace {

// Counts allocations, and checks that each block given back was handed out with the same length.
class Counting : public Source {
 public:
  std::byte* allocate(std::size_t bytes) override {
    if (here + bytes > most) throw std::bad_alloc();
    ++made;
    auto* data = reinterpret_cast<std::byte*>(next += 1 << 20);  // no code writes there
    all[data] = bytes;
    here += bytes;
    return data;
  }
  void release(std::byte* data, std::size_t bytes) override {
    if (all.at(data) != bytes) std::puts("another length is given back"), std::exit(1);
    all.erase(data);
    here -= bytes;
  }

  std::size_t made = 0, here = 0, most = SIZE_MAX;

 private:
  std::uintptr_t next = 0;
  std::map<std::byte*, std::size_t> all;
};

// Whether the reserve belongs to one thread alone while this thread has a turn, and to all threads otherwise.
bool turns() {
  const auto gets = [] {
    try {
      std::get_new_handler()();
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  };
  const auto another_gets = [&] {
    bool out = false;
    std::thread([&] { out = gets(); }).join();
    return out;
  };
  for (int i = 0; i < 2; ++i) reserve::keep();  // twice, as if the first engine could not be made
  {
    const reserve::Turn turn;
    if (another_gets() || !gets() || gets()) return false;
  }
  return reserve::fill() && another_gets();
}

}  // namespace

int main(int, char** arguments) {
  for (unsigned seed = 0; seed < std::strtoul(arguments[1], nullptr, 10); ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](unsigned least, unsigned most) {
      return std::uniform_int_distribution<unsigned>(least, most)(random);
    };
    // The calls of a period. For each call: how many blocks of which length it needs at one time.
    std::vector<std::pair<unsigned, std::size_t>> calls(draw(1, 6));
    for (auto& [blocks, bytes] : calls) {
      blocks = draw(1, 6);
      bytes = std::size_t{1} << draw(10, 27);
      bytes += draw(0, static_cast<unsigned>(bytes));
    }
    Counting source;
    Pool pool{0, source};
    std::size_t most = 0, before = 0;
    for (int period = 0; period < 60; ++period) {
      if (period == 30) before = source.made;
      for (const auto& [blocks, bytes] : calls) {
        std::vector<Buffer> buffers;
        for (unsigned i = 0; i < blocks; ++i) {
          buffers.push_back(pool.take(bytes));
          if (buffers.back().capacity() < bytes) std::puts("too short"), std::exit(1);
          most = std::max(most, pool.used());
          pool.keep(most);
        }
      }
      if (pool.used() || pool.kept() != source.here || pool.kept() > most) {
        std::printf("seed %u: %zu used, %zu kept, %zu here\n", seed, pool.used(), pool.kept(), source.here);
        return 1;
      }
    }
    if (source.made != before) {
      std::printf("seed %u: %zu blocks in 30 periods\n", seed, source.made - before);
      return 1;
    }
  }
  // Groups that sum one after the other share memory that no group uses now.
  Counting source;
  Spare spare{source};
  constexpr std::size_t bytes = 64 << 20;
  for (int group = 0; group < 20; ++group) {
    Pool pool{0, spare};
    const Buffer message = pool.take(bytes), result = pool.take(bytes);
  }
  if (source.made != 2) return std::printf("20 groups: %zu blocks\n", source.made), 1;
  spare.give_back(0);
  if (source.here) return std::printf("%zu bytes are not given back\n", source.here), 1;
  // At most this much is kept, however much was in use at a time.
  constexpr std::size_t most = 1 << 30;
  {
    Pool pool{0, spare};
    std::vector<Buffer> buffers;
    while (pool.used() <= 3 * most) buffers.push_back(pool.take(bytes));
  }
  if (source.here > most) return std::printf("%zu bytes are kept\n", source.here), 1;
  // Before memory runs out, all give back what they keep unused.
  Counting scarce;
  scarce.most = 3 * bytes;
  Spare one{scarce}, other{scarce, &one};
  {
    Pool before{0, one};
    const Buffer kept = before.take(bytes);
  }
  Pool pool{bytes, other};
  { const Buffer kept = pool.take(bytes); }
  if (scarce.here != 2 * bytes) return std::printf("%zu bytes are kept\n", scarce.here), 1;
  const Buffer all = pool.take(3 * bytes);
  if (!turns()) return std::puts("another thread has got what is put aside for a turn"), 1;
  // A reader that is too slow loses the oldest reports, and learns how many.
  Reports<int> reports(4);
  for (int i = 0; i < 10; ++i) reports.add(i);
  const std::uint64_t lost = reports.take_lost();
  if (lost != 6 || reports.next() != 6 || reports.take_lost()) return std::puts("other reports are lost"), 1;
}
