#include "xla.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "engine.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoded {
namespace {

namespace ffi = xla::ffi;

Segment segment_of(ffi::AnyBuffer buffer) {
  switch (buffer.element_type()) {
    case ffi::F16:
      return {DType::float16, buffer.element_count()};
    case ffi::BF16:
      return {DType::bfloat16, buffer.element_count()};
    case ffi::F32:
      return {DType::float32, buffer.element_count()};
    case ffi::F64:
      return {DType::float64, buffer.element_count()};
    default:
      return {DType::bytes, buffer.size_bytes()};
  }
}

// The order's value is never read: what counts is that there is a next one.
void pass_on(ffi::AnyBuffer order, ffi::AnyBuffer next) {
  if (order.element_type() == ffi::TOKEN || order.untyped_data() == next.untyped_data()) return;
  std::memcpy(next.untyped_data(), order.untyped_data(), order.size_bytes());
}

ffi::Error error_of(Outcome outcome, const std::string& text) {
  if (outcome == Outcome::desynchronized) {
    return ffi::Error(ffi::ErrorCode::kOutOfRange, "jaxcoded.Desynchronized: " + text);
  }
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, text);
}

// Vectors that hold so many parts, one after the other.
void append_parts(const std::vector<ffi::AnyBuffer>& vectors, std::uint64_t parts,
                  Request& request) {
  for (std::uint64_t part = 0; part < parts; ++part) {
    for (const ffi::AnyBuffer& vector : vectors) {
      Segment segment = segment_of(vector);
      segment.count /= parts;
      request.message.push_back(segment);
      request.own.push_back(static_cast<const std::byte*>(vector.untyped_data()) +
                            part * segment.bytes());
    }
  }
}

std::vector<bool> mask_of(ffi::AnyBuffer mask) {
  const auto* erased = static_cast<const bool*>(mask.untyped_data());
  return std::vector<bool>(erased, erased + mask.element_count());
}

ffi::Error error_of(const Result& result) {
  if (result.outcome == Outcome::done) return ffi::Error::Success();
  return error_of(result.outcome, result.error);
}

ffi::Error round_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group,
                      std::string_view words, std::int64_t fingerprint, std::int64_t up,
                      std::int64_t down, std::int64_t parts, std::int64_t begun,
                      std::int64_t skips, std::int64_t erases) {
  std::size_t next = 0;
  const auto operand = [&] { return *args.get<ffi::AnyBuffer>(next++); };
  const auto result = [&](std::size_t i) { return **results.get<ffi::AnyBuffer>(i); };
  pass_on(operand(), result(0));
  Request request;
  request.words = words;
  request.fingerprint = static_cast<std::uint64_t>(fingerprint);
  request.up = up != 0;
  request.down = down != 0;
  if (skips) request.skipped = *static_cast<const std::int32_t*>(operand().untyped_data()) != 0;
  if (erases) request.erased = mask_of(operand());
  std::vector<ffi::AnyBuffer> vectors;
  for (std::size_t i = 1; i < results.size(); ++i) {
    vectors.push_back(operand());
    const ffi::AnyBuffer out = result(i);
    request.total.push_back(segment_of(out));
    request.out.push_back(static_cast<std::byte*>(out.untyped_data()));
  }
  append_parts(vectors, static_cast<std::uint64_t>(parts), request);
  request.begun = begun != 0;
  try {
    return error_of(Engine::instance().run(static_cast<std::uint64_t>(group), std::move(request)));
  } catch (const Closed& closed) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, closed.text);
  }
}

// One part of the vectors of a round, ahead of the round itself.
ffi::Error part_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group,
                     std::string_view words, std::int64_t fingerprint, std::int64_t parts,
                     std::int64_t number, std::int64_t slices, std::int64_t skips) {
  std::size_t next = 0;
  const auto operand = [&] { return *args.get<ffi::AnyBuffer>(next++); };
  pass_on(operand(), **results.get<ffi::AnyBuffer>(0));
  Request request;
  request.words = words;
  request.fingerprint = static_cast<std::uint64_t>(fingerprint);
  request.begun = number != 0;
  if (skips) request.skipped = *static_cast<const std::int32_t*>(operand().untyped_data()) != 0;
  std::vector<ffi::AnyBuffer> vectors;
  while (next < args.size()) vectors.push_back(operand());
  append_parts(vectors, 1, request);
  for (std::int64_t part = 0; part < parts; ++part) {
    for (const ffi::AnyBuffer& vector : vectors) request.total.push_back(segment_of(vector));
  }
  request.message.swap(request.total);
  for (Segment& segment : request.total) segment.count *= static_cast<std::uint64_t>(slices);
  try {
    const std::string error =
        Engine::instance().extend(static_cast<std::uint64_t>(group), std::move(request));
    if (error.empty()) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
  } catch (const Closed& closed) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, closed.text);
  }
}

ffi::Error runs_impl(ffi::AnyBuffer vector, ffi::RemainingRets results,
                     ffi::Span<const std::int64_t> starts) {
  const std::size_t item = ffi::ByteWidth(vector.element_type());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ffi::AnyBuffer run = **results.get<ffi::AnyBuffer>(i);
    std::memcpy(run.untyped_data(),
                static_cast<const std::byte*>(vector.untyped_data()) +
                    static_cast<std::size_t>(starts[i]) * item,
                run.size_bytes());
  }
  return ffi::Error::Success();
}

ffi::Error start_impl(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> order,
                      ffi::ResultBufferR0<ffi::U32> number, std::int64_t group,
                      std::string_view words, std::int64_t fingerprint, std::int64_t parts,
                      std::int64_t slices, std::int64_t skips, std::int64_t erases) {
  std::size_t next = 0;
  const auto operand = [&] { return *args.get<ffi::AnyBuffer>(next++); };
  pass_on(operand(), *order);
  Request request;
  request.words = words;
  request.fingerprint = static_cast<std::uint64_t>(fingerprint);
  if (skips) request.skipped = *static_cast<const std::int32_t*>(operand().untyped_data()) != 0;
  if (erases) request.erased = mask_of(operand());
  std::vector<ffi::AnyBuffer> vectors;
  while (next < args.size()) vectors.push_back(operand());
  append_parts(vectors, static_cast<std::uint64_t>(parts), request);
  for (const ffi::AnyBuffer& vector : vectors) {
    Segment segment = segment_of(vector);
    segment.count = segment.count / static_cast<std::uint64_t>(parts) * static_cast<std::uint64_t>(slices);
    request.total.push_back(segment);
  }
  try {
    const Started started =
        Engine::instance().start(static_cast<std::uint64_t>(group), std::move(request));
    if (!started.error.empty()) return error_of(Outcome::failed, started.error);
    *number->typed_data() = started.number;
    return ffi::Error::Success();
  } catch (const Closed& closed) {
    return error_of(Outcome::failed, closed.text);
  }
}

// Operands after the number are for nothing but to be computed before.
ffi::Error done_impl(ffi::RemainingArgs args, ffi::RemainingRets results, std::int64_t group) {
  pass_on(*args.get<ffi::AnyBuffer>(0), **results.get<ffi::AnyBuffer>(0));
  const auto number =
      *static_cast<const std::uint32_t*>((*args.get<ffi::AnyBuffer>(1)).untyped_data());
  std::vector<Segment> total;
  std::vector<std::byte*> out;
  for (std::size_t i = 1; i < results.size(); ++i) {
    const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(i);
    total.push_back(segment_of(result));
    out.push_back(static_cast<std::byte*>(result.untyped_data()));
  }
  try {
    return error_of(
        Engine::instance().finish(static_cast<std::uint64_t>(group), number, total, out));
  } catch (const Closed& closed) {
    return error_of(Outcome::failed, closed.text);
  }
}

ffi::Error lag_impl(ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> next,
                    ffi::ResultBufferR0<ffi::S32> lag, std::int64_t group) {
  pass_on(order, *next);
  try {
    const std::uint64_t rounds = Engine::instance().with(
        static_cast<std::uint64_t>(group), [](Member& its) { return its.lag(); });
    constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
    *lag->typed_data() = static_cast<std::int32_t>(std::min(rounds, most));
    return ffi::Error::Success();
  } catch (const Closed& closed) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, closed.text);
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(round_handler_impl, round_impl,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int64_t>("group")
                           .Attr<std::string_view>("words")
                           .Attr<std::int64_t>("fingerprint")
                           .Attr<std::int64_t>("up")
                           .Attr<std::int64_t>("down")
                           .Attr<std::int64_t>("parts")
                           .Attr<std::int64_t>("begun")
                           .Attr<std::int64_t>("skips")
                           .Attr<std::int64_t>("erases"));

XLA_FFI_DEFINE_HANDLER(part_handler_impl, part_impl,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int64_t>("group")
                           .Attr<std::string_view>("words")
                           .Attr<std::int64_t>("fingerprint")
                           .Attr<std::int64_t>("parts")
                           .Attr<std::int64_t>("number")
                           .Attr<std::int64_t>("slices")
                           .Attr<std::int64_t>("skips"));

XLA_FFI_DEFINE_HANDLER(runs_handler_impl, runs_impl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<ffi::Span<const std::int64_t>>("starts"));

XLA_FFI_DEFINE_HANDLER(start_handler_impl, start_impl,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::BufferR0<ffi::U32>>()
                           .Attr<std::int64_t>("group")
                           .Attr<std::string_view>("words")
                           .Attr<std::int64_t>("fingerprint")
                           .Attr<std::int64_t>("parts")
                           .Attr<std::int64_t>("slices")
                           .Attr<std::int64_t>("skips")
                           .Attr<std::int64_t>("erases"));

XLA_FFI_DEFINE_HANDLER(done_handler_impl, done_impl,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::int64_t>("group"));

XLA_FFI_DEFINE_HANDLER(lag_handler_impl, lag_impl,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::BufferR0<ffi::S32>>()
                           .Attr<std::int64_t>("group"));

XLA_FFI_Error* round_handler(XLA_FFI_CallFrame* frame) { return round_handler_impl(frame); }
XLA_FFI_Error* part_handler(XLA_FFI_CallFrame* frame) { return part_handler_impl(frame); }
XLA_FFI_Error* runs_handler(XLA_FFI_CallFrame* frame) { return runs_handler_impl(frame); }
XLA_FFI_Error* start_handler(XLA_FFI_CallFrame* frame) { return start_handler_impl(frame); }
XLA_FFI_Error* done_handler(XLA_FFI_CallFrame* frame) { return done_handler_impl(frame); }
XLA_FFI_Error* lag_handler(XLA_FFI_CallFrame* frame) { return lag_handler_impl(frame); }

}  // namespace jaxcoded
