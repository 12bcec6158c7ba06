// The engine's state machine without MPI and threads, for tests.
#include <optional>

#include "bindings.h"
#include "memory.h"

namespace {

// In a `with` block, lets one allocation fail, after `count` others have succeeded.
struct Failing {
  std::size_t count;
  std::optional<jaxcoded::memory::Failing> now = {};
};

}  // namespace

NB_MODULE(_nodes, module) {
  namespace nb = jaxcoded::nb;
  nb::module_::import_("jaxcoded.transport._engine");  // for the types of this module
  nb::class_<Failing>(module, "Failing")
      .def("__init__", [](Failing* self, std::size_t count) { new (self) Failing{count}; })
      .def("__enter__", [](Failing& self) { self.now.emplace(self.count); })
      .def("__exit__", [](Failing& self, nb::args) { self.now.reset(); });
  jaxcoded::add_lone_node(module);
  jaxcoded::add_sharing(module);
  jaxcoded::add_schedules(module);
}
