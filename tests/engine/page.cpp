// The page that processes share, without groups. Tries what its argument names, see test_page.py;
// the exit status is 1 where something is not as it should be, and what is printed then.
#include "page.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>

using namespace jaxcoded;

namespace {

int calls_of_prctl = 0;

bool wrong = false;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  wrong = true;
}

// A place on the page becomes another group's while a reader looks whether what it has read is
// valid, which it is not any more: between any two instructions of the reader.
void withdrawn() {
  constexpr std::size_t what = 0;
  constexpr std::uint64_t round = 3, first_valid = 5;
  for (int steps = 0;; ++steps) {
    OwnPage page;
    const Card card = page.open_slot();
    page->validity[card.slot].first_valid[what].store(first_valid);
    const pid_t reader = fork();
    if (reader == 0) {
      const auto peer = PeerPage::open(card);
      if (!peer || ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
      raise(SIGSTOP);
      _exit(peer->valid(what, round));
    }
    int status = 0;
    waitpid(reader, &status, 0);
    for (int step = 0; step < steps && WIFSTOPPED(status); ++step) {
      ptrace(PTRACE_SINGLESTEP, reader, nullptr, nullptr);
      waitpid(reader, &status, 0);
    }
    const bool last = !WIFSTOPPED(status);
    page.close_slot(card.slot);
    expect(page.open_slot().slot == card.slot, "the next group has the place");
    if (!last) {
      ptrace(PTRACE_CONT, reader, nullptr, nullptr);
      waitpid(reader, &status, 0);
    }
    expect(WIFEXITED(status) && WEXITSTATUS(status) != 2, "the reader can be stopped");
    expect(WEXITSTATUS(status) == 0, "what is withdrawn stays so");
    if (last || wrong) break;
  }
}

// Another process may have the number of one that has ended.
void number() {
  OwnPage page;
  const Card card = page.open_slot();
  const auto peer = PeerPage::open(card);
  const int value = 7;
  const auto read = [&] {
    int copy = 0;
    return peer->read(reinterpret_cast<std::uintptr_t>(&value), reinterpret_cast<std::byte*>(&copy),
                      sizeof copy) &&
           copy == value;
  };
  expect(peer && peer->readable() && read(), "memory can be read");
  *reinterpret_cast<std::uint64_t*>(card.magic_address) ^= 1;
  expect(!read(), "the memory of another process is not");
  *reinterpret_cast<std::uint64_t*>(card.magic_address) ^= 1;
  expect(read(), "and that of the first one still is");
}

// A process of that number may have anything where a page should be.
void descriptor() {
  OwnPage page;
  Card card = page.open_slot();
  const int unsealed = memfd_create("jaxcoded", 0);
  expect(ftruncate(unsealed, sizeof(Page)) == 0 &&
             pwrite(unsealed, &card.magic, sizeof card.magic, Page::writable) > 0,
         "there is memory");
  card.descriptor = unsealed;
  expect(!PeerPage::open(card), "memory that may shrink is not mapped");

  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  expect(grantpt(terminal) == 0 && unlockpt(terminal) == 0, "there is a terminal");
  card.descriptor = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  expect(!PeerPage::open(card), "a terminal is not mapped");
  expect(open("/dev/tty", O_RDONLY) < 0, "nor does it become this process's");
}

// Others may read this process's memory only where there are some that need to.
void ptracer() {
  OwnPage page;
  const Card own = page.open_slot();
  Card near = own, far = own;
  near.magic = far.magic = ~own.magic;
  far.host = ~own.host;
  page.let_read({own, far});
  expect(calls_of_prctl == 0, "nobody may");
  setenv("JAXCODED_PTRACER", "OFF", 1);
  page.let_read({own, near});
  expect(calls_of_prctl == 0, "nobody may with JAXCODED_PTRACER=OFF");
  unsetenv("JAXCODED_PTRACER");
  page.let_read({own, near});
  expect(calls_of_prctl == 1, "the others on the host may");
}

}  // namespace

// In the place of the system's.
extern "C" int prctl(int, ...) {
  ++calls_of_prctl;
  return 0;
}

int main(int, char** arguments) {
  const std::map<std::string, void (*)()> known{{"withdrawn", withdrawn},
                                                {"number", number},
                                                {"descriptor", descriptor},
                                                {"ptracer", ptracer}};
  known.at(arguments[1])();
  return wrong;
}
