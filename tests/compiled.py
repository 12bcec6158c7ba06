"""Tests compile in haste, and what one process of a test session has compiled is not compiled again
by the others.

In haste: most of what the tests compile runs once, and XLA takes longer to make it fast than it then
takes. `make test-all` compiles as users do.

The other is JAX's persistent compilation cache in a folder of the session, and ranks, which come to the
same program at the same time, take turns: the first one compiles, the others wait for it. What is
of one process only, such as the address of a communicator, is a part of the program, and JAX does
not store programs with callbacks: nobody gets such a program from another process. The turn ends
with the compilation, stored or not: a rank that went on with it to a collective would wait there
for those that wait for their turn.
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

PLACE = "JAXCODED_COMPILED"  # environment variable of the folder, for processes of the session
PATIENCE = 10  # seconds to wait for the compilation of another process
COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX says at its end

# What XLA is told, the hastiest first. It ends a process that tells it what it does not know.
HASTE = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    "--xla_backend_optimization_level=0",
)
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # as scripts/mpirun says it

_own = None
_turn = threading.local()  # the file that this thread has locked while it compiles


def make_haste():
    """Have this process, and those that it starts, compile in haste, unless the environment says how
    to compile. Call it before JAX is imported."""
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
    """Have this process share what it compiles. Call it before anything is compiled."""
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
    """Put `_InTurns` in the place of JAX's cache of files, if it still is where it was.

    This is all that the tests use of JAX's private parts. Its public options name a folder, but not
    what reads and writes there, and JAX itself lets all ranks compile the same program, and read a
    file that is half written. Where the name has moved everybody compiles alone:
    tests/test_compiled.py says so.
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
    """In place of JAX's own. Nobody reads a part of a file, and after `get` has found nothing, the
    others wait until this thread has compiled."""

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
