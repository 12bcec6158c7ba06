// Too little memory: some of what the engine takes from malloc is not there. To be preloaded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

static __thread long before = -1;
static __thread int inside = 0;
static void* (*real)(size_t);

// The next one fails after so many of this thread.
void fail_after(long number) { before = number; }

// Whether it has failed. None does from now on.
int failed(void) {
  const int out = before == -2;
  before = -1;
  return out;
}

static int of_the_engine(void* caller) {
  Dl_info info;
  inside = 1;  // dladdr may take memory
  const int found = dladdr(caller, &info) && info.dli_fname;
  inside = 0;
  return found && (strstr(info.dli_fname, "libstdc++") || strstr(info.dli_fname, "_engine") ||
                   strstr(info.dli_fname, "_nodes"));
}

void* malloc(size_t bytes) {
  if (!real) real = dlsym(RTLD_NEXT, "malloc");
  if (before >= 0 && !inside && of_the_engine(__builtin_return_address(0)) && before-- == 0) {
    before = -2;
    errno = ENOMEM;
    return NULL;
  }
  return real(bytes);
}
