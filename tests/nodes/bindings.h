// The parts of the module `_nodes`.
#pragma once

#include "module.h"

namespace jaxcoded {

// A node on its own, with a wire in Python.
void add_lone_node(nb::module_& module);
// How the work of a round is shared.
void add_sharing(nb::module_& module);
// Schedules on many nodes.
void add_schedules(nb::module_& module);

}  // namespace jaxcoded
