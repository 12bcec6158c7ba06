"""What do 16-bit messages gain, and what does the conversion cost?

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/wire.py

One group runs jitted all-reduces of a donated float32 vector, ordered by a token, with
and without ``wire_dtype``. Every repetition times all settings in turn. Times are those of the slowest rank. The
benchmark prints and stores medians, the medians of the ratios within a repetition, and the total traffic of all ranks.
"""

import argparse
import csv
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from tqdm import tqdm

import jaxcoded

comm = MPI.COMM_WORLD
WIRES = (None, "bfloat16", "float16")


def prepared(group, wire, size):
    """Return a call whose result is the operand of the next one."""
    weights = group.batch(comm.size).weights
    jitted = jax.jit(
        lambda x, token: jaxcoded.coded_allreduce(
            x, group, weights, wire_dtype=wire, token=token
        ),
        donate_argnums=(0, 1),
    )
    x, token = jnp.zeros(size, jnp.float32), jnp.int32(0)

    def run():
        nonlocal x, token
        x, _, token = jitted(x, token)
        x.block_until_ready()

    return run


def seconds(run, calls):
    """Return the wall-clock time of a call on the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return comm.allreduce(time.perf_counter() - start, op=MPI.MAX) / calls


def fetched(group):
    """Return the bytes that all ranks have fetched."""
    return comm.allreduce(group.statistics()["fetched_bytes"])


def measure(group, sizes, repetitions):
    """Return rows of bytes, wire dtype, seconds, ratio, and traffic of a call in bytes."""
    rows = []
    with tqdm(total=len(sizes) * repetitions, disable=comm.rank != 0) as progress:
        for size in sizes:
            calls = max(1, min(30, 4_000_000 // size))
            runs = {wire: prepared(group, wire, size) for wire in WIRES}
            for run in runs.values():
                run()
            times = {wire: [] for wire in WIRES}
            traffic = dict.fromkeys(WIRES, 0)
            for _ in range(repetitions):
                for wire, run in runs.items():
                    before = fetched(group)
                    times[wire].append(seconds(run, calls))
                    traffic[wire] += fetched(group) - before
                progress.update()
            for wire in WIRES:
                ratio = np.median(np.array(times[wire]) / np.array(times[None]))
                rows.append(
                    (
                        4 * size,
                        wire or "float32",
                        np.median(times[wire]),
                        ratio,
                        traffic[wire] / repetitions / calls,
                    )
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [1_000, 4_000] if args.smoke else [250_000 * mb for mb in args.megabytes]
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2)), transport="engine"
    ) as group:
        rows = measure(group, sizes, 2 if args.smoke else args.repetitions)
    if comm.rank:
        return
    print(f"{comm.size} ranks, {group.plan.strategy.code}")
    print(f"{'bytes':>10}  {'wire':10}{'median':>12}{'÷ float32':>12}{'traffic':>12}")
    for size, wire, median, ratio, traffic in rows:
        print(
            f"{size:10}  {wire:10}{median * 1e3:9.3f} ms{ratio:12.2f}"
            f"{traffic / 1e6:9.1f} MB"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"wire-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["bytes", "wire", "seconds", "ratio", "traffic"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
