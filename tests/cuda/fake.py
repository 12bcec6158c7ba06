"""A simulated GPU: `driver.cpp` replaces NVIDIA's driver."""

import ctypes
import importlib.util
import os
import pathlib
import shutil
import subprocess

import numpy as np

from jaxcoded.transport.engine import _engine

HERE = pathlib.Path(__file__).parent
# in XLA's numbering
DTYPES = {"bool": 1, "int32": 4, "float16": 10, "float32": 11, "float64": 12}
DTYPES |= {"bfloat16": 16}
TOKEN = (17, 0, -1)


def compiler():
    """Return a C++ compiler, or None."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def compile_all(directory):
    """Compile the driver and the caller of handlers in a directory."""
    jaxlib = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
    for name in ("driver", "xla"):
        command = [compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
        # GCC rejects names in the headers of XLA
        command += ["-w", "-fpermissive"] * (name == "xla")
        command += [f"-I{jaxlib / 'include'}", HERE / f"{name}.cpp"]
        out = library(directory, name)
        subprocess.run([*command, "-o", out], check=True, timeout=120)


def library(directory, name):
    return pathlib.Path(directory) / f"lib{name}.so"


class Xla:
    """A caller of the engine's handlers for a GPU, which replaces XLA.

    Args:
        directory: the directory of `compile_all`.
    """

    def __init__(self, directory):
        self._call = ctypes.CDLL(str(library(directory, "xla"))).call_handler
        self._pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self._pointer.restype = ctypes.c_void_p
        self._pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

    def __call__(self, name, stream, operands, results, *, signature="", **attributes):
        """Call a handler; return the error, or an empty text. Operands and results are
        `buffer`s or `TOKEN`.
        """
        handler = getattr(_engine, f"cuda_{name}_handler")
        address = self._pointer(handler, b"xla._CUSTOM_CALL_TARGET")
        if name not in ("lag", "computed"):
            attributes |= {"signature": 0, "apart": 0}
        if name in ("round", "take"):
            attributes["examples"] = 0
        if name == "take":
            attributes["audits"] = 0
        names = sorted(attributes)
        text = ctypes.create_string_buffer(1000)
        failed = self._call(
            ctypes.c_void_p(address),
            ctypes.c_void_p(stream),
            *_columns(operands),
            *_columns(results),
            len(names),
            (ctypes.c_char_p * len(names))(*(each.encode() for each in names)),
            (ctypes.c_int64 * len(names))(*(attributes[each] for each in names)),
            signature.encode(),
            text,
            ctypes.c_size_t(len(text)),
        )
        return text.value.decode() if failed else ""


def _columns(buffers):
    dtypes, addresses, lengths = zip(*buffers)
    count = len(buffers)
    return (
        count,
        (ctypes.c_int * count)(*dtypes),
        (ctypes.c_void_p * count)(*addresses),
        (ctypes.c_int64 * count)(*lengths),
    )


class Gpu:
    """The GPU of this process.

    Args:
        directory: the directory of `compile_all`. From now on the engine uses the driver in this directory.
    """

    def __init__(self, directory):
        path = str(library(directory, "driver"))
        self.reason = _engine.load_cuda(path)
        self._lib = ctypes.CDLL(path)
        for name in ("fake_allocate", "fake_copied_bytes", "fake_pins"):
            getattr(self._lib, name).restype = ctypes.c_ulonglong

    def renew(self):
        """Make a new context current on this thread, as after a reset; return its
        stream.
        """
        self._lib.fake_context()
        return self.stream()

    def stream(self):
        """Make one more stream."""
        stream = ctypes.c_void_p()
        assert self._lib.cuStreamCreate(ctypes.byref(stream), 0) == 0
        return stream.value

    def no_context(self):
        self._lib.fake_no_context()

    def fail(self, function, after=1, times=1):
        self._lib.fake_fail(function.encode(), after, times)

    def lose(self, after=1):
        self._lib.fake_lose(after)

    def delay(self, microseconds):
        self._lib.fake_delay(microseconds)

    def copied_bytes(self):
        return self._lib.fake_copied_bytes()

    def pins(self):
        """Return how often memory was pinned."""
        return self._lib.fake_pins()

    def pending(self):
        return self._lib.fake_pending()

    def misuses(self):
        words = ctypes.create_string_buffer(200)
        count = self._lib.fake_misuses(words, 200)
        return f"{count} times, first: {words.value.decode()}" if count else ""

    def array(self, stream, values, *, seconds=0.0):
        """Return an array on the GPU, which the stream computes for ``seconds``."""
        return Array(self._lib, stream, np.asarray(values, order="C"), seconds)


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

    def buffer(self):
        """Return the array as an XLA buffer; a number has no axis."""
        length = self.size if self.shape else -1
        return DTYPES[self.dtype.name], self.address, length

    def read(self):
        """Return the values once the stream has computed them; None if the stream
        cannot compute them."""
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
