// NVIDIA's driver, loaded when it is first needed. The engine can be built and run without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcoded::cuda {

// The types of the driver's interface, defined as in `cuda.h`.
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Address = unsigned long long;  // an address in the memory of a GPU

inline Address address_of(const void* device) {
  return static_cast<Address>(reinterpret_cast<std::uintptr_t>(device));
}

constexpr int success = 0;
constexpr int not_ready = 600;                    // CUDA_ERROR_NOT_READY
constexpr unsigned non_blocking = 1;              // CU_STREAM_NON_BLOCKING
constexpr unsigned sleeps_without_timing = 1 | 2;  // CU_EVENT_BLOCKING_SYNC, _DISABLE_TIMING
constexpr unsigned portable = 1;                  // CU_MEMHOSTREGISTER_PORTABLE

// An error of the driver, in words.
struct Failure {
  std::string text;
};

// A function of the driver. A call throws a `Failure` if the driver returns an error.
template <class... In>
struct Function {
  const char* name;
  int (*address)(In...) = nullptr;

  void operator()(In... in) const;
};

struct Driver {
  Function<unsigned> init{"cuInit"};
  Function<int, const char**> error_name{"cuGetErrorName"};
  Function<int, const char**> error_string{"cuGetErrorString"};
  Function<Context*> current_context{"cuCtxGetCurrent"};
  Function<Context> set_current_context{"cuCtxSetCurrent"};
  Function<Stream*, unsigned> create_stream{"cuStreamCreate"};
  Function<Stream, Context*> context_of_stream{"cuStreamGetCtx"};
  Function<Stream> query_stream{"cuStreamQuery"};
  Function<Stream> synchronize{"cuStreamSynchronize"};
  Function<Stream, Event, unsigned> wait_in_stream{"cuStreamWaitEvent"};
  Function<Stream, void (*)(void*), void*> call_in_stream{"cuLaunchHostFunc"};
  Function<Event*, unsigned> create_event{"cuEventCreate"};
  Function<Event, Stream> record{"cuEventRecord"};
  Function<Event> query_event{"cuEventQuery"};
  Function<Event> wait_for_event{"cuEventSynchronize"};
  Function<void*, std::size_t, unsigned> pin{"cuMemHostRegister_v2"};
  Function<void*> unpin{"cuMemHostUnregister"};
  Function<void*, Address, std::size_t, Stream> copy_to_host{"cuMemcpyDtoHAsync_v2"};
  Function<Address, const void*, std::size_t, Stream> copy_to_device{"cuMemcpyHtoDAsync_v2"};
  Function<Address, Address, std::size_t, Stream> copy_on_device{"cuMemcpyDtoDAsync_v2"};
  Function<Address, unsigned, std::size_t, Stream> set_words{"cuMemsetD32Async"};
};

// Return the driver of this process; throws if there is none.
const Driver& driver();
// Load the driver from this library, by default the system's. Returns why loading failed, in words, or an empty
// text.
std::string load(const std::string& library);
// Return what an error code of the driver means.
std::string words_of(const char* function, int code);

template <class... In>
void Function<In...>::operator()(In... in) const {
  if (const int code = address(in...); code != success) throw Failure{words_of(name, code)};
}

// Makes a context current on this thread until the end of the scope.
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;

 private:
  Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace jaxcoded::cuda
