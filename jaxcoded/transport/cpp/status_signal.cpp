#include "status_signal.h"

#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string_view>

namespace jaxcoded::status_signal {
namespace {

static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<WakeUp*>::is_always_lock_free);

std::atomic<bool> came = false;
std::atomic<WakeUp*> wake_up = nullptr;

// It may interrupt any thread anywhere, also one that holds the engine's lock or Python's: it notes
// that it was called, and the engine's own thread does the rest.
void note(int) {
  const int error = errno;
  came.store(true);
  if (WakeUp* const engine = wake_up.load()) engine->send();
  errno = error;
}

}  // namespace

void install(WakeUp& engine) {
  const char* wanted = std::getenv("JAXCODED_STATUS_SIGNAL");
  if (wanted && std::string_view(wanted) == "OFF") return;
  struct sigaction now = {};
  if (sigaction(SIGUSR1, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL) return;
  wake_up.store(&engine);
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigaction(SIGUSR1, &action, nullptr);
}

void uninstall() {
  struct sigaction now = {};
  if (sigaction(SIGUSR1, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != note) return;
  now = {};
  now.sa_handler = SIG_DFL;
  sigaction(SIGUSR1, &now, nullptr);
}

bool taken() { return came.exchange(false); }

}  // namespace jaxcoded::status_signal
