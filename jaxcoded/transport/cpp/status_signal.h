// `kill -USR1`: the state of a process's groups, whatever its program does.
#pragma once

#include <string>

#include "page.h"

namespace jaxcoded::status_signal {

// From now on the signal wakes the engine, which reports where its groups stand. Does nothing if the program
// has already set an action for the signal, or with JAXCODED_STATUS_SIGNAL=OFF. The program may still set
// another action later.
void install(WakeUp& engine);
// Call this in a process that was forked from the engine's process. No engine runs there, so the signal gets its
// default effect.
void uninstall();
// Whether the signal has come since the last call.
bool taken();
// Write as much as standard error takes at once, in whole lines, so that the lines of ranks do not mix. `words`
// keeps the rest.
void say(std::string& words);

}  // namespace jaxcoded::status_signal
