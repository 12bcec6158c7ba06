// Too little memory: some of the engine's calls of malloc fail. This library must be preloaded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

static __thread long before = -1;
static __thread int inside = 0;
static void* (*real)(size_t);

// Let an allocation of this thread fail, after this many have succeeded.
void fail_after(long number) { before = number; }

// Whether an allocation has failed. From now on none fails.
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
