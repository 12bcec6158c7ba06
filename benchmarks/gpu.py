"""What does a round of the engine cost on a GPU?

    JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \\
        scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/gpu.py

The benchmark prints a table and a verdict for three questions. How close do the copies
of a call come to a bare copy from and to pinned memory? How long does an all-reduce of
arrays on the GPU take, coded and by mpi4jax, with all ranks on one GPU? How close do
encode and decode come to a copy on the GPU? Ranks share one GPU: run the benchmark with
2 and with 4 ranks.

No rank straggles. The benchmark stores all results with a description of the machine as ``gpu-RANKS.json``. Without a
GPU (``--smoke`` in the tests) it skips the first question and measures the other two on the CPU.
"""

import argparse
import csv
import ctypes
import json
import os
import pathlib
import platform
import sys
import time

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcoded
from jaxcoded.transport.engine import _engine

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import kernels

COMM = MPI.COMM_WORLD
ON_GPU = jax.default_backend() == "gpu"
STAGING_BOUND = 0.8  # fraction of a bare copy's bandwidth
KERNEL_BOUND = 0.8  # fraction of the bandwidth of a copy on the device
SPEEDUP_BOUND = 2.0  # ratio to mpi4jax, from `SPEEDUP_BYTES` on
SPEEDUP_BYTES = 16_000_000


def machine():
    """Return a description of the machine."""
    processor = platform.processor()
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if "model name" in line]
    out = {
        "processor": names[0] if names else processor,
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "ranks": COMM.size,
    }
    if ON_GPU:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        out["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        driver = pathlib.Path("/proc/driver/nvidia/version")
        out["driver"] = driver.read_text().split("\n")[0] if driver.exists() else "?"
    return out


# How close do the copies of a call come to bare copies?


class Driver:
    """NVIDIA's driver, for copies without the engine."""

    def __init__(self):
        self._lib = ctypes.CDLL("libcuda.so.1")
        device = jax.devices()[0].local_hardware_id or 0
        context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self("cuStreamCreate", ctypes.byref(self.stream), 1)

    def __call__(self, name, *arguments):
        if code := getattr(self._lib, name)(*arguments):
            raise RuntimeError(f"{name} failed with {code}")

    def pinned(self, size):
        address = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
        return address

    def to_host(self, host, device, size):
        self("cuMemcpyDtoHAsync_v2", host, device, ctypes.c_size_t(size), self.stream)
        self("cuStreamSynchronize", self.stream)

    def to_device(self, host, device, size):
        self("cuMemcpyHtoDAsync_v2", device, host, ctypes.c_size_t(size), self.stream)
        self("cuStreamSynchronize", self.stream)


def seconds(call, *arguments):
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def staging(sizes, repetitions):
    """Return rows of bytes, direction, GB/s and the fraction of the bare copy's bandwidth."""
    driver = Driver()
    rows = []
    for size in sizes:
        own = jnp.ones(size // 4, jnp.float32).block_until_ready()
        out = jnp.zeros(size // 4, jnp.float32).block_until_ready()
        device = ctypes.c_ulonglong(own.unsafe_buffer_pointer())
        host = driver.pinned(size)
        times = []
        for _ in range(repetitions + 1):  # the first repetition pins memory
            staged = _engine.device_copies(
                driver.stream.value,
                own.unsafe_buffer_pointer(),
                out.unsafe_buffer_pointer(),
                size,
            )
            bare = [
                seconds(copy, host, device, size)
                for copy in (driver.to_host, driver.to_device)
            ]
            times.append((staged, bare))
        driver("cuMemFreeHost", host)
        staged, bare = np.moveaxis(np.array(times[1:]), 1, 0)  # (repetitions, 2) each
        for i, direction in enumerate(("to the host", "to the GPU")):
            took = np.median(staged[:, i])
            share = np.median(bare[:, i] / staged[:, i])
            rows.append((size, direction, size / took / 1e9, float(share)))
    return rows


# How long does an all-reduce take?


def quiet():
    """Wait for all ranks, without occupying their cores."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def collectives(group):
    """Return jitted sums of one array, by name."""
    weights = group.batch(COMM.size).weights
    names = {
        f"coded_allreduce, s={group.plan.codings[0].code.stragglers}": jax.jit(
            lambda x, token: jaxcoded.coded_allreduce(x, group, weights, token=token),
            donate_argnums=0,
        )
    }
    if not ON_GPU or mpi4jax.has_cuda_support():
        comm = COMM.Clone()
        names["mpi4jax.allreduce"] = jax.jit(
            lambda x, token: (mpi4jax.allreduce(x, op=MPI.SUM, comm=comm), token),
            donate_argnums=0,
        )
    return names


def allreduces(sizes, repetitions):
    """Return rows of collective, bytes and seconds of the slowest rank, and the ratios."""
    rows, ratios = [], {}
    stragglers = int(COMM.size > 2)
    with jaxcoded.CodedGroup(
        COMM, jaxcoded.Coded(stragglers=stragglers), transport="engine"
    ) as group:
        calls = collectives(group)
        for size in sizes:
            times = {name: [] for name in calls}
            for _ in range(repetitions + 1):  # the first repetition compiles and pins
                for name, call in calls.items():
                    x = jnp.full(size // 4, 1e-6, jnp.float32).block_until_ready()
                    token = jnp.int32(0).block_until_ready()
                    quiet()
                    COMM.Barrier()
                    start = time.perf_counter()
                    jax.block_until_ready(call(x, token))
                    took = time.perf_counter() - start
                    times[name].append(COMM.allreduce(took, MPI.MAX))
            names = list(calls)
            for name in names:
                rows.append((name, size, float(np.median(times[name][1:]))))
            if len(names) == 2:
                coded, plain = (np.array(times[name][1:]) for name in names)
                ratios[size] = float(np.median(plain / coded))
        quiet()
    return rows, ratios


def verdict(what, fine):
    print(f"{what}: {'yes' if fine else 'NO'}\n")
    return bool(fine)


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    repetitions = 3 if args.smoke else 15
    reduced = [4_000, 64_000] if args.smoke else [1_000_000, 16_000_000, 64_000_000]
    copied = [64_000] if args.smoke else [1_000_000, 16_000_000, 256_000_000]
    length = 1 << (12 if args.smoke else 26)

    quiet()
    copies = staging(copied, repetitions) if ON_GPU and COMM.rank == 0 else []
    quiet()
    times, ratios = allreduces(reduced, repetitions)
    shares = kernels.measure(length, repetitions) if COMM.rank == 0 else []
    quiet()
    if COMM.rank:
        return

    about = machine()
    print(", ".join(f"{name}: {value}" for name, value in about.items()), "\n")
    verdicts = {}
    if copies:
        print(f"{'bytes':>12} {'direction':12} {'GB/s':>8} {'÷ bare copy':>12}")
        for size, direction, bandwidth, share in copies:
            print(f"{size:12,} {direction:12} {bandwidth:8.1f} {share:12.2f}")
        large = [row[-1] for row in copies if row[0] >= SPEEDUP_BYTES] or [0]
        what = f"copies of a call at {STAGING_BOUND:.0%} of a bare one from 16 MB on"
        verdicts[what] = verdict(what, min(large) >= STAGING_BOUND)
    print(f"{'collective':24} {'bytes':>12} {'ms':>9}")
    for name, size, took in times:
        print(f"{name:24} {size:12,} {took * 1e3:9.3f}")
    for size, ratio in ratios.items():
        print(f"mpi4jax ÷ coded at {size:,} bytes: {ratio:.2f}")
    if ON_GPU and ratios:
        large = [ratio for size, ratio in ratios.items() if size >= SPEEDUP_BYTES] or [
            0
        ]
        what = f"{SPEEDUP_BOUND:.0f} times as fast as mpi4jax from 16 MB on"
        verdicts[what] = verdict(what, min(large) >= SPEEDUP_BOUND)
    elif ON_GPU:
        print("mpi4jax is built without CUDA: no comparison\n")
    print(f"{'kernel':8} {'dtype':10} {'n,s,m':8} {'GB/s':>8} {'÷ copy':>8}")
    for name, dtype, code, bandwidth, share in shares:
        print(f"{name:8} {dtype:10} {code:8} {bandwidth:8.1f} {share:8.2f}")
    if ON_GPU:
        what = f"kernels at {KERNEL_BOUND:.0%} of a copy on the GPU"
        verdicts[what] = verdict(what, min(row[-1] for row in shares) >= KERNEL_BOUND)

    args.out.mkdir(parents=True, exist_ok=True)
    stored = {
        "machine": about,
        "copies": copies,
        "allreduce": times,
        "mpi4jax_over_coded": ratios,
        "kernels": shares,
        "verdicts": verdicts,
    }
    (args.out / f"gpu-{COMM.size}.json").write_text(json.dumps(stored, indent=1) + "\n")
    with (args.out / f"gpu-{COMM.size}.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["collective", "bytes", "seconds"])
        writer.writerows(times)


if __name__ == "__main__":
    main()
