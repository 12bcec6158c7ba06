// Memory that is reused: fresh pages cost more than the sums formed in them.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace jaxcoded {

class Pool;

// A block of memory, which returns to its pool when the `Buffer` is destroyed. Empty by default.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~Buffer();

  std::byte* data() const { return data_; }
  std::size_t capacity() const { return capacity_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class Pool;
  Buffer(Pool* pool, std::byte* data, std::size_t capacity)
      : pool_(pool), data_(data), capacity_(capacity) {}
  void swap(Buffer& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
  }

  Pool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
};

// The source of a pool's memory, which is aligned to 64 bytes.
class Source {
 public:
  virtual ~Source() = default;
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte* data, std::size_t bytes) = 0;
};

class Heap : public Source {
 public:
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* data, std::size_t bytes) override;
};
inline Heap heap;

// Keeps memory that pools have given back, for any pool of the process that requests a block of the same
// length.
class Spare : public Source {
 public:
  // If memory runs out, `other` gives back what it keeps, too.
  explicit Spare(Source& source, Spare* other = nullptr) : source_(source), other_(other) {}
  ~Spare() override { give_back(0); }

  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* data, std::size_t bytes) override;
  // Keep at most this many bytes, and give back the rest.
  void give_back(std::size_t most);

 private:
  void trim(std::size_t most);

  Source& source_;
  Spare* other_;
  std::mutex mutex_;
  std::multimap<std::size_t, std::byte*> free_;  // by length
  std::size_t kept_ = 0;
};

// Not safe for use from several threads at once.
class Pool {
 public:
  // Keep up to `most` unused bytes. A request gets the smallest unused block that is large enough.
  explicit Pool(std::size_t most, Source& source = heap) : most_(most), source_(source) {}
  Pool(const Pool&) = delete;
  ~Pool();

  // Take at least `bytes` and at least one byte, aligned to 64.
  Buffer take(std::size_t bytes);

  void keep(std::size_t most) { most_ = most; }

  // Memory handed out, and memory kept for later, in bytes.
  std::size_t used() const { return used_; }
  std::size_t kept() const { return kept_; }

 private:
  friend class Buffer;
  void give(std::byte* data, std::size_t capacity);
  void trim(std::size_t most);

  std::multimap<std::size_t, std::byte*> free_;  // by capacity
  std::size_t most_;
  Source& source_;
  std::size_t used_ = 0;
  std::size_t kept_ = 0;
};

}  // namespace jaxcoded
