"""Run a real all-reduce on the ranks that `jaxcoded doctor` starts; rank 0 reports the
results."""

import ctypes
import importlib.util
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcoded.collectives.allreduce import coded_allreduce
from jaxcoded.group.group import CodedGroup
from jaxcoded.plan import Uncoded
from jaxcoded.tools.doctor import machine
from jaxcoded.tools.launch.asking import answer
from jaxcoded.transport import cuda_aware, engine
from jaxcoded.transport.agreement import gathered

SIZES = (1, 1 << 20)  # lengths of the summed arrays of float32
_CALLS = 20
_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: machine.MULTIPLE,
}
_EXAMPLES = 3  # examples of each rank, on average


def main() -> None:
    """Examine all ranks; rank 0 reports the findings. Collective."""
    comm = MPI.COMM_WORLD
    findings: dict[str, Any] = {
        "rank": comm.rank,
        "host": MPI.Get_processor_name(),
        "library": MPI.Get_library_version().splitlines()[0].split(",")[0].strip(),
        "threads": _LEVELS.get(MPI.Query_thread(), "another level"),
        "driver": machine.DRIVER.exists(),
        "engine": engine.missing(),
        "mpi4jax": _imported("mpi4jax"),
        "backend": jax.default_backend(),
        "devices": [f"{each.device_kind}" for each in jax.local_devices()],
        "cuda_aware": cuda_aware.why_not(),
        "reads": _reads(comm),
        **_summed(comm),
    }
    everything = gathered(comm, findings)
    if comm.rank == 0:
        answer(everything)


def _imported(name: str) -> str:
    """Return why an installed module cannot be imported, or an empty text if it can
    be."""
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def _summed(comm: MPI.Intracomm) -> dict[str, Any]:
    """Return the median time of a call, in seconds, for each of `SIZES`; the number of wrong sums; the transport."""
    took, wrong = [], 0
    batch = _EXAMPLES * comm.size
    with CodedGroup(comm, Uncoded()) as group:
        part = group.batch(batch)
        own_sum = float(np.dot(np.asarray(part.weights), part.indices))
        for size in SIZES:
            x = jnp.full(size, own_sum, jnp.float32)
            total = jax.jit(lambda x: coded_allreduce(x, group))
            times = []
            for _ in range(_CALLS):
                start = time.perf_counter()
                y = jax.block_until_ready(total(x))
                times.append(time.perf_counter() - start)
                # small whole numbers are exact in float32
                wrong += bool(np.any(np.asarray(y) != batch * (batch - 1) / 2))
            took.append(float(np.median(times[1:])))
        fast = group._session.transport.name == "engine"
    transport = "the engine" if fast else "mpi4jax"
    return {"took": took, "wrong": wrong, "transport": transport}


def _reads(comm: MPI.Intracomm) -> bool:
    """Return whether the engine could read the memory of this host's next rank."""
    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    secret = ctypes.c_int64(1000 + near.rank)
    every = gathered(near, (os.getpid(), ctypes.addressof(secret)))
    process, address = every[(near.rank + 1) % near.size]

    class Part(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))

    got = ctypes.c_int64()
    target = Part(ctypes.addressof(got), ctypes.sizeof(got))
    source = Part(address, ctypes.sizeof(got))
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    done = read is not None and 0 < read(
        process, ctypes.byref(target), 1, ctypes.byref(source), 1, 0
    )
    near.Barrier()  # no rank ends while other ranks read its memory
    right = done and got.value == 1000 + (near.rank + 1) % near.size
    near.Free()
    return right


if __name__ == "__main__":
    main()
