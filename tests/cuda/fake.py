"""A GPU without a GPU: `driver.cpp` stands in for NVIDIA's driver."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import numpy as np

from jaxcoded.transports.engine import _engine

SOURCE = pathlib.Path(__file__).with_name("driver.cpp")


def compiler():
    """A C++ compiler, or None."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def compiled(directory):
    """The path of the compiled stand-in."""
    library = pathlib.Path(directory) / "libfakecuda.so"
    command = [compiler(), "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, SOURCE, "-o", library], check=True, timeout=120)
    return library


class Gpu:
    """The GPU of this process.

    Args:
        library: of `compiled`. The engine takes it for the driver from now on.
    """

    def __init__(self, library):
        self.reason = _engine.load_cuda(str(library))
        self._lib = ctypes.CDLL(str(library))
        for name in ("fake_allocate", "fake_copied_bytes"):
            getattr(self._lib, name).restype = ctypes.c_ulonglong

    def renew(self):
        """Another context, current on this thread, as after a reset; its stream."""
        self._lib.fake_context()
        stream = ctypes.c_void_p()
        assert self._lib.cuStreamCreate(ctypes.byref(stream), 0) == 0
        return stream.value

    def no_context(self):
        self._lib.fake_no_context()

    def fail(self, function, after=1):
        self._lib.fake_fail(function.encode(), after)

    def lose(self, after=1):
        self._lib.fake_lose(after)

    def delay(self, microseconds):
        self._lib.fake_delay(microseconds)

    def copied_bytes(self):
        return self._lib.fake_copied_bytes()

    def pending(self):
        return self._lib.fake_pending()

    def misuses(self):
        words = ctypes.create_string_buffer(200)
        count = self._lib.fake_misuses(words, 200)
        return f"{count} times, first: {words.value.decode()}" if count else ""

    def array(self, stream, values, *, seconds=0.0):
        """An array there, which the stream computes for so many seconds."""
        return Array(self._lib, stream, np.ascontiguousarray(values), seconds)


class Array:
    """An array in the memory of the GPU."""

    def __init__(self, lib, stream, values, seconds):
        self._lib, self._stream = lib, ctypes.c_void_p(stream)
        self.dtype, self.shape, self.size = values.dtype, values.shape, values.size
        self.nbytes = values.nbytes
        self.address = lib.fake_allocate(ctypes.c_size_t(values.nbytes))
        lib.fake_compute(
            self._stream,
            ctypes.c_ulonglong(self.address),
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_size_t(values.nbytes),
            int(seconds * 1e6),
        )

    def read(self):
        """What is there once the stream has come so far; None if it cannot."""
        out = np.empty(self.shape, self.dtype)
        code = self._lib.fake_read(
            self._stream,
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_ulonglong(self.address),
            ctypes.c_size_t(self.nbytes),
        )
        return None if code else out

    def free(self):
        self._lib.fake_free(ctypes.c_ulonglong(self.address))
