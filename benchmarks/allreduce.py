"""How long is a jitted all-reduce: coded, and the uncoded ones, side by side?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/allreduce.py

Every repetition times all of them one after the other, so that they share the machine's
moods. Times are of the slowest rank; a barrier stands before each measured call, and all
ranks are on time. Prints medians and the ratio to ``mpi4jax.allreduce`` and stores them.
"""

import argparse
import csv
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded
from jaxcoded import baselines

comm = MPI.COMM_WORLD


def seconds(call, x):
    """Wall-clock time of one call, of the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    call(x).block_until_ready()
    return comm.allreduce(time.perf_counter() - start, op=MPI.MAX)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [1_000, 4_000] if args.smoke else [1_000, 250_000, 4_000_000]
    repetitions = 3 if args.smoke else 21

    with (
        jaxcoded.CodedGroup(comm, fanout=3, stragglers=int(comm.size > 2)) as coded,
        jaxcoded.CodedGroup(comm, fanout=3, stragglers=0) as uncoded,
    ):
        collectives = {
            "mpi4jax.allreduce": lambda x: baselines.allreduce(x, comm),
            "ring": lambda x: baselines.ring_allreduce(x, comm),
            "master-worker": lambda x: baselines.master_worker_allreduce(x, comm),
            "plain tree": lambda x: baselines.tree_allreduce(x, comm, fanout=3),
            "coded tree, s=0": lambda x: jaxcoded.coded_allreduce(x, uncoded),
            f"coded tree, s={coded.plan.stragglers}": lambda x: (
                jaxcoded.coded_allreduce(x, coded)
            ),
        }
        jitted = {name: jax.jit(call) for name, call in collectives.items()}
        rows = []
        for size in sizes:
            x = jnp.ones(size, jnp.float32)
            for call in jitted.values():
                call(x).block_until_ready()
            times = {name: [] for name in jitted}
            for _ in range(repetitions):
                for name, call in jitted.items():
                    times[name].append(seconds(call, x))
            base = np.array(times["mpi4jax.allreduce"])
            for name, measured in times.items():
                ratio = np.median(np.array(measured) / base)
                rows.append((comm.size, 4 * size, name, np.median(measured), ratio))

    if comm.rank == 0:
        print(f"{'bytes':>10}  {'collective':18} {'median':>10} {'÷ mpi4jax':>10}")
        for _, size, name, median, ratio in rows:
            print(f"{size:10}  {name:18} {median * 1e3:7.2f} ms {ratio:10.2f}")
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / f"allreduce-{comm.size}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["ranks", "bytes", "collective", "seconds", "ratio"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
