#include "page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>

namespace jaxcoded {
namespace {

// A word of this process's own memory that others try to read.
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

Page* map(int descriptor) {
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);
}

}  // namespace

void Bell::ring() {
  rings_.fetch_add(1);
  const std::uint32_t state = state_.load();
  if (state & driver) {
    wake(driver);
  } else if (!(state & driving) && (state & progress)) {
    wake(progress);
  }
}

void Bell::wake(Sleeper who) { futex(rings_, FUTEX_WAKE_BITSET, 1, nullptr, who); }

void Bell::sleep(Sleeper who, std::uint32_t seen, double seconds) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  const auto nanoseconds =
      static_cast<std::int64_t>(seconds * 1e9) + until.tv_nsec + until.tv_sec * 1'000'000'000;
  until.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
  until.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  state_.fetch_or(who);
  // Does not sleep if there was a ring; a ring from now on sees the sleeper.
  futex(rings_, FUTEX_WAIT_BITSET, seen, &until, who);
  state_.fetch_and(~static_cast<std::uint32_t>(who));
}

void Bell::end_driving(std::uint32_t seen, bool wake_it) {
  state_.fetch_and(~driving);
  if (wake_it || rings_.load() != seen) wake(progress);
}

OwnPage::OwnPage() {
  descriptor_ = static_cast<int>(syscall(SYS_memfd_create, "jaxcoded", MFD_CLOEXEC));
  if (descriptor_ < 0 || ftruncate(descriptor_, sizeof(Page)) != 0 || !(page_ = map(descriptor_))) {
    throw std::runtime_error("no shared memory for the engine (memfd_create failed)");
  }
  new (page_) Page;
  std::random_device random;
  magic_word = page_->magic = (std::uint64_t{random()} << 32) | random();
  // Where Yama restricts it, let the other ranks on this host read this process's memory.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

OwnPage::~OwnPage() {
  munmap(page_, sizeof(Page));
  close(descriptor_);
}

Card OwnPage::open_slot() {
  for (std::uint64_t slot = 0; slot < Page::most_groups; ++slot) {
    if (used_[slot]) continue;
    used_[slot] = true;
    for (auto& word : page_->validity[slot].first_valid) word.store(0);
    page_->validity[slot].group.store(++tickets_);
    return {getpid(), descriptor_, page_->magic, reinterpret_cast<std::uintptr_t>(&magic_word),
            slot, tickets_, host()};
  }
  throw std::runtime_error("a process can have " + std::to_string(Page::most_groups) +
                           " open groups with transport=\"engine\": close some");
}

void OwnPage::close_slot(std::uint64_t slot) {
  page_->validity[slot].group.store(0);
  used_[slot] = false;
}

std::unique_ptr<PeerPage> PeerPage::open(const Card& card) {
  if (card.host != host()) return nullptr;
  const std::string path =
      "/proc/" + std::to_string(card.pid) + "/fd/" + std::to_string(card.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  // A process of that number may be another one, on another host: it need not have a page there.
  Page* page = lseek(descriptor, 0, SEEK_END) >= static_cast<off_t>(sizeof(Page)) ? map(descriptor)
                                                                                : nullptr;
  close(descriptor);
  if (!page) return nullptr;
  std::unique_ptr<PeerPage> peer(new PeerPage(card, page));
  if (page->magic != card.magic) return nullptr;
  std::uint64_t word = 0;
  peer->readable_ = peer->read(card.magic_address, reinterpret_cast<std::byte*>(&word), sizeof word) &&
                    word == card.magic;
  return peer;
}

PeerPage::~PeerPage() { munmap(page_, sizeof(Page)); }

bool PeerPage::read(std::uint64_t address, std::byte* to, std::size_t bytes) const {
  iovec here{to, bytes};
  iovec there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(static_cast<pid_t>(card_.pid), &here, 1, &there, 1, 0) ==
         static_cast<ssize_t>(bytes);
}

}  // namespace jaxcoded
