// A Python thread in the engine, without the interpreter's lock.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace jaxcoded {

// Lets other Python threads run until the end of its scope. At its end this thread waits for the interpreter's
// lock, and must hold no other lock.
//
// While the interpreter ends, a daemon thread never gets its lock. Python 3.14 lets the thread hang. Earlier
// versions end the thread (`pthread_exit`), which unwinds its stack. Unwinding through destructors (this
// class's and nanobind's) would end the process (`std::terminate`). So the thread hangs here, as with 3.14,
// until the process ends.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // `pthread_exit` throws no object that a reference could be bound to
      while (true) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace jaxcoded
