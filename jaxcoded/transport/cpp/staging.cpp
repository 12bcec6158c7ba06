#include "staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include "pool.h"

namespace jaxcoded {
namespace {

using cuda::address_of;
using cuda::Current;
using cuda::driver;

// Bytes copied at a time: enough for fast copies and little other work for each of them, but a small part of a
// long vector.
constexpr std::uint64_t stretch_bytes = 4 << 20;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t alignment = 64;

// --- Pinned memory ---

// Pinned ordinary memory, which other ranks can read.
class Pinned : public Source {
 public:
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* data, std::size_t bytes) override;
};

std::byte* Pinned::allocate(std::size_t bytes) {
  // start at a huge page, so that huge pages are used
  const std::size_t mapped = bytes + (bytes >= huge_page ? huge_page : 0);
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw cuda::Failure{"no " + std::to_string(bytes) + " bytes of memory to pin for a GPU"};
  }
  auto* start = static_cast<std::byte*>(memory);
  std::byte* data = start;
  if (bytes >= huge_page) {
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    data = start + (huge_page - address % huge_page) % huge_page;
    if (data != start) munmap(start, static_cast<std::size_t>(data - start));
    const std::size_t rest = mapped - static_cast<std::size_t>(data - start) - bytes;
    if (rest) munmap(data + bytes, rest);
    madvise(data, bytes, MADV_HUGEPAGE);
  }
  // After a fork, the GPU would have pages that no longer belong to this process.
  madvise(data, bytes, MADV_DONTFORK);
  try {
    driver().pin(data, bytes, cuda::portable);
  } catch (cuda::Failure& failure) {
    munmap(data, bytes);
    throw cuda::Failure{std::to_string(bytes) + " bytes of memory cannot be pinned for a GPU: " +
                        failure.text};
  }
  return data;
}

void Pinned::release(std::byte* data, std::size_t bytes) {
  driver().unpin.address(data);
  munmap(data, bytes);
}

// Round up to whole pages, so that `munmap` can give them back.
std::size_t pages(std::size_t bytes) {
  const std::size_t unit = bytes >= huge_page ? huge_page : std::size_t{64} << 10;
  return (bytes + unit - 1) / unit * unit;
}

// Pinning new memory takes longer than a round. Memory that was needed once will be needed again.
class Reused : public Pool {
 public:
  explicit Reused(Source& source) : Pool(0, source) {}

  Buffer take(std::size_t bytes) {
    Buffer memory = Pool::take(bytes);
    keep(most_ = std::max(most_, used()));
    return memory;
  }

 private:
  std::size_t most_ = 0;
};

// --- What calls share ---

// The engine's objects in one context of the driver, that is, on one GPU.
struct Lane {
  cuda::Context context = nullptr;
  cuda::Stream copies = nullptr;  // to the host
  cuda::Stream news = nullptr;    // runs host functions, for which copies must not wait
  std::vector<cuda::Event> events = {};  // free for use
};

// Vectors on their way to the host.
struct Batch {
  Buffer memory;
  std::vector<std::byte*> at;        // by vector
  std::vector<std::uint64_t> bytes;
  std::vector<std::size_t> first;    // the first stretch of each vector
  std::size_t stretches = 0;
  std::atomic<std::size_t> arrived{0};  // stretches that have arrived, in order

  std::uint64_t ready(std::size_t vector) const {
    const std::size_t received = arrived.load(std::memory_order_acquire);
    if (received <= first[vector]) return 0;
    return std::min(bytes[vector], (received - first[vector]) * stretch_bytes);
  }
  bool complete() const { return arrived.load(std::memory_order_acquire) == stretches; }
};

// Memory that a stream may still use until the event occurs.
struct Retired {
  Lane* lane;
  cuda::Event event;
  Buffer memory;
  std::shared_ptr<Batch> batch;
};

// Never destroy this object, since the GPU may still use it.
template <class T>
void leave_behind(T object) noexcept {
  alignas(T) std::byte place[sizeof(T)];
  new (place) T(std::move(object));
}

// The pinned memory and the lanes. The context of a lane must be current when a function gets the lane.
class Depot {
 public:
  static Depot& instance() {
    // Never destroyed: the driver may be unloaded when the process ends.
    static Depot* depot = new Depot;
    return *depot;
  }

  Lane& lane(cuda::Context context) {
    std::unique_lock lock(mutex_);
    Lane& lane = lanes_[context];
    if (!lane.context) {
      const Current current(context);
      if (!lane.copies) driver().create_stream(&lane.copies, cuda::non_blocking);
      if (!lane.news) driver().create_stream(&lane.news, cuda::non_blocking);
      lane.context = context;
    }
    return lane;
  }

  Buffer take(std::size_t bytes) {
    std::unique_lock lock(mutex_);
    reclaim();
    return (bytes < huge_page ? short_ : long_).take(pages(bytes));
  }

  cuda::Event take_event(Lane& lane) {
    std::unique_lock lock(mutex_);
    cuda::Event event = nullptr;
    if (lane.events.empty()) {
      driver().create_event(&event, cuda::sleeps_without_timing);
    } else {
      event = lane.events.back();
      lane.events.pop_back();
    }
    return event;
  }

  // For destructors: give back an event, which is not used again if there is too little memory to note it.
  void give(Lane& lane, cuda::Event event) noexcept {
    std::unique_lock lock(mutex_);
    try {
      lane.events.push_back(event);
    } catch (const std::bad_alloc&) {
    }
  }

  // `one`: a list of one element. This takes no memory.
  void retire(std::list<Retired> one) noexcept {
    std::unique_lock lock(mutex_);
    retired_.splice(retired_.end(), one);
  }

  // Give back memory that nothing uses any more.
  void drop(Buffer memory, std::shared_ptr<Batch> batch) noexcept {
    std::unique_lock lock(mutex_);
    const Buffer gone = std::move(memory);
    batch.reset();
  }

  std::pair<std::size_t, std::size_t> bytes() {
    std::unique_lock lock(mutex_);
    return {short_.used() + long_.used(), short_.kept() + long_.kept()};
  }

 private:
  // Reclaim the memory of all lanes, since no other call may come to the lanes of an idle GPU.
  void reclaim() {
    for (auto retired = retired_.begin(); retired != retired_.end();) {
      Lane& lane = *retired->lane;
      const int state = state_of(lane, retired->event);
      if (state == cuda::not_ready) {
        ++retired;
        continue;
      }
      if (state != cuda::success) leave_behind(std::move(*retired));  // the GPU is lost
      else lane.events.push_back(retired->event);
      retired = retired_.erase(retired);
    }
  }

  static int state_of(const Lane& lane, cuda::Event event) {
    try {
      const Current current(lane.context);
      return driver().query_event.address(event);
    } catch (const cuda::Failure&) {
      return cuda::not_ready;  // ask again later
    }
  }

  std::mutex mutex_;
  std::map<cuda::Context, Lane> lanes_;
  Pinned pinned_;
  Reused short_{pinned_}, long_{pinned_};  // separate, so that a short buffer takes no long block
  std::list<Retired> retired_;
};

// An event, which goes back to the lane for other uses when the mark is destroyed.
class Mark {
 public:
  Mark(Lane& lane, cuda::Stream stream) : lane_(lane), event_(Depot::instance().take_event(lane)) {
    record(stream);
  }
  ~Mark() {
    if (event_) Depot::instance().give(lane_, event_);
  }
  Mark(const Mark&) = delete;

  void record(cuda::Stream stream) {
    if (const int code = driver().record.address(event_, stream); code != cuda::success) {
      Depot::instance().give(lane_, std::exchange(event_, nullptr));
      throw cuda::Failure{cuda::words_of(driver().record.name, code)};
    }
  }
  void wait() const { driver().wait_for_event(event_); }
  // Whatever is enqueued to the stream from now on runs after the mark, even if the mark moves later.
  void hold(cuda::Stream stream) const { driver().wait_in_stream(stream, event_, 0); }
  cuda::Event keep() { return std::exchange(event_, nullptr); }

 private:
  Lane& lane_;
  cuda::Event event_;
};

// Runs on a thread of the driver, where calls to the driver are not allowed.
void stretch_arrived(void* batch) {
  static_cast<Batch*>(batch)->arrived.fetch_add(1, std::memory_order_release);
  Engine::instance().wake_up();
}

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

// --- A call ---

class DeviceFlight : public Feed {
 public:
  ~DeviceFlight() override {
    if (!lane_) return;
    for (auto& batch : batches_) retire(lane_->news, {}, std::move(batch));
    retire(lane_->news, std::move(scratch_), std::move(next_));
    retire(stream_, std::move(memory_), {});
  }

  // Begin a call or a part of it. With `waits`, read `skipped` and `erased` from the GPU: when this returns,
  // the stream has reached the call, and short vectors have arrived.
  void begin(DeviceCall& call, bool waits) {
    attempt([&] {
      cuda::Context context = nullptr;
      driver().context_of_stream(call.stream, &context);
      if (!lane_) {  // set once, since the engine's thread reads `lane_` while later parts begin
        stream_ = call.stream;
        lane_ = &Depot::instance().lane(context);
      }
      if (context != lane_->context) throw cuda::Failure{"the parts of a call are on different GPUs"};
      const Current current(context);
      // The work that computes this part, on whatever stream, must end before the work that uses the part.
      caller_ = call.stream;
      if (caller_ != stream_) Mark(*lane_, caller_).hold(stream_);
      if (!waits) return;
      const std::size_t words = call.skipped ? alignment : 0;
      if (scratch_.capacity() < words + call.ranks) {
        retire(stream_, std::move(scratch_), {});
        scratch_ = Depot::instance().take(words + call.ranks);
      }
      if (call.skipped) {
        driver().copy_to_host(scratch_.data(), address_of(call.skipped), sizeof(std::int32_t),
                              stream_);
      }
      if (call.ranks) {
        driver().copy_to_host(scratch_.data() + words, address_of(call.erased), call.ranks,
                              stream_);
      }
      std::uint64_t all = 0;
      for (std::size_t i = 0; i < call.request.own.size(); ++i) all += call.request.message[i].bytes();
      if (all <= stretch_bytes) {
        next_ = make_batch(call);
        for (std::size_t i = 0; i < next_->at.size(); ++i) {
          if (!next_->bytes[i]) continue;
          driver().copy_to_host(next_->at[i], address_of(call.request.own[i]), next_->bytes[i],
                                stream_);
        }
      }
      Mark(*lane_, stream_).wait();
      if (next_) next_->arrived = next_->stretches;
      if (call.skipped) {
        std::int32_t skipped = 0;
        std::memcpy(&skipped, scratch_.data(), sizeof skipped);
        call.request.skipped = skipped != 0;
      }
      if (call.ranks) {
        const auto* erased = reinterpret_cast<const bool*>(scratch_.data() + words);
        call.request.erased.assign(erased, erased + call.ranks);
      }
    });
    if (failed() && lane_) let_go();
  }

  // Whether `begin` has brought this rank's vectors.
  bool has_brought() const { return next_ != nullptr; }

  // Copy this rank's vectors to the host, if they are `needed` and have not been copied.
  void bring(DeviceCall& call, bool needed) {
    if (needed && !next_) {
      attempt([&] {
        const Current current(lane_->context);
        next_ = make_batch(call);
        Mark mark(*lane_, stream_);
        mark.hold(lane_->copies);
        for (std::size_t i = 0; i < next_->at.size(); ++i) {
          for (std::uint64_t start = 0; start < next_->bytes[i]; start += stretch_bytes) {
            driver().copy_to_host(next_->at[i] + start, address_of(call.request.own[i]) + start,
                                  std::min(stretch_bytes, next_->bytes[i] - start), lane_->copies);
            mark.record(lane_->copies);
            mark.hold(lane_->news);
            driver().call_in_stream(lane_->news, stretch_arrived, next_.get());
          }
        }
      });
    }
    std::unique_lock lock(mutex_);
    for (std::size_t i = 0; i < call.request.own.size(); ++i) {
      call.request.own[i] = needed && failure_.empty() ? next_->at[i] : nullptr;
      if (needed && next_) where_.emplace_back(next_.get(), i);
    }
    if (next_) batches_.push_back(std::move(next_));
    next_.reset();
  }

  void wait_for_own() {
    attempt([&] {
      const Current current(lane_->context);
      Mark(*lane_, lane_->news).wait();
    });
  }
  // Spins, since a program waits for the result.
  void wait_for_stream() {
    attempt([&] {
      const Current current(lane_->context);
      driver().synchronize(stream_);
    });
  }

  // Set where the result goes.
  void expect(DeviceCall& call) {
    Request& request = call.request;
    attempt([&] {
      const Current current(lane_->context);
      std::uint64_t all = 0;
      for (const Segment& segment : request.total) all += aligned(segment.bytes());
      memory_ = Depot::instance().take(all);
      std::uint64_t start = 0;
      for (std::size_t i = 0; i < request.out.size(); ++i) {
        const std::uint64_t bytes = request.total[i].bytes();
        outs_.push_back({memory_.data() + start, address_of(request.out[i]), bytes});
        start += aligned(bytes);
      }
    });
    if (failed()) outs_.clear();
    request.out.resize(outs_.size());  // empty: this rank does not store the result
    std::ranges::transform(outs_, request.out.begin(), &Out::host);
  }

  std::uint64_t ready(std::size_t vector) const override {
    std::unique_lock lock(mutex_);
    if (vector >= where_.size()) return 0;
    const auto [batch, number] = where_[vector];
    return batch->ready(number);
  }

  void given(std::size_t vector, std::uint64_t offset, std::uint64_t bytes) override {
    if (vector >= outs_.size()) return;
    Out& out = outs_[vector];
    const std::uint64_t end = offset + bytes;
    if (end - out.copied < stretch_bytes && end < out.bytes) return;
    attempt([&] {
      const Current current(lane_->context);
      copy_back(out, end);
    });
  }

  std::string failure() override {
    attempt([&] {
      if (!comes()) return;
      // Once a context is lost, its host functions do not run any more.
      const Current current(lane_->context);
      const int state = driver().query_stream.address(lane_->copies);
      if (state != cuda::success && state != cuda::not_ready) {
        throw cuda::Failure{cuda::words_of(driver().query_stream.name, state)};
      }
    });
    std::unique_lock lock(mutex_);
    told_ |= !failure_.empty();
    return failure_;
  }

  // Let the stream continue once no copy from the vectors is left, even after an error of the driver.
  void go_on() {
    if (!lane_) return;
    const auto either = [&](auto action) {
      try {
        const Current current(lane_->context);
        action(Mark(*lane_, lane_->copies));
        return true;
      } catch (const cuda::Failure& failure) {
        note(failure.text);
        return false;
      } catch (const std::bad_alloc&) {
        note("too little memory for this call");
        return false;
      }
    };
    // `news` waits, too, since the copies' memory is reused after events on `news`
    either([&](const Mark& mark) {
      mark.hold(lane_->news);
      mark.hold(stream_);
      if (caller_ != stream_) Mark(*lane_, stream_).hold(caller_);
    }) || either([&](const Mark& mark) {
      mark.wait();
      if (caller_ != stream_) driver().synchronize(stream_);
    });
  }

  // End the call. If it is `done`, copy the rest of the result. Returns why the call failed at this rank,
  // unless all ranks know that or it did not fail.
  std::optional<std::string> finish(bool done) {
    if (done) {
      attempt([&] {
        const Current current(lane_->context);
        for (Out& out : outs_) copy_back(out, out.bytes);
      });
    }
    go_on();
    if (lane_) {
      retire(stream_, std::move(memory_), {});
      retire(stream_, std::move(scratch_), {});
    }
    if (told_ || failure_.empty()) return {};
    return failure_;
  }

  bool failed() const {
    std::unique_lock lock(mutex_);
    return !failure_.empty();
  }

 private:
  struct Out {
    std::byte* host;
    cuda::Address device;
    std::uint64_t bytes;
    std::uint64_t copied = 0;
  };

  // Run an action. After the driver's first error, the later actions of this flight are not run.
  template <class Action>
  void attempt(Action action) {
    if (failed()) return;
    try {
      action();
    } catch (const cuda::Failure& failure) {
      note(failure.text);
    } catch (const std::bad_alloc&) {
      note("too little memory for this call");
    }
  }

  void note(std::string_view text) noexcept {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) return;
    try {
      failure_ = text;
    } catch (const std::bad_alloc&) {
      failure_ = "out of memory";  // short, so that it needs no memory from the heap
    }
  }

  // Copies that `begin` has enqueued may still be on their way: keep their memory until they end.
  void let_go() {
    try {
      const Current current(lane_->context);
      Mark(*lane_, stream_).hold(lane_->news);
    } catch (...) {  // their end cannot be known
      leave_behind(std::pair(std::move(scratch_), std::move(next_)));
    }
  }

  bool comes() const {
    std::unique_lock lock(mutex_);
    return std::ranges::any_of(batches_, [](const auto& batch) { return !batch->complete(); });
  }

  std::shared_ptr<Batch> make_batch(const DeviceCall& call) {
    auto batch = std::make_shared<Batch>();
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < call.request.own.size(); ++i) {
      batch->bytes.push_back(call.request.message[i].bytes());
      batch->first.push_back(batch->stretches);
      batch->stretches += (batch->bytes[i] + stretch_bytes - 1) / stretch_bytes;
      all += aligned(batch->bytes[i]);
    }
    batch->at.reserve(batch->bytes.size());
    // nothing may be thrown after this: the memory would go back without the depot's lock
    batch->memory = Depot::instance().take(all);
    std::byte* start = batch->memory.data();
    for (const std::uint64_t bytes : batch->bytes) {
      batch->at.push_back(start);
      start += aligned(bytes);
    }
    return batch;
  }

  void copy_back(Out& out, std::uint64_t end) {
    if (end == out.copied) return;
    driver().copy_to_device(out.device + out.copied, out.host + out.copied, end - out.copied, stream_);
    out.copied = end;
  }

  // Keep memory for the next calls, once the stream no longer uses it.
  void retire(cuda::Stream stream, Buffer memory, std::shared_ptr<Batch> batch) noexcept {
    if (!memory && !batch) return;
    try {
      const Current current(lane_->context);
      try {
        std::list<Retired> one(1);
        cuda::Event event = Mark(*lane_, stream).keep();
        one.front() = {lane_, event, std::move(memory), std::move(batch)};
        return Depot::instance().retire(std::move(one));
      } catch (const std::bad_alloc&) {
        if (driver().synchronize.address(stream) == cuda::success) {
          return Depot::instance().drop(std::move(memory), std::move(batch));
        }
      }
    } catch (...) {  // the GPU is lost
    }
    leave_behind(std::pair(std::move(memory), std::move(batch)));
  }

  Lane* lane_ = nullptr;
  cuda::Stream stream_ = nullptr;  // of the first part; the result goes there
  cuda::Stream caller_ = nullptr;  // of the current part
  Buffer scratch_;  // the operands `skipped` and `erased` on the host
  Buffer memory_;   // of the result
  std::vector<Out> outs_;
  std::shared_ptr<Batch> next_;  // of this handler's call, until the node gets it

  // The engine asks for progress on any thread, while another thread prepares the next part of the call.
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Batch>> batches_;
  std::vector<std::pair<Batch*, std::size_t>> where_;  // where the node's vectors are
  std::string failure_;
  bool told_ = false;
};

// Return the flight that earlier parts of this call began, or a new one.
std::shared_ptr<DeviceFlight> flight_of(const DeviceCall& call) {
  auto flight = std::dynamic_pointer_cast<DeviceFlight>(Engine::instance().feed_of(call.group, call.request));
  return flight ? flight : std::make_shared<DeviceFlight>();
}

// Begin the call, and copy the vectors that the node will need.
void prepare(DeviceFlight& flight, DeviceCall& call, bool waits) {
  Request& request = call.request;
  flight.begin(call, waits);
  const auto [late, root] = Engine::instance().with(call.group, [](Member& member) {
    return std::pair(member.lag() > 0, member.root);
  });
  if (late) request.skipped = true;  // the round is decided: no rank fetches this rank's vectors
  flight.bring(call, !request.skipped && (request.up || root));
}

}  // namespace

Result run_on_device(DeviceCall call) {
  Engine& engine = Engine::instance();
  Request& request = call.request;
  const auto flight = flight_of(call);
  prepare(*flight, call, true);
  if (!request.up || !request.down) flight->wait_for_own();
  flight->expect(call);
  request.feed = flight;
  Result result;
  try {
    result = engine.run(call.group, std::move(request));
  } catch (...) {
    flight->finish(false);
    throw;
  }
  if (const auto why = flight->finish(result.outcome == Outcome::done)) {
    engine.note_failure(call.group, " after an error in the last call: " + *why);
    return {Outcome::failed, "CodedError: " + *why};
  }
  if (result.outcome == Outcome::done && flight->failed()) {
    return {Outcome::failed, "CodedError: " + flight->failure()};
  }
  return result;
}

std::string extend_on_device(DeviceCall call) {
  const auto flight = flight_of(call);
  prepare(*flight, call, call.skipped != nullptr);
  call.request.feed = flight;
  const std::string error = Engine::instance().extend(call.group, std::move(call.request));
  flight->go_on();
  return error;
}

Taken take_on_device(DeviceCall call) {
  Engine& engine = Engine::instance();
  DeviceFlight flight;
  const auto refused = [&] {
    flight.go_on();
    engine.leave_share(call.group);
    engine.note_failure(call.group, " after an error in the last call: " + flight.failure());
    return Taken{.error = "CodedError: " + flight.failure()};
  };
  flight.begin(call, true);
  // begin the round even if the driver has failed, since the engine must count it
  if (flight.failed() || !flight.has_brought()) {
    Request first = call.request;
    first.own.clear();
    Taken taken = engine.take(call.group, std::move(first));
    if (!flight.failed() && !taken.needs_own) return taken;
    call.request.continues = true;
  }
  flight.bring(call, true);
  flight.wait_for_own();  // all of the vectors are lent at once, as lent memory must not change
  if (flight.failed()) return refused();
  return engine.take(call.group, std::move(call.request));
}

std::pair<double, double> time_copies(cuda::Stream stream, const std::byte* own, std::byte* out,
                                      std::uint64_t bytes) {
  const std::vector<Segment> vector = {{DType::bytes, bytes}};
  DeviceCall call{.stream = stream,
                  .request = {.message = vector, .total = vector, .own = {own}, .out = {out}}};
  DeviceFlight flight;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto seconds = [](auto since, auto until) {
    return std::chrono::duration<double>(until - since).count();
  };
  flight.begin(call, false);
  const auto start = now();
  flight.bring(call, true);
  flight.wait_for_own();
  const auto brought = now();
  flight.expect(call);
  const auto ready = now();
  const std::uint64_t piece = Limits().piece_bytes;
  for (std::uint64_t at = 0; at < bytes; at += piece) flight.given(0, at, std::min(piece, bytes - at));
  flight.finish(true);
  flight.wait_for_stream();
  if (const std::string why = flight.failure(); !why.empty()) throw cuda::Failure{why};
  return {seconds(start, brought), seconds(ready, now())};
}

std::pair<std::size_t, std::size_t> pinned_bytes() { return Depot::instance().bytes(); }

}  // namespace jaxcoded
