#include "status_signal.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <string_view>

namespace jaxcoded::status_signal {
namespace {

static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<WakeUp*>::is_always_lock_free);

std::atomic<bool> came = false;
std::atomic<WakeUp*> wake_up = nullptr;

// The signal's handler. The signal may interrupt any thread anywhere, even a thread that holds the engine's lock
// or Python's lock. So the handler only notes that the signal came, and the engine's own thread does the rest.
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

void say(std::string& words) {
  while (!words.empty()) {
    pollfd to{STDERR_FILENO, POLLOUT, 0};
    if (poll(&to, 1, 0) <= 0) return;  // the reader is slow: the engine does not wait for it
    // a pipe that can take anything can take this much
    const std::size_t line = words.rfind('\n', PIPE_BUF - 1);
    const std::size_t most = line == words.npos ? PIPE_BUF : line + 1;
    const ssize_t written = write(STDERR_FILENO, words.data(), std::min(words.size(), most));
    if (written < 0 && (errno == EAGAIN || errno == EINTR)) return;
    words.erase(0, written < 0 ? words.size() : static_cast<std::size_t>(written));
  }
}

}  // namespace jaxcoded::status_signal
