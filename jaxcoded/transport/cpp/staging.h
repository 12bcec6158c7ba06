// Rounds on the vectors of a GPU: they pass through pinned memory of the host, where the engine
// sums.
//
// A call begins when the stream has reached it. This rank's vectors then come to the host in
// stretches, on a stream of the engine. A host function behind each stretch wakes the engine, which
// offers at once what has arrived. The result returns on the caller's stream, stretch by stretch as
// it comes. So copies in both directions, sums and messages overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda_driver.h"
#include "engine.h"

namespace jaxcoded {

struct DeviceCall {
  cuda::Stream stream = nullptr;   // of the caller
  std::uint64_t group = 0;
  Request request = {};            // `own` and `out` lie in the GPU's memory
  const void* skipped = nullptr;   // an int32 on the GPU in place of `Request::skipped`, unless null
  const void* erased = nullptr;    // bools on the GPU in place of `Request::erased`, unless null
  std::size_t ranks = 0;           // the number of these bools
};

// `Engine::run`, but for a GPU. When it returns, the result is on its way to the GPU, on the stream.
Result run_on_device(DeviceCall call);
// `Engine::extend`, but for a GPU.
std::string extend_on_device(DeviceCall call);
// `Engine::take`, but for a GPU. The vectors are copied to the host only if the program has to wait for its
// next block, since other ranks may fetch the vectors meanwhile.
Taken take_on_device(DeviceCall call);

// Return how many seconds it takes to copy this rank's vector to the host, and a result to the GPU, without a
// round. Throws the driver's error if a copy fails.
std::pair<double, double> time_copies(cuda::Stream stream, const std::byte* own, std::byte* out,
                                      std::uint64_t bytes);

// Return the bytes of pinned memory: the bytes in use, and the bytes kept for later calls.
std::pair<std::size_t, std::size_t> pinned_bytes();

}  // namespace jaxcoded
