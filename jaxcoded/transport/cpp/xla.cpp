#include "xla.h"

#include <algorithm>
#include <cstring>

#include "xla_call.h"

namespace jaxcoded {
namespace {

ffi::Error round_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group,
                      std::string_view signature, std::int64_t fingerprint, std::int64_t up,
                      std::int64_t down, std::int64_t parts, std::int64_t last_part,
                      std::int64_t skips, std::int64_t erases, ffi::Span<const std::int64_t> apart,
                      ffi::Span<const double> examples) {
  return guarded(group, last_part == 0, [&] {
    XlaCall call = round_call(args, results, signature, fingerprint, up, down, parts, last_part,
                              skips, erases, apart, examples);
    pass_on(call);
    read(call);
    return error_of(Engine::instance().run(static_cast<std::uint64_t>(group),
                                           std::move(call.request)));
  });
}

ffi::Error part_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group,
                     std::string_view signature, std::int64_t fingerprint, std::int64_t parts,
                     std::int64_t number, std::int64_t slices, std::int64_t skips,
                     ffi::Span<const std::int64_t> apart) {
  return guarded(group, number == 0, [&] {
    XlaCall call =
        part_call(args, results, signature, fingerprint, parts, number, slices, skips, apart);
    pass_on(call);
    read(call);
    const std::string error = Engine::instance().extend(static_cast<std::uint64_t>(group),
                                                        std::move(call.request));
    return error.empty() ? ffi::Error::Success() : failed_precondition(error);
  });
}

ffi::Error take_impl(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> order,
                     ffi::ResultBuffer<ffi::S32> work, std::int64_t group,
                     std::string_view signature, std::int64_t fingerprint, std::int64_t first,
                     ffi::Span<const std::int64_t> apart, ffi::Span<const double> examples,
                     ffi::Span<const double> audits) {
  return guarded(group, first != 0, [&] {
    XlaCall call = take_call(args, *order, signature, fingerprint, first, apart, examples, audits);
    pass_on(call);
    const Taken taken =
        Engine::instance().take(static_cast<std::uint64_t>(group), std::move(call.request));
    if (!taken.error.empty()) {
      return error_of({taken.desynchronized ? Outcome::desynchronized : Outcome::failed, taken.error});
    }
    std::ranges::copy(words_of(taken.work), work->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error slices_impl(ffi::AnyBuffer vector, ffi::RemainingRets results,
                     ffi::Span<const std::int64_t> starts) {
  const std::size_t item = ffi::ByteWidth(vector.element_type());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ffi::AnyBuffer slice = **results.get<ffi::AnyBuffer>(i);
    std::memcpy(slice.untyped_data(),
                static_cast<const std::byte*>(vector.untyped_data()) +
                    static_cast<std::size_t>(starts[i]) * item,
                slice.size_bytes());
  }
  return ffi::Error::Success();
}

ffi::Error start_impl(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> order,
                      ffi::ResultBufferR0<ffi::U32> number, std::int64_t group,
                      std::string_view signature, std::int64_t fingerprint, std::int64_t parts,
                      std::int64_t slices, std::int64_t skips, std::int64_t erases,
                      ffi::Span<const std::int64_t> apart, ffi::Span<const double> examples) {
  return guarded(group, true, [&] {
    XlaCall call = start_call(args, *order, signature, fingerprint, parts, slices, skips, erases,
                              apart, examples);
    pass_on(call);
    read(call);
    const Started started =
        Engine::instance().start(static_cast<std::uint64_t>(group), std::move(call.request));
    if (!started.error.empty()) return failed_precondition(started.error);
    *number->typed_data() = started.number;
    return ffi::Error::Success();
  });
}

// Operands after the number are not used: they are passed so that XLA computes them before this call.
ffi::Error done_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group) {
  return guarded(group, false, [&] {
    auto [call, number] = done_call(args, results);
    pass_on(call);
    const Request& wanted = call.request;
    return error_of(Engine::instance().finish(static_cast<std::uint64_t>(group), number,
                                              wanted.total, wanted.out));
  });
}

ffi::Error computed_impl(ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> next,
                         ffi::ResultBuffer<ffi::F32> blocks, std::int64_t group) {
  return guarded(group, false, [&] {
    pass_on({.order = order, .next = *next});
    const auto computed = blocks_computed(group, blocks->element_count());
    if (!computed) return failed_precondition(no_blocks);
    std::ranges::copy(*computed, blocks->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error lag_impl(ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> next,
                    ffi::ResultBufferR0<ffi::S32> lag, std::int64_t group) {
  return guarded(group, false, [&] {
    pass_on({.order = order, .next = *next});
    *lag->typed_data() = lag_of(group);
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(round_handler_impl, round_impl, bind_round(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(part_handler_impl, part_impl, bind_part(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(take_handler_impl, take_impl, bind_take(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(slices_handler_impl, slices_impl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<ffi::Span<const std::int64_t>>("starts"));
XLA_FFI_DEFINE_HANDLER(start_handler_impl, start_impl, bind_start(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(done_handler_impl, done_impl, bind_done(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(computed_handler_impl, computed_impl, bind_computed(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(lag_handler_impl, lag_impl, bind_lag(ffi::Ffi::Bind()));

XLA_FFI_Error* round_handler(XLA_FFI_CallFrame* frame) { return round_handler_impl(frame); }
XLA_FFI_Error* part_handler(XLA_FFI_CallFrame* frame) { return part_handler_impl(frame); }
XLA_FFI_Error* take_handler(XLA_FFI_CallFrame* frame) { return take_handler_impl(frame); }
XLA_FFI_Error* slices_handler(XLA_FFI_CallFrame* frame) { return slices_handler_impl(frame); }
XLA_FFI_Error* start_handler(XLA_FFI_CallFrame* frame) { return start_handler_impl(frame); }
XLA_FFI_Error* done_handler(XLA_FFI_CallFrame* frame) { return done_handler_impl(frame); }
XLA_FFI_Error* computed_handler(XLA_FFI_CallFrame* frame) { return computed_handler_impl(frame); }
XLA_FFI_Error* lag_handler(XLA_FFI_CallFrame* frame) { return lag_handler_impl(frame); }

}  // namespace jaxcoded
