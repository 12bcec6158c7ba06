// `kill -USR1`: the state of a process's groups, whatever its program does.
#pragma once

#include <string>

#include "page.h"

namespace jaxcoded::status_signal {

// From now on the signal wakes the engine, which says where its groups stand. Not where the program,
// or JAXCODED_STATUS_SIGNAL=OFF, has decided what the signal does. A program may do so later, too.
void install(WakeUp& engine);
// In a process that was forked from this one, where no engine runs, it does what it does elsewhere.
void uninstall();
// Whether the signal has come since this was asked last.
bool taken();
// Write to standard error what it takes at once, line by line so that those of ranks do not mix. The rest stays in `words`.
void say(std::string& words);

}  // namespace jaxcoded::status_signal
