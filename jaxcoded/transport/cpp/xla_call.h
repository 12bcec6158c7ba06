// What the handlers of all platforms do with XLA's buffers.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoded {

namespace ffi = xla::ffi;

// The operands and results of a call. `order` is the ordering operand, `next` the ordering result (see xla.h).
struct XlaCall {
  ffi::AnyBuffer order, next;
  std::optional<ffi::AnyBuffer> skipped = {}, erased = {};
  std::vector<ffi::AnyBuffer> vectors = {};  // the operands that are this rank's vectors
  Request request = {};
};

inline Segment segment_of(ffi::AnyBuffer buffer) {
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

// Return the call of any collective. The vectors are the last operands.
inline XlaCall collective_call(ffi::RemainingArgs args, ffi::AnyBuffer next,
                               std::string_view signature, std::int64_t fingerprint,
                               std::int64_t skips, std::int64_t erases,
                               ffi::Span<const std::int64_t> apart) {
  std::size_t i = 0;
  const auto operand = [&] { return *args.get<ffi::AnyBuffer>(i++); };
  XlaCall call{.order = operand(), .next = next};
  if (skips) call.skipped = operand();
  if (erases) call.erased = operand();
  while (i < args.size()) call.vectors.push_back(operand());
  call.request.signature = signature;
  call.request.fingerprint = static_cast<std::uint64_t>(fingerprint);
  // four numbers describe each run of elements to compare separately
  for (std::size_t at = 0; at + 4 <= apart.size(); at += 4) {
    call.request.apart.push_back({static_cast<std::size_t>(apart[at]),
                                  static_cast<std::uint64_t>(apart[at + 1]),
                                  static_cast<std::uint64_t>(apart[at + 2]),
                                  static_cast<int>(apart[at + 3])});
  }
  return call;
}

// Append the message to the request. Each vector holds this many parts, one after the other.
inline void append_parts(XlaCall& call, std::uint64_t parts) {
  for (std::uint64_t part = 0; part < parts; ++part) {
    for (const ffi::AnyBuffer& vector : call.vectors) {
      Segment segment = segment_of(vector);
      segment.count /= parts;
      call.request.message.push_back(segment);
      call.request.own.push_back(static_cast<const std::byte*>(vector.untyped_data()) +
                                 part * segment.bytes());
    }
  }
}

inline XlaCall round_call(ffi::RemainingArgs args, ffi::RemainingRets results,
                          std::string_view signature, std::int64_t fingerprint, std::int64_t up,
                          std::int64_t down, std::int64_t parts, std::int64_t last_part,
                          std::int64_t skips, std::int64_t erases,
                          ffi::Span<const std::int64_t> apart,
                          ffi::Span<const double> examples) {
  const auto result = [&](std::size_t i) { return **results.get<ffi::AnyBuffer>(i); };
  XlaCall call = collective_call(args, result(0), signature, fingerprint, skips, erases, apart);
  append_parts(call, static_cast<std::uint64_t>(parts));
  Request& request = call.request;
  request.up = up != 0;
  request.down = down != 0;
  request.continues = last_part != 0;
  if (examples.size() == 2) request.examples = {examples[0], examples[1]};
  for (std::size_t i = 1; i < results.size(); ++i) {
    const ffi::AnyBuffer out = result(i);
    request.total.push_back(segment_of(out));
    request.out.push_back(static_cast<std::byte*>(out.untyped_data()));
  }
  return call;
}

// Return the call that passes one part of a round's vectors, before the round itself.
inline XlaCall part_call(ffi::RemainingArgs args, ffi::RemainingRets results,
                         std::string_view signature, std::int64_t fingerprint, std::int64_t parts,
                         std::int64_t number, std::int64_t slices, std::int64_t skips,
                         ffi::Span<const std::int64_t> apart) {
  XlaCall call = collective_call(args, **results.get<ffi::AnyBuffer>(0), signature, fingerprint,
                                 skips, 0, apart);
  append_parts(call, 1);
  Request& request = call.request;
  request.continues = number != 0;
  // `parts` parts like this one make the message, and `slices` slices like it the result
  const std::vector<Segment> one = request.message;
  for (std::int64_t part = 1; part < parts; ++part) {
    request.message.insert(request.message.end(), one.begin(), one.end());
  }
  for (Segment segment : one) {
    segment.count *= static_cast<std::uint64_t>(slices);
    request.total.push_back(segment);
  }
  return call;
}

// Return the call that asks for the next block of a round with shared work.
inline XlaCall take_call(ffi::RemainingArgs args, ffi::AnyBuffer next, std::string_view signature,
                         std::int64_t fingerprint, std::int64_t first,
                         ffi::Span<const std::int64_t> apart, ffi::Span<const double> examples,
                         ffi::Span<const double> audits) {
  XlaCall call = collective_call(args, next, signature, fingerprint, 0, 0, apart);
  append_parts(call, 1);
  Request& request = call.request;
  request.continues = first == 0;
  request.total = request.message;
  if (examples.size() == 2) request.examples = {examples[0], examples[1]};
  for (std::size_t i = 0; i + 1 < audits.size(); i += 2) request.audits.emplace_back(audits[i], audits[i + 1]);
  return call;
}

// Return for a program: the block to compute, or -1; whether to empty the vectors before the block is added;
// and the block's `Audit`.
inline std::array<std::int32_t, 3> words_of(const std::optional<Work>& work) {
  if (!work) return {-1, 0, 0};
  return {static_cast<std::int32_t>(work->block), work->fresh, static_cast<std::int32_t>(work->audit)};
}

inline constexpr const char* no_blocks =
    "CodedError: residual=True of a sum of shared work says which part of the batch is in it, and is "
    "for the sum right after a loop over group.blocks";

// Return 1 for each block that this rank computed in the previous round. Nothing if that round had no blocks.
inline std::optional<std::vector<float>> blocks_computed(std::int64_t group, std::size_t count) {
  const auto computed = Engine::instance().with(
      static_cast<std::uint64_t>(group), [](Member& member) { return member.node->computed(); });
  if (!computed) return std::nullopt;
  std::vector<float> out(count);
  for (const Block block : *computed) out[block] = 1;
  return out;
}

// Return the call that starts a round. A later call asks for the round's result.
inline XlaCall start_call(ffi::RemainingArgs args, ffi::AnyBuffer next, std::string_view signature,
                          std::int64_t fingerprint, std::int64_t parts, std::int64_t slices,
                          std::int64_t skips, std::int64_t erases,
                          ffi::Span<const std::int64_t> apart, ffi::Span<const double> examples) {
  XlaCall call = collective_call(args, next, signature, fingerprint, skips, erases, apart);
  append_parts(call, static_cast<std::uint64_t>(parts));
  if (examples.size() == 2) call.request.examples = {examples[0], examples[1]};
  for (const ffi::AnyBuffer& vector : call.vectors) {
    Segment segment = segment_of(vector);
    segment.count =
        segment.count / static_cast<std::uint64_t>(parts) * static_cast<std::uint64_t>(slices);
    call.request.total.push_back(segment);
  }
  return call;
}

// Whether the ordering operand must be copied to the ordering result. Its value is never read, but must exist.
inline bool must_pass_on(const XlaCall& call) {
  return call.order.element_type() != ffi::TOKEN &&
         call.order.untyped_data() != call.next.untyped_data();
}

// Copy the ordering operand to the ordering result, if both are in host memory.
inline void pass_on(const XlaCall& call) {
  if (!must_pass_on(call)) return;
  std::memcpy(call.next.untyped_data(), call.order.untyped_data(), call.order.size_bytes());
}

// Read the operands `skipped` and `erased`, which are in host memory.
inline void read(XlaCall& call) {
  if (call.skipped) {
    call.request.skipped = *static_cast<const std::int32_t*>(call.skipped->untyped_data()) != 0;
  }
  if (call.erased) {
    const auto* erased = static_cast<const bool*>(call.erased->untyped_data());
    call.request.erased.assign(erased, erased + call.erased->element_count());
  }
}

// Return a call that ends a started call, and the number that identifies the started call.
inline std::pair<XlaCall, std::uint32_t> done_call(ffi::RemainingArgs args,
                                                   ffi::RemainingRets results) {
  XlaCall call{.order = *args.get<ffi::AnyBuffer>(0), .next = **results.get<ffi::AnyBuffer>(0)};
  for (std::size_t i = 1; i < results.size(); ++i) {
    const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(i);
    call.request.total.push_back(segment_of(result));
    call.request.out.push_back(static_cast<std::byte*>(result.untyped_data()));
  }
  const auto* number =
      static_cast<const std::uint32_t*>((*args.get<ffi::AnyBuffer>(1)).untyped_data());
  return {std::move(call), *number};
}

inline ffi::Error failed_precondition(const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, text);
}

inline ffi::Error error_of(const Result& result) {
  if (result.outcome == Outcome::done) return ffi::Error::Success();
  if (result.outcome == Outcome::desynchronized) {
    return ffi::Error(ffi::ErrorCode::kOutOfRange, "jaxcoded.Desynchronized: " + result.error);
  }
  return failed_precondition(result.error);
}

// Return the lag as an int32.
inline std::int32_t lag_of(std::int64_t group) {
  const std::uint64_t rounds = Engine::instance().with(
      static_cast<std::uint64_t>(group), [](Member& member) { return member.lag(); });
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(std::min(rounds, most));
}

// Run an action that may find the group closed, or run out of memory. If it runs out of memory and `begins` a
// round of the group, this round fails.
template <class Action>
ffi::Error guarded(std::int64_t group, bool begins, Action action) {
  try {
    return counted(static_cast<std::uint64_t>(group), begins, action);
  } catch (const Closed& closed) {
    return failed_precondition(closed.text);
  } catch (const std::bad_alloc&) {
    return failed_precondition(no_memory);
  }
}

// The operands, results and attributes of the handlers. Operands that belong to the platform come before these.

template <class Binding>
auto bind_round(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::int64_t>("group")
      .template Attr<std::string_view>("signature")
      .template Attr<std::int64_t>("fingerprint")
      .template Attr<std::int64_t>("up")
      .template Attr<std::int64_t>("down")
      .template Attr<std::int64_t>("parts")
      .template Attr<std::int64_t>("last_part")
      .template Attr<std::int64_t>("skips")
      .template Attr<std::int64_t>("erases")
      .template Attr<ffi::Span<const std::int64_t>>("apart")
      .template Attr<ffi::Span<const double>>("examples");
}

template <class Binding>
auto bind_part(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::int64_t>("group")
      .template Attr<std::string_view>("signature")
      .template Attr<std::int64_t>("fingerprint")
      .template Attr<std::int64_t>("parts")
      .template Attr<std::int64_t>("number")
      .template Attr<std::int64_t>("slices")
      .template Attr<std::int64_t>("skips")
      .template Attr<ffi::Span<const std::int64_t>>("apart");
}

template <class Binding>
auto bind_take(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::Buffer<ffi::S32>>()
      .template Attr<std::int64_t>("group")
      .template Attr<std::string_view>("signature")
      .template Attr<std::int64_t>("fingerprint")
      .template Attr<std::int64_t>("first")
      .template Attr<ffi::Span<const std::int64_t>>("apart")
      .template Attr<ffi::Span<const double>>("examples")
      .template Attr<ffi::Span<const double>>("audits");
}

template <class Binding>
auto bind_computed(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .template Attr<std::int64_t>("group");
}

template <class Binding>
auto bind_start(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::BufferR0<ffi::U32>>()
      .template Attr<std::int64_t>("group")
      .template Attr<std::string_view>("signature")
      .template Attr<std::int64_t>("fingerprint")
      .template Attr<std::int64_t>("parts")
      .template Attr<std::int64_t>("slices")
      .template Attr<std::int64_t>("skips")
      .template Attr<std::int64_t>("erases")
      .template Attr<ffi::Span<const std::int64_t>>("apart")
      .template Attr<ffi::Span<const double>>("examples");
}

template <class Binding>
auto bind_done(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attr<std::int64_t>("group");
}

template <class Binding>
auto bind_lag(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::BufferR0<ffi::S32>>()
      .template Attr<std::int64_t>("group");
}

}  // namespace jaxcoded
