// What processes of one host exchange in shared memory: wake-ups, each group's number of messages, and which of
// a rank's objects may still be fetched from where.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy.h"
#include "message.h"
#include "sealed.h"
#include "shared_memory.h"

namespace jaxcoded {

// The wake-ups sent to a process.
//
// Either the thread that waits for its call *drives*, that is, does the engine's work itself, or the progress
// thread does the work. The thread at work may sleep here. A wake-up wakes only this thread.
class WakeUp {
 public:
  enum Sleeper : std::uint32_t { driver = 1, progress = 2 };

  std::uint32_t sent() const { return sent_.load(); }  // how many wake-ups were sent
  void send();
  // Sleep until more than `seen` wake-ups were sent, or for this many seconds.
  void sleep(Sleeper sleeper, std::uint32_t seen, double seconds);
  void begin_driving() { state_.fetch_or(driving); }
  // Let the progress thread take over. The thread is woken if `wake`, or if more than `seen` wake-ups were sent.
  void end_driving(std::uint32_t seen, bool wake);

 private:
  static constexpr std::uint32_t driving = 4;
  void wake(Sleeper sleeper);

  std::atomic<std::uint32_t> sent_{0};
  std::atomic<std::uint32_t> state_{0};  // sleepers, and whether a thread drives
};

// Which objects of a group can be read: for each kind, the first round whose objects are valid. A reader checks
// this after it has read. The reader must not use an object that was withdrawn meanwhile.
struct Validity {
  std::atomic<std::uint64_t> group{0};  // the group's ticket; objects of a group with another ticket are not valid
  std::array<std::atomic<std::uint64_t>, Object::kinds> first_valid{};
};

// The memory that a process shares. Other processes write only to its wake-ups and counts. The rest lies on
// separate pages, which they map for reading.
struct Page {
  static constexpr std::size_t most_groups = 100;
  static constexpr std::size_t writable = 64 << 10;  // a multiple of the page size of every machine

  alignas(64) WakeUp wake_up;
  alignas(64) std::array<std::atomic<std::uint32_t>, most_groups> messages;  // messages sent to each group so far
  std::array<std::byte, writable - 64 - sizeof messages> unused;
  std::uint64_t magic;
  SharedPlace memory;
  std::array<Validity, most_groups> validity;
};
static_assert(offsetof(Page, magic) == Page::writable);

// What other processes need to find this process's page and memory.
struct Card {
  std::int64_t pid;
  std::int64_t descriptor;
  std::uint64_t magic;
  std::uint64_t magic_address;
  std::uint64_t slot;    // the group's place on the page
  std::uint64_t ticket;  // identifies the group
  std::uint64_t host;  // a hash of the host's name
};

// This process's own page.
class OwnPage {
 public:
  OwnPage();
  ~OwnPage();
  OwnPage(const OwnPage&) = delete;

  Page& operator*() const { return *page_; }
  Page* operator->() const { return page_; }
  // Memory for vectors that other ranks fetch.
  SharedMemory& memory() { return *memory_; }
  // Reserve a place for a group on the page, until `close_slot`.
  Card open_slot();
  void close_slot(std::uint64_t slot);
  // Let the processes of this host read this process's memory, even if Yama, a Linux security module, restricts
  // that. Does nothing if no card belongs to another process of this host, or with JAXCODED_PTRACER=OFF. The
  // permission is never withdrawn: MPI libraries request the same permission, and would lose it.
  void let_read(const std::vector<Card>& cards) const;

 private:
  Descriptor file_;
  Page* page_ = nullptr;
  std::unique_ptr<SharedMemory> memory_;
  std::array<bool, Page::most_groups> used_{};
  std::uint64_t tickets_ = 0;
};

// The page of another process of this host.
class PeerPage {
 public:
  // Open the page of a process. Returns null if the process is on another host or cannot be reached. Throws if
  // this process is out of descriptors or memory.
  static std::unique_ptr<PeerPage> open(const Card& card);
  ~PeerPage();

  // Count a message sent to the group, and wake the process of this page.
  void tell() const {
    page_->messages[card_.slot].fetch_add(1);
    page_->wake_up.send();
  }
  // Whether the other process's memory can be read.
  bool readable() const { return readable_; }
  // Copy from the other process's memory. Returns false if the memory is not there (any more).
  bool read(std::uint64_t address, std::byte* to, std::size_t bytes, Copy how) const;
  // Whether the other process's objects of this round can still be read. By now the slot may belong to another
  // group, whose `first_valid` starts from 0. So the slot's group is checked last.
  bool valid(std::size_t what, std::uint64_t round) const {
    const Validity& validity = page_->validity[card_.slot];
    return validity.first_valid[what].load() <= round && validity.group.load() == card_.ticket;
  }

 private:
  PeerPage(const Card& card, Page* page) : card_(card), page_(page) {}

  bool read_by_kernel(std::uint64_t address, std::byte* to, std::size_t bytes) const;

  Card card_;
  Page* page_;
  bool readable_ = false;
  std::shared_ptr<const PeerMemory> memory_;
};

}  // namespace jaxcoded
