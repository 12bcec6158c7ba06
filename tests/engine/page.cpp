// What processes share, without groups. Runs the test that its argument names, see test_page.py. If something
// is wrong, the exit status is 1, and a line says what.
#include "page.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

using namespace jaxcoded;

namespace {

int calls_of_prctl = 0;
bool no_memory = false;

bool wrong = false;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  wrong = true;
}

// A reader checks whether what it has read is still valid. Meanwhile the group's place on the page goes to
// another group, so it is not: this happens between any two instructions of the reader.
void withdrawn() {
  constexpr std::size_t what = 0;
  constexpr std::uint64_t round = 3, first_valid = 5;
  for (int steps = 0;; ++steps) {
    OwnPage page;
    const Card card = page.open_slot();
    page->validity[card.slot].first_valid[what].store(first_valid);
    const pid_t reader = fork();
    if (reader == 0) {
      const auto peer = PeerPage::open(card);
      if (!peer || ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
      raise(SIGSTOP);
      _exit(peer->valid(what, round));
    }
    int status = 0;
    waitpid(reader, &status, 0);
    for (int step = 0; step < steps && WIFSTOPPED(status); ++step) {
      ptrace(PTRACE_SINGLESTEP, reader, nullptr, nullptr);
      waitpid(reader, &status, 0);
    }
    const bool last = !WIFSTOPPED(status);
    page.close_slot(card.slot);
    expect(page.open_slot().slot == card.slot, "the next group has the place");
    if (!last) {
      ptrace(PTRACE_CONT, reader, nullptr, nullptr);
      waitpid(reader, &status, 0);
    }
    expect(WIFEXITED(status) && WEXITSTATUS(status) != 2, "the reader can be stopped");
    expect(WEXITSTATUS(status) == 0, "what is withdrawn stays so");
    if (last || wrong) break;
  }
}

// Another process may have the number of a process that has ended.
void number() {
  OwnPage page;
  const Card card = page.open_slot();
  const auto peer = PeerPage::open(card);
  const int value = 7;
  const auto read = [&] {
    int copy = 0;
    return peer->read(reinterpret_cast<std::uintptr_t>(&value), reinterpret_cast<std::byte*>(&copy),
                      sizeof copy, Copy::cached) &&
           copy == value;
  };
  expect(peer && peer->readable() && read(), "memory can be read");
  *reinterpret_cast<std::uint64_t*>(card.magic_address) ^= 1;
  expect(!read(), "the memory of another process is not");
  *reinterpret_cast<std::uint64_t*>(card.magic_address) ^= 1;
  expect(read(), "and that of the first one still is");
}

// A process of that number may have any file in place of a page.
void descriptor() {
  OwnPage page;
  Card card = page.open_slot();
  const int unsealed = memfd_create("jaxcoded", 0);
  expect(ftruncate(unsealed, sizeof(Page)) == 0 &&
             pwrite(unsealed, &card.magic, sizeof card.magic, Page::writable) > 0,
         "there is memory");
  card.descriptor = unsealed;
  expect(!PeerPage::open(card), "memory that may shrink is not mapped");

  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  expect(grantpt(terminal) == 0 && unlockpt(terminal) == 0, "there is a terminal");
  card.descriptor = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  expect(!PeerPage::open(card), "a terminal is not mapped");
  expect(open("/dev/tty", O_RDONLY) < 0, "nor does it become this process's");
}

// Other processes may read this process's memory only if some of them need to.
void ptracer() {
  OwnPage page;
  const Card own = page.open_slot();
  Card near = own, far = own;
  near.magic = far.magic = ~own.magic;
  far.host = ~own.host;
  page.let_read({own, far});
  expect(calls_of_prctl == 0, "nobody may");
  setenv("JAXCODED_PTRACER", "OFF", 1);
  page.let_read({own, near});
  expect(calls_of_prctl == 0, "nobody may with JAXCODED_PTRACER=OFF");
  unsetenv("JAXCODED_PTRACER");
  page.let_read({own, near});
  expect(calls_of_prctl == 1, "the others on the host may");
}

// Whether the reader gets the other process's bytes, and the bytes around its copy stay untouched.
bool reads(const PeerPage& peer, const std::byte* from, std::size_t bytes, std::size_t shift, Copy how) {
  std::vector<std::byte> copy(bytes + 2 * shift, std::byte{0xee});
  const bool read = peer.read(reinterpret_cast<std::uintptr_t>(from), copy.data() + shift, bytes, how);
  const auto untouched = [&](auto begin) {
    return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(shift),
                       [](std::byte it) { return it == std::byte{0xee}; });
  };
  return read && std::memcmp(copy.data() + shift, from, bytes) == 0 && untouched(copy.begin()) &&
         untouched(copy.end() - static_cast<std::ptrdiff_t>(shift));
}

void fill(std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 7 + i / 251);
}

// Vectors of a process are equal when another process reads them. The kernel is not needed for vectors in
// shared memory. Vectors are short and long, and begin at all places in a cache line.
void memory() {
  constexpr std::size_t bytes = 1 << 20;
  OwnPage page;
  std::byte* shared = page.memory().allocate(bytes);
  std::vector<std::byte> alone(bytes);
  fill(shared, bytes);
  fill(alone.data(), bytes);
  const Card card = page.open_slot();
  const auto peer = PeerPage::open(card);
  const SharedPlace place = page->memory;
  const auto lies_in = [&](const std::byte* data) {
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    return at >= place.address && at < place.address + place.bytes;
  };
  expect(place.bytes && lies_in(shared) && !lies_in(alone.data()), "pools get shared memory");
  expect(!lies_in(page.memory().allocate(1 << 10)), "but for short vectors");
  const PeerMemory map(card.pid, card.magic, place);
  const auto address = reinterpret_cast<std::uintptr_t>(shared);
  expect(map.find(address, bytes) && map.find(address, bytes) != shared, "which others map");
  expect(!map.find(place.address + place.bytes - 1, 2) && !map.find(place.address - 1, 1) &&
             !map.find(address, place.bytes),
         "as far as it goes");
  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{4096},
                                   (std::size_t{128} << 10) - 1, std::size_t{128} << 10, bytes / 2 + 5}) {
    for (std::size_t shift = 0; shift < 70; shift += 3) {
      for (const Copy how : {Copy::cached, Copy::past_caches}) {
        expect(reads(*peer, shared + shift, length, shift, how), "shared memory is read");
        expect(reads(*peer, alone.data() + shift, length, shift, how), "and so is other memory");
      }
    }
  }
  expect(PeerMemory::of(card.pid, card.magic, place) == PeerMemory::of(card.pid, card.magic, place),
         "once for all groups");
  const PeerMemory stranger(card.pid, card.magic + 1, place);
  expect(!stranger.find(address, 1), "another process's memory is not");
}

// If no file can be opened, or addresses are limited, the kernel reads.
void without() {
  constexpr std::size_t bytes = 1 << 20;
  OwnPage page;
  std::byte* data = page.memory().allocate(bytes);
  fill(data, bytes);
  const Card card = page.open_slot();
  rlimit files{}, addresses{};
  getrlimit(RLIMIT_NOFILE, &files);
  rlimit none = files;
  none.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  const PeerMemory unopened(card.pid, card.magic, page->memory);
  setrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_AS, &addresses);
  addresses.rlim_cur = std::size_t{64} << 30;
  setrlimit(RLIMIT_AS, &addresses);
  const PeerMemory unmapped(card.pid, card.magic, page->memory);
  for (const PeerMemory* it : {&unopened, &unmapped}) {
    expect(!it->find(reinterpret_cast<std::uintptr_t>(data), 1), "nothing is mapped");
  }
  const auto peer = PeerPage::open(card);
  expect(reads(*peer, data, bytes, 3, Copy::past_caches), "all is read");
  OwnPage other;
  expect(!other->memory.bytes, "there is no shared memory");
  std::byte* vector = other.memory().allocate(bytes);
  fill(vector, bytes);
  other.memory().release(vector, bytes);
}

// A vector that was announced stays unchanged when its process is killed.
void killed() {
  constexpr std::size_t bytes = 1 << 20;
  struct Told {
    Card card;
    std::uintptr_t address;
  } told{};
  int ends[2];
  expect(pipe(ends) == 0, "there is a pipe");
  const pid_t writer = fork();
  if (writer == 0) {
    OwnPage page;
    std::byte* data = page.memory().allocate(bytes);
    fill(data, bytes);
    told = {page.open_slot(), reinterpret_cast<std::uintptr_t>(data)};
    if (write(ends[1], &told, sizeof told) != sizeof told) _exit(2);
    for (;;) pause();
  }
  expect(read(ends[0], &told, sizeof told) == sizeof told, "the writer writes");
  const auto peer = PeerPage::open(told.card);
  std::vector<std::byte> expected(bytes), copy(bytes);
  fill(expected.data(), bytes);
  expect(peer != nullptr, "its page is mapped, and its memory");
  kill(writer, SIGKILL);
  waitpid(writer, nullptr, 0);
  expect(peer->read(told.address, copy.data(), bytes, Copy::past_caches) && copy == expected, "all of it is still there");
}

// Memory that was given back is reused, and takes no memory until then.
void reused() {
  constexpr std::size_t bytes = 1 << 20;
  OwnPage page;
  struct stat status;
  const auto resident = [&] {
    fstat(static_cast<int>(page->memory.descriptor), &status);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  };
  const std::size_t before = resident();
  std::vector<std::byte*> given;
  for (int i = 0; i < 3; ++i) fill(given.emplace_back(page.memory().allocate(bytes)), bytes);
  expect(resident() >= before + 3 * bytes, "it takes memory");
  for (const int i : {0, 2, 1}) page.memory().release(given[static_cast<std::size_t>(i)], bytes);
  expect(resident() == before, "it is given back");
  std::byte* all = page.memory().allocate(3 * bytes);
  expect(all == given[0], "as one");
  std::byte* other = page.memory().allocate(page->memory.bytes);
  expect(other < all || other > all + page->memory.bytes, "where there is no more, it is of the heap");
  page.memory().release(other, page->memory.bytes);
  page.memory().release(all, 3 * bytes);
}

// If there is no memory to note a block that is given back, its memory is still returned, and its place is
// reused.
void unnoted() {
  constexpr std::size_t bytes = 1 << 20;
  OwnPage page;
  Spare spare{page.memory()};
  Pool pool{bytes, spare};
  const std::byte* before = pool.take(bytes).data();
  auto kept = std::make_unique<Buffer>(pool.take(3 * bytes));
  no_memory = true;
  kept.reset();
  const std::byte* after = page.memory().allocate(bytes);
  no_memory = false;
  const auto shared = [&](const std::byte* data) {
    const auto at = reinterpret_cast<std::uintptr_t>(data), start = static_cast<std::uintptr_t>(page->memory.address);
    return at >= start && at < start + page->memory.bytes;
  };
  expect(shared(before) && shared(after), "shared memory is not lost");
  expect(shared(page.memory().allocate(bytes)), "nor is the rest of it");
}

}  // namespace

// Replaces the standard `operator new`.
void* operator new(std::size_t bytes) {
  void* const memory = no_memory ? nullptr : std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
extern "C" int prctl(int, ...) {
  ++calls_of_prctl;
  return 0;
}

int main(int, char** arguments) {
  const std::map<std::string, void (*)()> known{{"withdrawn", withdrawn},
                                                {"number", number},
                                                {"descriptor", descriptor},
                                                {"ptracer", ptracer},
                                                {"memory", memory},
                                                {"without", without},
                                                {"killed", killed},
                                                {"reused", reused},
                                                {"unnoted", unnoted}};
  known.at(arguments[1])();
  return wrong;
}
