// The engine's state machine without MPI and threads, for tests.
#include "bindings.h"

NB_MODULE(_nodes, module) {
  jaxcoded::nb::module_::import_("jaxcoded.transport._engine");  // for the types of this module
  jaxcoded::add_lone_node(module);
  jaxcoded::add_sharing(module);
  jaxcoded::add_schedules(module);
}
