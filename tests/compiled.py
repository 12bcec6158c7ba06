"""Compile tests fast, and share compiled programs among the processes of a test
session.

Tests run most programs once, so XLA would take longer to optimize a program than the program takes to run. `make
test-all` compiles as users do.

Processes share JAX's persistent compilation cache in a folder of the session. Ranks
reach the same program at the same time and take turns: the first one compiles, and the
other ranks wait for it. Data of a single process, such as the address of a
communicator, is a part of the program. JAX does not store programs with callbacks, so
no process gets such a program from another. A turn ends with the compilation, stored or
not. If a rank kept its turn into a collective, it would wait there for ranks that wait
for their turn.
"""

import fcntl
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

PLACE = "JAXCODED_COMPILED"  # environment variable with the session's folder
PATIENCE = 10  # seconds to wait for the compilation of another process
COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's last event

# XLA's flags, the fastest first. XLA ends a process with an unknown flag.
NOT_OPTIMIZED = "--xla_backend_optimization_level=0"
SIMPLER = f"{NOT_OPTIMIZED} --xla_cpu_use_fusion_emitters=false"
HASTE = (
    # LLVM gets each program as one module
    f"{SIMPLER} --xla_cpu_parallel_codegen_split_count=1",
    SIMPLER,
    NOT_OPTIMIZED,
)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # as in scripts/mpirun

_own = None
_turn = threading.local()  # the file that this thread has locked while it compiles


def make_haste():
    """Make this process, and the processes that it starts, compile fast, unless the
    environment says how to compile. Call this before JAX is imported.
    """
    if "XLA_FLAGS" in os.environ:
        return
    for haste in HASTE:
        flags = f"{ONE_THREAD} {haste}"
        tried = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            check=False,
        )
        if not tried.returncode:
            os.environ["XLA_FLAGS"] = flags
            return


def share():
    """Make this process share its compiled programs. Call this before anything is
    compiled.
    """
    global _own
    if PLACE not in os.environ:
        if "JAXCODED_JOB" in os.environ:  # a rank, see scripts/mpirun
            os.environ[PLACE] = os.path.join(tempfile.gettempdir(), "compiled")
        else:
            _own = tempfile.TemporaryDirectory(prefix="jaxcoded-")
            os.environ[PLACE] = _own.name
    import jax

    if not _take_turns():
        return
    jax.monitoring.register_event_duration_secs_listener(_listen)
    jax.config.update("jax_compilation_cache_dir", os.environ[PLACE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _take_turns():
    """Replace JAX's file cache by `_InTurns`, if JAX still has it in the same place.

    The tests use no other private part of JAX. JAX's public options name a folder, but not the class that reads and
    writes in it. JAX's class lets all ranks compile the same program, and read a partial file. If the name has moved,
    each process compiles alone, and tests/test_compiled.py fails.
    """
    try:
        place = importlib.import_module("jax._src.compilation_cache")
    except ImportError:
        return False
    if not hasattr(place, "LRUCache"):
        return False
    place.LRUCache = _InTurns
    return True


def _listen(event, duration, **_):
    if event == COMPILED:
        _pass_on()


def _pass_on():
    """End this thread's turn."""
    if (lock := getattr(_turn, "lock", None)) is not None:
        _turn.lock = None
        os.close(lock)


class _InTurns:
    """A replacement for JAX's file cache. No process reads a partial file. After `get` has found nothing, the other
    processes wait until this thread has compiled.
    """

    def __init__(self, path, **_):
        self._path = pathlib.Path(path)  # JAX compares it
        self._path.mkdir(parents=True, exist_ok=True)

    def get(self, key):
        _pass_on()
        program = self._path / key
        if not program.exists():
            _turn.lock = os.open(f"{program}.lock", os.O_CREAT | os.O_RDWR)
            self._wait()
        if not program.exists():
            return None
        _pass_on()
        return program.read_bytes()

    def put(self, key, value):
        with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
            file.write(value)
        os.rename(file.name, self._path / key)
        _pass_on()

    def clear(self):
        pass

    def _wait(self):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                return fcntl.flock(_turn.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(2e-3)


if __name__ == "__main__":  # for jobs that the Makefile starts
    make_haste()
    print(os.environ.get("XLA_FLAGS", ONE_THREAD))
