// The handlers for an NVIDIA GPU. XLA calls them on a thread of the host, while its stream still computes the
// operands. The handlers block, so they are not declared as suitable for command buffers.
#include <bit>

#include "staging.h"
#include "xla.h"
#include "xla_call.h"

namespace jaxcoded {
namespace {

using cuda::address_of;
using cuda::driver;

// Run an action on this thread, in a stream's context.
template <class Action>
void in_context(cuda::Stream stream, Action action) {
  cuda::Context context = nullptr;
  driver().context_of_stream(stream, &context);
  const cuda::Current current(context);
  action();
}

void pass_on(const XlaCall& call, cuda::Stream stream) {
  if (!must_pass_on(call)) return;
  in_context(stream, [&] {
    driver().copy_on_device(address_of(call.next.untyped_data()),
                            address_of(call.order.untyped_data()), call.order.size_bytes(), stream);
  });
}

DeviceCall device_call(XlaCall& call, cuda::Stream stream, std::int64_t group) {
  DeviceCall out{.stream = stream,
                 .group = static_cast<std::uint64_t>(group),
                 .request = std::move(call.request)};
  if (call.skipped) out.skipped = call.skipped->untyped_data();
  if (call.erased) {
    out.erased = call.erased->untyped_data();
    out.ranks = call.erased->element_count();
  }
  return out;
}

// Like `guarded`. An error of the driver outside a round is reported to the other ranks in the next round.
template <class Action>
ffi::Error guarded_on_device(std::int64_t group, bool begins, Action action) {
  return guarded(group, begins, [&] {
    try {
      return action();
    } catch (const cuda::Failure& failure) {
      try {
        Engine::instance().leave_share(static_cast<std::uint64_t>(group));
        Engine::instance().note_failure(static_cast<std::uint64_t>(group), " after an error in the last call: " + failure.text);
      } catch (const Closed&) {  // no rank waits for this rank
      }
      return ffi::Error(ffi::ErrorCode::kInternal, "CodedError: " + failure.text);
    }
  });
}

ffi::Error round_impl(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets results,
                      std::int64_t group, std::string_view signature, std::int64_t fingerprint,
                      std::int64_t up, std::int64_t down, std::int64_t parts,
                      std::int64_t last_part, std::int64_t skips, std::int64_t erases,
                      ffi::Span<const std::int64_t> apart,
                      ffi::Span<const double> examples) {
  return guarded_on_device(group, last_part == 0, [&] {
    XlaCall call = round_call(args, results, signature, fingerprint, up, down, parts, last_part,
                              skips, erases, apart, examples);
    const Result result = run_on_device(device_call(call, stream, group));
    if (result.outcome == Outcome::done) pass_on(call, stream);
    return error_of(result);
  });
}

ffi::Error part_impl(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets results,
                     std::int64_t group, std::string_view signature, std::int64_t fingerprint,
                     std::int64_t parts, std::int64_t number, std::int64_t slices,
                     std::int64_t skips,
                     ffi::Span<const std::int64_t> apart) {
  return guarded_on_device(group, number == 0, [&] {
    XlaCall call =
        part_call(args, results, signature, fingerprint, parts, number, slices, skips, apart);
    const std::string error = extend_on_device(device_call(call, stream, group));
    if (!error.empty()) return failed_precondition(error);
    pass_on(call, stream);
    return ffi::Error::Success();
  });
}

ffi::Error take_impl(cuda::Stream stream, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> order,
                     ffi::ResultBuffer<ffi::S32> work, std::int64_t group,
                     std::string_view signature, std::int64_t fingerprint, std::int64_t first,
                     ffi::Span<const std::int64_t> apart, ffi::Span<const double> examples,
                     ffi::Span<const double> audits) {
  return guarded_on_device(group, first != 0, [&] {
    XlaCall call = take_call(args, *order, signature, fingerprint, first, apart, examples, audits);
    const Taken taken = take_on_device(device_call(call, stream, group));
    if (!taken.error.empty()) {
      return error_of({taken.desynchronized ? Outcome::desynchronized : Outcome::failed, taken.error});
    }
    pass_on(call, stream);
    in_context(stream, [&] {
      std::int32_t* to = work->typed_data();
      for (const std::int32_t word : words_of(taken.work)) {
        driver().set_words(address_of(to++), static_cast<unsigned>(word), 1, stream);
      }
    });
    return ffi::Error::Success();
  });
}

ffi::Error computed_impl(cuda::Stream stream, ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> next,
                         ffi::ResultBuffer<ffi::F32> blocks, std::int64_t group) {
  return guarded_on_device(group, false, [&] {
    const auto computed = blocks_computed(group, blocks->element_count());
    if (!computed) return failed_precondition(no_blocks);
    pass_on({.order = order, .next = *next}, stream);
    in_context(stream, [&] {
      float* to = blocks->typed_data();
      for (const float word : *computed) {
        driver().set_words(address_of(to++), std::bit_cast<unsigned>(word), 1, stream);
      }
    });
    return ffi::Error::Success();
  });
}

ffi::Error lag_impl(cuda::Stream stream, ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> next,
                    ffi::ResultBufferR0<ffi::S32> lag, std::int64_t group) {
  return guarded_on_device(group, false, [&] {
    pass_on({.order = order, .next = *next}, stream);
    const auto rounds = static_cast<unsigned>(lag_of(group));
    in_context(stream, [&] { driver().set_words(address_of(lag->typed_data()), rounds, 1, stream); });
    return ffi::Error::Success();
  });
}

auto on_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER(cuda_round_handler_impl, round_impl, bind_round(on_stream()));
XLA_FFI_DEFINE_HANDLER(cuda_part_handler_impl, part_impl, bind_part(on_stream()));
XLA_FFI_DEFINE_HANDLER(cuda_take_handler_impl, take_impl, bind_take(on_stream()));
XLA_FFI_DEFINE_HANDLER(cuda_computed_handler_impl, computed_impl, bind_computed(on_stream()));
XLA_FFI_DEFINE_HANDLER(cuda_lag_handler_impl, lag_impl, bind_lag(on_stream()));

XLA_FFI_Error* cuda_round_handler(XLA_FFI_CallFrame* frame) { return cuda_round_handler_impl(frame); }
XLA_FFI_Error* cuda_part_handler(XLA_FFI_CallFrame* frame) { return cuda_part_handler_impl(frame); }
XLA_FFI_Error* cuda_take_handler(XLA_FFI_CallFrame* frame) { return cuda_take_handler_impl(frame); }
XLA_FFI_Error* cuda_computed_handler(XLA_FFI_CallFrame* frame) { return cuda_computed_handler_impl(frame); }
XLA_FFI_Error* cuda_lag_handler(XLA_FFI_CallFrame* frame) { return cuda_lag_handler_impl(frame); }

}  // namespace jaxcoded
