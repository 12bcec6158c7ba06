// `kill -USR1`: the state of a process's groups, whatever its program does.
#pragma once

#include <string>

#include "page.h"

namespace jaxcoded::status_signal {

// From now on the signal wakes the engine, which reports where its groups stand. Not if the program,
// or JAXCODED_STATUS_SIGNAL=OFF, has decided what the signal does. A program may do so later, too.
void install(WakeUp& engine);
// In a process that was forked from this one no engine runs, so the signal has its default effect.
void uninstall();
// Whether the signal has come since the last call.
bool taken();
// Write what standard error takes at once, line by line, so that ranks' lines do not mix. `words` keeps the rest.
void say(std::string& words);

}  // namespace jaxcoded::status_signal
