// The parts of the module `_nodes`.
#pragma once

#include "module.h"

namespace jaxcoded {

// A node on its own, with a wire in Python.
void add_lone_node(nb::module_& module);
// The ledger of shared work, and the share of each rank.
void add_sharing(nb::module_& module);
// Schedules on many nodes.
void add_schedules(nb::module_& module);

}  // namespace jaxcoded
