// The handlers for programs on several devices of this process: XLA calls them once for each device,
// each on a separate thread.
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <string>

#include "rendezvous.h"
#include "xla.h"
#include "xla_call.h"

namespace jaxcoded {
namespace {

using Place = ffi::BufferR0<ffi::S32>;
using Owners = ffi::Span<const std::int64_t>;

// What one device brings: its call, and the address for a number that is the same on all devices.
struct Brought {
  XlaCall call;
  void* number = nullptr;
};

Met met_of(const Result& result) {
  return {.failed = result.outcome != Outcome::done,
          .desynchronized = result.outcome == Outcome::desynchronized,
          .error = result.error};
}

// The vectors of all devices, as the vectors of one rank: one vector after the other, each with the parts that
// devices own, in the order of the devices. `owners` names, for each vector and device, the owner of the part
// that this device has.
class Together {
 public:
  Together(const std::vector<void*>& brought, Owners owners) : owners_(owners) {
    for (void* each : brought) devices_.push_back(static_cast<Brought*>(each));
  }

  Request request() const {
    Request out = devices_.front()->call.request;
    out.message = chosen<Segment>([](Request& request) -> auto& { return request.message; });
    out.total = chosen<Segment>([](Request& request) -> auto& { return request.total; });
    out.own = chosen<const std::byte*>([](Request& request) -> auto& { return request.own; });
    out.out = chosen<std::byte*>([](Request& request) -> auto& { return request.out; });
    return out;
  }

  // Copy to every device the results that the owners of its parts got.
  void hand_out() const {
    const Request& first = devices_.front()->call.request;
    for (std::size_t vector = 0; vector < first.out.size(); ++vector) {
      for (std::size_t device = 0; device < devices_.size(); ++device) {
        const std::size_t owner = owner_of(vector, device);
        if (owner == device || !first.total[vector].bytes()) continue;
        std::memcpy(devices_[device]->call.request.out[vector],
                    devices_[owner]->call.request.out[vector], first.total[vector].bytes());
      }
    }
  }

  template <class Number>
  void hand_out(Number number) const {
    for (const Brought* device : devices_) *static_cast<Number*>(device->number) = number;
  }

 private:
  std::size_t owner_of(std::size_t vector, std::size_t device) const {
    return static_cast<std::size_t>(owners_[vector * devices_.size() + device]);
  }

  template <class Item, class Field>
  std::vector<Item> chosen(Field field) const {
    std::vector<Item> out;
    for (std::size_t vector = 0; vector < field(devices_.front()->call.request).size(); ++vector) {
      for (std::size_t device = 0; device < devices_.size(); ++device) {
        if (owner_of(vector, device) == device) {
          out.push_back(field(devices_[device]->call.request)[vector]);
        }
      }
    }
    return out;
  }

  std::vector<Brought*> devices_;
  Owners owners_;
};

// Let all devices call together: one device makes the call for all, with what they bring. `begins`: whether the
// call begins a round. If a device has too little memory to come, the call fails for all.
template <class Make, class Action>
ffi::Error meet(ffi::RunId run, Place place, std::int64_t group, bool begins, std::int64_t devices, double patience,
                Make make, Action action) {
  const auto made = [&](const std::vector<void*>& brought) {
    Met met;
    const ffi::Error error = guarded(group, begins, [&] {
      met = action(brought);
      return ffi::Error::Success();
    });
    return error.success() ? met : Met{.failed = true, .error = error.message()};
  };
  try {
    return guarded(group, false, [&] {
      std::optional<Brought> brings;
      Arrival arrival{.group = static_cast<std::uint64_t>(group),
                      .run = run.run_id,
                      .begins = begins,
                      .device = static_cast<std::size_t>(*place.typed_data()),
                      .devices = static_cast<std::size_t>(devices),
                      .seconds = patience};
      try {
        arrival.call = make(brings);
        pass_on(brings->call);
        read(brings->call);
      } catch (const std::bad_alloc&) {
        Rendezvous::instance().miss(arrival);
        throw Missed();
      }
      arrival.brings = &*brings;
      const Met met = Rendezvous::instance().meet(arrival, std::ref(made));
      if (!met.failed) return ffi::Error::Success();
      return error_of({met.desynchronized ? Outcome::desynchronized : Outcome::failed, met.error});
    });
  } catch (const Missed&) {  // the run's failure is noted
    return failed_precondition(no_memory);
  }
}

ffi::Error round_impl(ffi::RunId run, Place place, ffi::RemainingArgs args,
                      ffi::RemainingRets results, std::int64_t group, std::string_view signature,
                      std::int64_t fingerprint, std::int64_t up, std::int64_t down,
                      std::int64_t parts, std::int64_t last_part, std::int64_t skips,
                      std::int64_t erases, ffi::Span<const std::int64_t> apart,
                      ffi::Span<const double> examples, std::int64_t devices, Owners owners,
                      double patience) {
  const auto make = [&](std::optional<Brought>& brings) {
    brings = {.call = round_call(args, results, signature, fingerprint, up, down, parts, last_part, skips, erases,
                                 apart, examples)};
    return std::string(signature);
  };
  return meet(run, place, group, last_part == 0, devices, patience, make, [&](const std::vector<void*>& brought) {
    const Together all(brought, owners);
    const Met met = met_of(Engine::instance().run(static_cast<std::uint64_t>(group), all.request()));
    if (!met.failed) all.hand_out();
    return met;
  });
}

ffi::Error start_impl(ffi::RunId run, Place place, ffi::RemainingArgs args,
                      ffi::Result<ffi::AnyBuffer> order, ffi::ResultBufferR0<ffi::U32> number,
                      std::int64_t group, std::string_view signature, std::int64_t fingerprint,
                      std::int64_t parts, std::int64_t slices, std::int64_t skips,
                      std::int64_t erases, ffi::Span<const std::int64_t> apart,
                      ffi::Span<const double> examples,
                      std::int64_t devices, Owners owners, double patience) {
  const auto make = [&](std::optional<Brought>& brings) {
    brings = {.call = start_call(args, *order, signature, fingerprint, parts, slices, skips, erases, apart, examples),
              .number = number->typed_data()};
    return "the start of " + std::string(signature);
  };
  return meet(run, place, group, true, devices, patience, make, [&](const std::vector<void*>& brought) -> Met {
    const Together all(brought, owners);
    const Started started = Engine::instance().start(static_cast<std::uint64_t>(group), all.request());
    if (!started.error.empty()) return {.failed = true, .error = started.error};
    all.hand_out(started.number);
    return {};
  });
}

ffi::Error done_impl(ffi::RunId run, Place place, ffi::RemainingArgs args,
                     ffi::RemainingRets results, std::int64_t group, std::int64_t devices,
                     Owners owners, double patience) {
  std::uint32_t number = 0;
  const auto make = [&](std::optional<Brought>& brings) {
    auto called = done_call(args, results);
    number = called.second;
    brings = {.call = std::move(called.first)};
    return "the end of started round " + std::to_string(number);
  };
  return meet(run, place, group, false, devices, patience, make, [&](const std::vector<void*>& brought) {
    const Together all(brought, owners);
    const Request wanted = all.request();
    const Met met = met_of(
        Engine::instance().finish(static_cast<std::uint64_t>(group), number, wanted.total, wanted.out));
    if (!met.failed) all.hand_out();
    return met;
  });
}

// The lag must be the same on all devices, since each device decides by it whether to compute.
ffi::Error lag_impl(ffi::RunId run, Place place, ffi::AnyBuffer order,
                    ffi::Result<ffi::AnyBuffer> next, ffi::ResultBufferR0<ffi::S32> lag,
                    std::int64_t group, std::int64_t devices, double patience) {
  const auto make = [&](std::optional<Brought>& brings) {
    brings = {.call = {.order = order, .next = *next}, .number = lag->typed_data()};
    return "lag";
  };
  return meet(run, place, group, false, devices, patience, make, [&](const std::vector<void*>& brought) -> Met {
    Together(brought, {nullptr, 0}).hand_out(lag_of(group));
    return {};
  });
}

auto on_devices() { return ffi::Ffi::Bind().Ctx<ffi::RunId>().Arg<Place>(); }

template <class Binding>
auto with_devices(Binding binding) {
  return std::move(binding)
      .template Attr<std::int64_t>("devices")
      .template Attr<Owners>("owners")
      .template Attr<double>("patience");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(devices_round_handler_impl, round_impl,
                       with_devices(bind_round(on_devices())));
XLA_FFI_DEFINE_HANDLER(devices_start_handler_impl, start_impl,
                       with_devices(bind_start(on_devices())));
XLA_FFI_DEFINE_HANDLER(devices_done_handler_impl, done_impl,
                       with_devices(bind_done(on_devices())));
XLA_FFI_DEFINE_HANDLER(devices_lag_handler_impl, lag_impl,
                       bind_lag(on_devices())
                           .Attr<std::int64_t>("devices")
                           .Attr<double>("patience"));

XLA_FFI_Error* devices_round_handler(XLA_FFI_CallFrame* frame) {
  return devices_round_handler_impl(frame);
}
XLA_FFI_Error* devices_start_handler(XLA_FFI_CallFrame* frame) {
  return devices_start_handler_impl(frame);
}
XLA_FFI_Error* devices_done_handler(XLA_FFI_CallFrame* frame) {
  return devices_done_handler_impl(frame);
}
XLA_FFI_Error* devices_lag_handler(XLA_FFI_CallFrame* frame) {
  return devices_lag_handler_impl(frame);
}

}  // namespace jaxcoded
