// A thread of Python's in the engine, without the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace jaxcoded {

// Lets other threads of Python's run until the end of its scope, where the thread waits for its turn
// again. It must hold no lock there.
//
// While the interpreter ends, a daemon thread never gets its turn: Python 3.14 lets it hang, and
// those before end it (`pthread_exit`), which unwinds its stack. Destructors along the way, this
// one's and those of nanobind, may not be left like that: `std::terminate` would end the process.
// So it hangs, as with 3.14, until the process is over.
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
