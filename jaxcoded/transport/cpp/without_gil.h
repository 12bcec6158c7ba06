// A Python thread in the engine, without the interpreter's lock.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace jaxcoded {

// Lets other Python threads run until the end of its scope, where the thread waits for its turn
// again. It must hold no lock there.
//
// While the interpreter ends, a daemon thread never gets its turn. Python 3.14 lets it hang; earlier
// versions end it (`pthread_exit`), which unwinds its stack. Unwinding through destructors, this one's
// and those of nanobind, would end the process (`std::terminate`). So the thread hangs, as with 3.14,
// until the process is over.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // without a name: what unwinds is no object that a reference could be bound to
      while (true) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace jaxcoded
