// The ledger and the shares of ranks as Python classes, for tests.
#include "bindings.h"
#include "ledger.h"
#include "share.h"

namespace jaxcoded {
namespace {

std::pair<std::uint32_t, std::uint32_t> pair_of(const Version& version) {
  return {version.generation, version.blocks};
}

}  // namespace

void add_sharing(nb::module_& module) {
  nb::class_<Progress>(module, "Progress")
      .def_ro("generation", &Progress::generation)
      .def_ro("added", &Progress::added)
      .def_ro("answered", &Progress::answered)
      .def_ro("out", &Progress::out)
      .def_ro("claims", &Progress::claims)
      .def_ro("returned", &Progress::returned);
  nb::class_<Share>(module, "Share")
      .def(nb::init<bool, const std::vector<Block>&>(), nb::arg("empties") = true,
           nb::arg("claimed") = std::vector<Block>())
      .def("grant", &Share::grant)
      .def("recall", &Share::recall)
      .def("drop", &Share::drop)
      .def("leave", &Share::leave)
      .def("take", &Share::take)
      .def("done", &Share::done)
      .def("progress", &Share::progress)
      .def_prop_ro("computes", [](const Share& self) { return self.computes().has_value(); })
      .def_prop_ro("fresh", &Share::fresh)
      .def_prop_ro("sealed", &Share::sealed)
      .def_prop_ro("version", [](const Share& self) { return pair_of(self.version()); });
  nb::class_<Order> order(module, "Order");
  nb::enum_<Order::Kind>(order, "Kind")
      .value("grant", Order::Kind::grant)
      .value("recall", Order::Kind::recall)
      .value("drop", Order::Kind::drop)
      .value("hold", Order::Kind::hold);
  order.def_ro("member", &Order::member)
      .def_ro("kind", &Order::kind)
      .def_ro("generation", &Order::generation)
      .def_ro("blocks", &Order::blocks);
  nb::class_<Ledger>(module, "Ledger")
      .def(nb::init<std::vector<std::vector<std::size_t>>, std::size_t, double>())
      .def(nb::init<const Division&, double>())
      .def("begin", &Ledger::begin, nb::arg("now"), nb::arg("costs") = std::vector<double>())
      .def("arrived", &Ledger::arrived, nb::arg("member"), nb::arg("claims"), nb::arg("now"))
      .def("will_ask", &Ledger::will_ask)
      .def("heard", &Ledger::heard)
      .def("give_up", &Ledger::give_up)
      .def("lost", &Ledger::lost)
      .def("close", &Ledger::close)
      .def("orders", &Ledger::orders)
      .def("wakes_at", &Ledger::wakes_at)
      .def_prop_ro("settled", &Ledger::settled)
      .def("version", [](const Ledger& self, std::size_t member) {
        return pair_of(self.version(member));
      })
      .def_prop_ro("division", &Ledger::division)
      .def_prop_ro("computed", [](const Ledger& self) {
        std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> out;
        for (const Computed& blocks : self.computed()) out.emplace_back(blocks.own, blocks.others, blocks.unused);
        return out;
      })
      .def_prop_ro("closed", &Ledger::closed)
      .def_prop_ro("missing", &Ledger::missing)
      .def_prop_ro("orphans", [](const Ledger& self) { return self.orphans(); });
}

}  // namespace jaxcoded
