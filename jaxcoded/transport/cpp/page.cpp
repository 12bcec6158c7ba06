#include "page.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace jaxcoded {
namespace {

// A word of this process's own memory, which other processes read to test whether they may.
std::uint64_t magic_word;

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* until, std::uint32_t bits) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, until,
                 nullptr, bits);
}

std::uint64_t host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return std::hash<std::string_view>{}(name);
}

Page* map(const Descriptor& file, int protection) {
  void* memory = mmap(nullptr, sizeof(Page), protection, MAP_SHARED, file.number(), 0);
  if (memory == MAP_FAILED) cannot_share("mmap");
  return static_cast<Page*>(memory);
}

}  // namespace

void WakeUp::send() {
  sent_.fetch_add(1);
  const std::uint32_t state = state_.load();
  if (state & driver) {
    wake(driver);
  } else if (!(state & driving) && (state & progress)) {
    wake(progress);
  }
}

void WakeUp::wake(Sleeper sleeper) { futex(sent_, FUTEX_WAKE_BITSET, 1, nullptr, sleeper); }

void WakeUp::sleep(Sleeper sleeper, std::uint32_t seen, double seconds) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  const auto nanoseconds =
      static_cast<std::int64_t>(seconds * 1e9) + until.tv_nsec + until.tv_sec * 1'000'000'000;
  until.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
  until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  state_.fetch_or(sleeper);
  // Does not sleep if a wake-up was sent meanwhile. Later senders see the sleeper.
  futex(sent_, FUTEX_WAIT_BITSET, seen, &until, sleeper);
  state_.fetch_and(~static_cast<std::uint32_t>(sleeper));
}

void WakeUp::end_driving(std::uint32_t seen, bool wake_it) {
  state_.fetch_and(~driving);
  if (wake_it) sent_.fetch_add(1);  // otherwise the progress thread might fall asleep just now
  if (sent_.load() != seen) wake(progress);
}

OwnPage::OwnPage()
    : file_(make_sealed("jaxcoded-page", sizeof(Page))), page_(new (map(file_, PROT_READ | PROT_WRITE)) Page) {
  std::random_device random;
  magic_word = page_->magic = (std::uint64_t{random()} << 32) | random();
  memory_ = std::make_unique<SharedMemory>(page_->magic);
  page_->memory = memory_->place();
}

OwnPage::~OwnPage() { munmap(page_, sizeof(Page)); }

Card OwnPage::open_slot() {
  for (std::uint64_t slot = 0; slot < Page::most_groups; ++slot) {
    if (used_[slot]) continue;
    used_[slot] = true;
    for (auto& word : page_->validity[slot].first_valid) word.store(0);
    page_->validity[slot].group.store(++tickets_);
    return {getpid(), file_.number(), page_->magic, reinterpret_cast<std::uintptr_t>(&magic_word),
            slot, tickets_, host()};
  }
  throw std::runtime_error("a process can have " + std::to_string(Page::most_groups) +
                           " open groups with transport=\"engine\": close some");
}

void OwnPage::close_slot(std::uint64_t slot) {
  page_->validity[slot].group.store(0);
  // readers must see this before the memory of the group's objects is reused
  std::atomic_thread_fence(std::memory_order_seq_cst);
  used_[slot] = false;
}

void OwnPage::let_read(const std::vector<Card>& cards) const {
  const char* ptracer = std::getenv("JAXCODED_PTRACER");
  if (ptracer && std::string_view(ptracer) == "OFF") return;
  const bool near = std::ranges::any_of(cards, [](const Card& card) {
    return card.host == host() && card.magic != magic_word;
  });
  if (near) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

std::unique_ptr<PeerPage> PeerPage::open(const Card& card) {
  if (card.host != host()) return nullptr;
  const Descriptor file = open_sealed(card.pid, card.descriptor, sizeof(Page), true);
  if (!file) return nullptr;
  std::unique_ptr<PeerPage> peer(new PeerPage(card, map(file, PROT_READ)));
  if (peer->page_->magic != card.magic) return nullptr;
  if (mprotect(peer->page_, Page::writable, PROT_READ | PROT_WRITE) != 0) cannot_share("mprotect");
  peer->memory_ = PeerMemory::of(card.pid, card.magic, peer->page_->memory);
  peer->readable_ = peer->read_by_kernel(card.magic_address, nullptr, 0);
  return peer;
}

PeerPage::~PeerPage() { munmap(page_, sizeof(Page)); }

bool PeerPage::read(std::uint64_t address, std::byte* to, std::size_t bytes, Copy how) const {
  const std::byte* from = memory_->find(address, bytes);
  if (!from) return read_by_kernel(address, to, bytes);
  copy(to, from, bytes, how);
  return true;
}

bool PeerPage::read_by_kernel(std::uint64_t address, std::byte* to, std::size_t bytes) const {
  // Read the data together with a word that identifies the process. The process may have ended, and another
  // process may have its number.
  std::uint64_t magic = 0;
  const iovec local[2] = {{&magic, sizeof magic}, {to, bytes}};
  const iovec remote[2] = {{reinterpret_cast<void*>(card_.magic_address), sizeof magic},
                           {reinterpret_cast<void*>(address), bytes}};
  return process_vm_readv(static_cast<pid_t>(card_.pid), local, 2, remote, 2, 0) ==
             static_cast<ssize_t>(sizeof magic + bytes) &&
         magic == card_.magic;
}

}  // namespace jaxcoded
