// A stand-in for NVIDIA's driver, as far as the engine uses it.
//
// The host cannot touch the memory of this GPU: it is mapped twice, once for the caller without any access, and
// once for the streams. Each stream is a slow thread. Some mistakes would give a wrong sum on a real driver,
// but only once in a while. Here each of them is noted as misuse, every time.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int not_initialized = 3, invalid_context = 201, invalid_value = 1, not_ready = 600,
              lost = 700;

struct Context {
  std::atomic<bool> lost{false};
};

struct Reached {
  std::atomic<bool> yes{false};
};

struct Event {
  Context* context;
  std::shared_ptr<Reached> latest;  // record; null before the first
};

struct Pending {
  const char* start;
  std::size_t bytes;
  bool written;
};

struct Operation {
  std::function<void()> run;
  std::shared_ptr<Reached> wait_for;
  bool copies = false;
  std::list<Pending>::iterator host;
  bool on_host = false;
};

struct Stream {
  Context* context;
  std::deque<Operation> queue;
  bool busy = false;
};

struct Device {
  char* inside;  // the address for the streams
  std::size_t bytes;
};

// When and how often a function must fail.
struct Failures {
  int after, times;
};

// Never destroyed: streams work until the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
bool initialized = false;
auto& devices = *new std::map<char*, Device>;  // memory of the GPU
auto& pinned = *new std::map<const char*, std::size_t>;
auto& pending = *new std::list<Pending>;
auto& misuses = *new std::vector<std::string>;
auto& failing = *new std::map<std::string, Failures>;  // by function
int copies_until_lost = 0;
std::uint64_t copies = 0, copied_bytes = 0, pins = 0;
int most_delay = 200;                          // microseconds
thread_local Context* current = nullptr;
thread_local bool in_host_function = false;

void misuse(const std::string& words) { misuses.push_back(words); }

// Whether this call of a function must fail, or is not allowed here.
int enter(const char* name, Context* of) {
  if (in_host_function) misuse(std::string(name) + " is called from a host function");
  if (!initialized) return not_initialized;
  if (!current) {
    misuse(std::string(name) + " is called without a context");
    return invalid_context;
  }
  if (of && of != current) misuse(std::string(name) + " is called in another context");
  if (current->lost) return lost;
  const auto found = failing.find(name);
  if (found == failing.end() || --found->second.after > 0) return 0;
  if (--found->second.times == 0) failing.erase(found);
  return invalid_value;
}

// Memory of the GPU as a stream sees it.
char* inside(unsigned long long address, std::size_t bytes) {
  auto* place = reinterpret_cast<char*>(address);
  auto found = devices.upper_bound(place);
  if (found != devices.begin()) {
    --found;
    const std::size_t offset = static_cast<std::size_t>(place - found->first);
    if (offset + bytes <= found->second.bytes) return found->second.inside + offset;
  }
  misuse("a copy beyond the memory of the GPU");
  return nullptr;
}

bool overlaps(const char* one, std::size_t bytes, const char* other, std::size_t others) {
  return one < other + others && other < one + bytes;
}

std::uint64_t checksum(const char* data, std::size_t bytes) {
  std::uint64_t out = 14695981039346656037u;
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, data + i, 8);
    out = (out ^ word) * 1099511628211u;
  }
  for (std::size_t i = bytes / 8 * 8; i < bytes; ++i) {
    out = (out ^ static_cast<unsigned char>(data[i])) * 1099511628211u;
  }
  return out;
}

bool use_host(const char* start, std::size_t bytes, bool written, Operation& operation) {
  auto found = pinned.upper_bound(start);
  bool here = false;
  if (found != pinned.begin()) {
    --found;
    here = start + bytes <= found->first + found->second;
  }
  if (!here) misuse("a copy from or to memory that is not pinned");
  for (const Pending& other : pending) {
    if ((written || other.written) && overlaps(start, bytes, other.start, other.bytes)) {
      misuse("pinned memory is used again while a copy is pending");
    }
  }
  operation.copies = operation.on_host = true;
  operation.host = pending.insert(pending.end(), {start, bytes, written});
  return here;
}

void work(Stream* stream) {
  std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(stream) >> 4));
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] {
      return !stream->queue.empty() &&
             (stream->context->lost || !stream->queue.front().wait_for ||
              stream->queue.front().wait_for->yes);
    });
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    if (operation.copies && copies_until_lost && --copies_until_lost == 0) {
      stream->context->lost = true;
    }
    const int delay = most_delay;
    if (operation.run && !stream->context->lost) {
      lock.unlock();
      // now and then a long delay
      const int most = random() % 16 == 0 ? 10 * delay : delay;
      if (most) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      operation.run();
      lock.lock();
    }
    if (operation.on_host) pending.erase(operation.host);
    stream->busy = false;
    changed.notify_all();
  }
}

void enqueue(Stream* stream, Operation operation) {
  stream->queue.push_back(std::move(operation));
  changed.notify_all();
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define ENTER(name, of)                                    \
  std::unique_lock lock(mutex);                            \
  if (const int code = enter(name, of); code != 0) return code

API cuInit(unsigned) {
  std::unique_lock lock(mutex);
  initialized = true;
  return 0;
}

API cuGetErrorName(int code, const char** name) {
  *name = code == lost ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}

API cuGetErrorString(int code, const char** words) {
  *words = code == lost ? "an illegal memory access was encountered" : "invalid argument";
  return 0;
}

API cuCtxGetCurrent(Context** out) {
  std::unique_lock lock(mutex);
  if (in_host_function) misuse("cuCtxGetCurrent is called from a host function");
  *out = current;
  return 0;
}

API cuCtxSetCurrent(Context* context) {
  std::unique_lock lock(mutex);
  if (in_host_function) misuse("cuCtxSetCurrent is called from a host function");
  current = context;
  return 0;
}

API cuStreamCreate(Stream** out, unsigned) {
  ENTER("cuStreamCreate", nullptr);
  *out = new Stream{current, {}, false};
  std::thread(work, *out).detach();
  return 0;
}

API cuStreamGetCtx(Stream* stream, Context** out) {
  std::unique_lock lock(mutex);
  if (in_host_function) misuse("cuStreamGetCtx is called from a host function");
  *out = stream->context;
  return 0;
}

API cuStreamQuery(Stream* stream) {
  ENTER("cuStreamQuery", stream->context);
  return stream->queue.empty() && !stream->busy ? 0 : not_ready;
}

API cuStreamSynchronize(Stream* stream) {
  ENTER("cuStreamSynchronize", stream->context);
  changed.wait(lock, [&] { return stream->context->lost || (stream->queue.empty() && !stream->busy); });
  return stream->context->lost ? lost : 0;
}

API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  ENTER("cuStreamWaitEvent", stream->context);
  if (!event->latest) {
    misuse("a stream waits for an event that was never recorded");
    return 0;
  }
  Operation operation;
  operation.wait_for = event->latest;
  enqueue(stream, std::move(operation));
  return 0;
}

API cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
  ENTER("cuLaunchHostFunc", stream->context);
  Operation operation;
  operation.run = [=] {
    in_host_function = true;
    function(data);
    in_host_function = false;
  };
  enqueue(stream, std::move(operation));
  return 0;
}

API cuEventCreate(Event** out, unsigned) {
  ENTER("cuEventCreate", nullptr);
  *out = new Event{current, nullptr};
  return 0;
}

API cuEventRecord(Event* event, Stream* stream) {
  ENTER("cuEventRecord", stream->context);
  if (event->context != stream->context) {
    misuse("an event is recorded in a stream of another context");
  }
  auto reached = event->latest = std::make_shared<Reached>();
  Operation operation;
  operation.run = [reached] {
    std::unique_lock inner(mutex);
    reached->yes = true;
    changed.notify_all();
  };
  enqueue(stream, std::move(operation));
  return 0;
}

API cuEventQuery(Event* event) {
  ENTER("cuEventQuery", nullptr);
  if (event->context->lost) return lost;
  return !event->latest || event->latest->yes ? 0 : not_ready;
}

API cuEventSynchronize(Event* event) {
  ENTER("cuEventSynchronize", nullptr);
  const auto latest = event->latest;
  changed.wait(lock, [&] { return event->context->lost || !latest || latest->yes; });
  return event->context->lost ? lost : 0;
}

API cuMemHostRegister_v2(void* start, std::size_t bytes, unsigned) {
  ENTER("cuMemHostRegister_v2", nullptr);
  pinned[static_cast<const char*>(start)] = bytes;
  ++pins;
  return 0;
}

API cuMemHostUnregister(void* start) {
  ENTER("cuMemHostUnregister", nullptr);
  const auto found = pinned.find(static_cast<const char*>(start));
  if (found == pinned.end()) {
    misuse("memory is unpinned that was not pinned");
    return invalid_value;
  }
  for (const Pending& other : pending) {
    if (overlaps(found->first, found->second, other.start, other.bytes)) {
      misuse("memory is unpinned while a copy is pending");
    }
  }
  pinned.erase(found);
  return 0;
}

API cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, Stream* stream) {
  ENTER("cuMemcpyDtoHAsync_v2", stream->context);
  const char* source = inside(from, bytes);
  Operation operation;
  if (!use_host(static_cast<char*>(to), bytes, true, operation) || !source) return invalid_value;
  std::memset(to, 0xA5, bytes);  // a reader that does not wait for the copy sees this
  operation.run = [=] { std::memcpy(to, source, bytes); };
  ++copies;
  copied_bytes += bytes;
  enqueue(stream, std::move(operation));
  return 0;
}

API cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes,
                         Stream* stream) {
  ENTER("cuMemcpyHtoDAsync_v2", stream->context);
  char* target = inside(to, bytes);
  Operation operation;
  const auto* source = static_cast<const char*>(from);
  if (!use_host(source, bytes, false, operation) || !target) return invalid_value;
  const std::uint64_t before = checksum(source, bytes);
  operation.run = [=] {
    if (checksum(source, bytes) != before) {
      std::unique_lock inner(mutex);
      misuse("pinned memory was changed while a copy was pending");
    }
    std::memcpy(target, source, bytes);
  };
  ++copies;
  copied_bytes += bytes;
  enqueue(stream, std::move(operation));
  return 0;
}

API cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, std::size_t bytes,
                         Stream* stream) {
  ENTER("cuMemcpyDtoDAsync_v2", stream->context);
  char* target = inside(to, bytes);
  const char* source = inside(from, bytes);
  if (!target || !source) return invalid_value;
  Operation operation;
  operation.run = [=] { std::memcpy(target, source, bytes); };
  enqueue(stream, std::move(operation));
  return 0;
}

API cuMemsetD32Async(unsigned long long to, unsigned value, std::size_t count, Stream* stream) {
  ENTER("cuMemsetD32Async", stream->context);
  char* target = inside(to, 4 * count);
  if (!target) return invalid_value;
  Operation operation;
  operation.run = [=] {
    for (std::size_t i = 0; i < count; ++i) std::memcpy(target + 4 * i, &value, 4);
  };
  enqueue(stream, std::move(operation));
  return 0;
}

// --- For the tests ---

// A new GPU, in its initial state, whose context is current on this thread.
API fake_context() {
  std::unique_lock lock(mutex);
  current = new Context;
  failing.clear();
  copies_until_lost = 0;
  return 0;
}

// This thread has no context.
API fake_no_context() {
  current = nullptr;
  return 0;
}

extern "C" __attribute__((visibility("default"))) unsigned long long fake_allocate(std::size_t bytes) {
  std::unique_lock lock(mutex);
  const std::size_t size = (bytes / 4096 + 1) * 4096;
  const int file = static_cast<int>(syscall(SYS_memfd_create, "gpu", 0));
  if (ftruncate(file, static_cast<off_t>(size)) != 0) return 0;
  auto* outside = static_cast<char*>(mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0));
  auto* in = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  devices[outside] = {in, bytes};
  return reinterpret_cast<unsigned long long>(outside);
}

API fake_free(unsigned long long address) {
  std::unique_lock lock(mutex);
  const auto found = devices.find(reinterpret_cast<char*>(address));
  const std::size_t size = (found->second.bytes / 4096 + 1) * 4096;
  munmap(found->second.inside, size);
  munmap(found->first, size);
  devices.erase(found);
  return 0;
}

// Write values in the order of the stream, after computing for this many microseconds.
API fake_compute(Stream* stream, unsigned long long to, const void* from, std::size_t bytes,
                 int microseconds) {
  std::unique_lock lock(mutex);
  char* target = inside(to, bytes);
  std::vector<char> data(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  Operation operation;
  operation.run = [=, data = std::move(data)] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    std::memcpy(target, data.data(), bytes);
  };
  enqueue(stream, std::move(operation));
  return 0;
}

// Wait for the stream, and read what the memory then contains.
API fake_read(Stream* stream, void* to, unsigned long long from, std::size_t bytes) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return stream->context->lost || (stream->queue.empty() && !stream->busy); });
  std::memcpy(to, inside(from, bytes), bytes);
  return stream->context->lost ? lost : 0;
}

// From the `after`th call of this function from now on, calls fail, `times` in all.
API fake_fail(const char* function, int after, int times) {
  std::unique_lock lock(mutex);
  failing[function] = {after, times};
  return 0;
}

// The `after`th copy from or to the host, counted from now on, breaks its context.
API fake_lose(int after) {
  std::unique_lock lock(mutex);
  copies_until_lost = after;
  return 0;
}

API fake_delay(int microseconds) {
  std::unique_lock lock(mutex);
  most_delay = microseconds;
  return 0;
}

// How many misuses there were so far, and the first one in words.
API fake_misuses(char* words, std::size_t bytes) {
  std::unique_lock lock(mutex);
  if (!misuses.empty()) std::strncpy(words, misuses.front().c_str(), bytes - 1);
  return static_cast<int>(misuses.size());
}

// How many times memory was pinned.
extern "C" __attribute__((visibility("default"))) unsigned long long fake_pins() {
  std::unique_lock lock(mutex);
  return pins;
}

extern "C" __attribute__((visibility("default"))) unsigned long long fake_copied_bytes() {
  std::unique_lock lock(mutex);
  return copied_bytes;
}

// Whether nothing is pending in any stream.
API fake_pending() {
  std::unique_lock lock(mutex);
  return static_cast<int>(pending.size());
}
