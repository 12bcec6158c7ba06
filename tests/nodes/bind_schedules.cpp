// Schedules on groups that were planned in Python.
#include "bindings.h"
#include "schedule.h"

namespace jaxcoded {
namespace {

using SharesTuple = std::tuple<std::vector<std::size_t>, std::vector<double>, std::size_t, std::size_t>;
using CombinationTuple = std::tuple<std::size_t, std::size_t, std::vector<double>>;

}  // namespace

void add_schedules(nb::module_& module) {
  nb::class_<Group>(module, "Group")
      .def("__init__",
           [](Group* self, std::vector<Rank> parents, std::vector<int> hosts, std::vector<Family> families,
              std::vector<Family> delegating, std::vector<Decoder> decoders, std::vector<Decoder> comparing,
              std::vector<double> deadline_shares, const std::vector<SharesTuple>& shares,
              const std::vector<CombinationTuple>& combinations, std::vector<std::size_t> tolerances,
              std::vector<std::vector<std::vector<bool>>> erasures, double amplification,
              std::uint64_t multiple, std::vector<std::vector<Rank>> holders,
              std::vector<std::size_t> starts, std::vector<bool> watched, std::vector<Group> replanned) {
             Group* const group = new (self) Group{.parents = std::move(parents),
                                                   .hosts = std::move(hosts),
                                                   .families = std::move(families),
                                                   .delegating = std::move(delegating),
                                                   .decoders = std::move(decoders),
                                                   .comparing = std::move(comparing),
                                                   .deadline_shares = std::move(deadline_shares),
                                                   .shares = {},
                                                   .combinations = {},
                                                   .tolerances = std::move(tolerances),
                                                   .erasures = std::move(erasures),
                                                   .amplification = amplification,
                                                   .multiple = multiple,
                                                   .holders = std::move(holders),
                                                   .starts = std::move(starts),
                                                   .watched = std::move(watched),
                                                   .replanned = std::move(replanned)};
             for (const auto& [held, coefficients, parts, slices] : shares) {
               group->shares.push_back({held, coefficients, parts, slices});
             }
             for (const auto& [slices, parts, coefficients] : combinations) {
               group->combinations.push_back({slices, parts, coefficients});
             }
           },
           nb::kw_only(), nb::arg("parents"), nb::arg("hosts"), nb::arg("families"), nb::arg("delegating"),
           nb::arg("decoders"), nb::arg("comparing"), nb::arg("deadline_shares"), nb::arg("shares"),
           nb::arg("combinations"), nb::arg("tolerances"), nb::arg("erasures"), nb::arg("amplification"),
           nb::arg("multiple"), nb::arg("holders"), nb::arg("starts"), nb::arg("watched"), nb::arg("replanned"));
  nb::class_<Report>(module, "Report")
      .def_ro("finding", &Report::finding)
      .def_ro("happened", &Report::happened);
  nb::class_<Schedule>(module, "Schedule")
      .def("__init__",
           [](Schedule* self, std::uint64_t seed, bool calm, double damaged, double vanishing) {
             new (self) Schedule{.seed = seed,
                                 .theme = calm ? Theme::calm : Theme::disorder,
                                 .damaged = damaged,
                                 .vanishing = vanishing};
           },
           nb::arg("seed"), nb::kw_only(), nb::arg("calm"), nb::arg("damaged") = 0.0,
           nb::arg("vanishing") = 0.0)
      .def_rw("seed", &Schedule::seed);
  module.def("play", [](const Group& group, const Schedule& schedule, bool traced) {
    return play(group, schedule, traced);
  }, nb::arg("group"), nb::arg("schedule"), nb::kw_only(), nb::arg("traced") = false);
  // Return the report of the schedule, cut to the fewest events that still show a finding.
  module.def("shortest", [](const Group& group, Schedule schedule) {
    Report full_report = play(group, schedule);
    for (schedule.most_happenings = 0; schedule.most_happenings < full_report.happenings;
         ++schedule.most_happenings) {
      const Report report = play(group, schedule);
      if (!report.finding.empty()) return report;
    }
    return full_report;
  }, nb::arg("group"), nb::arg("schedule"));
  // Return for each rank: the longest turn and all turns in seconds, and the number and bytes of its messages.
  module.def("count_costs", [](const Group& group, std::size_t rounds, std::uint64_t count, bool sections) {
    std::vector<std::tuple<double, double, std::uint64_t, std::uint64_t>> out;
    const nb::gil_scoped_release released;
    try {
      for (const Cost& cost : count_costs(group, rounds, count, sections)) {
        out.emplace_back(cost.longest_turn, cost.seconds, cost.messages, cost.bytes);
      }
    } catch (const Finding& finding) {
      throw std::runtime_error(finding.text);
    }
    return out;
  }, nb::arg("group"), nb::arg("rounds"), nb::arg("count"), nb::kw_only(), nb::arg("sections"));
  // Play schedules with this seed and the following seeds, until a schedule has a finding. Returns the seed of
  // that schedule, or none, and what was seen.
  module.def("play_many", [](const Group& group, Schedule schedule, std::size_t count) {
    const nb::gil_scoped_release released;
    Seen seen;
    for (std::size_t i = 0; i < count; ++i, ++schedule.seed) {
      const Report report = play(group, schedule);
      seen.add(report.seen);
      if (!report.finding.empty()) return std::pair(std::optional(schedule.seed), seen.by_name());
    }
    return std::pair(std::optional<std::uint64_t>(), seen.by_name());
  }, nb::arg("group"), nb::arg("schedule"), nb::arg("count"));
}

}  // namespace jaxcoded
