"""What does a round's telemetry cost?

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/telemetry.py

Two groups of the same ranks, one of them without telemetry, take turns with blocks of
the shortest rounds: 4 KB on NumPy arrays, without JAX. A block's time is measured on the root; a ratio compares
neighbouring blocks. The benchmark prints the median ratio with a 95 % interval (by resampling), and the CPU time of all
ranks.
"""

import argparse
import csv
import pathlib
import time

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

import jaxcoded

comm = MPI.COMM_WORLD
BYTES = 4096


def block(group, x, rounds):
    """Return the wall-clock and CPU seconds of a round on this rank."""
    weights = group.batch(comm.size).weights
    comm.Barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        jaxcoded.host.allreduce(x, group, weights, out=x)
    return (time.perf_counter() - wall) / rounds, (time.process_time() - cpu) / rounds


def interval(ratios, seed=0):
    """Return the median and its 95 % interval."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return np.median(ratios), *np.quantile(medians, [0.025, 0.975])


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    pairs, rounds = (4, 10) if args.smoke else (args.pairs, 200)
    x = np.zeros(BYTES // 4, np.float32)
    coded = jaxcoded.Coded(stragglers=int(comm.size > 2))
    with (
        jaxcoded.CodedGroup(comm, coded, transport="engine") as remembering,
        jaxcoded.CodedGroup(
            comm,
            coded,
            transport="engine",
            options=jaxcoded.Options(telemetry_rounds=0),
        ) as forgetting,
    ):
        times = {}
        for pair in tqdm(range(-1, pairs), disable=comm.rank != 0, desc="pairs"):
            order = (remembering, forgetting) if pair % 2 else (forgetting, remembering)
            for group in order:
                measured = block(group, x, rounds)
                if pair >= 0:
                    times.setdefault(group is remembering, []).append(measured)
        seen = remembering.telemetry()
        assert seen.rounds[-1] == (pairs + 1) * rounds
        assert (seen.ended >= seen.started).all()
    on, off = np.array(times[True]), np.array(times[False])
    on[:, 1], off[:, 1] = comm.allreduce(on[:, 1]), comm.allreduce(off[:, 1])
    if comm.rank == 0:
        report(on, off, args.out)


def report(on, off, out):
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"telemetry-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "seconds", "without", "ratio", "low", "high"])
        for column, what in enumerate(("wall clock", "CPU time")):
            ratio, low, high = interval(on[:, column] / off[:, column])
            seconds = np.median(on[:, column]), np.median(off[:, column])
            writer.writerow([what, *seconds, ratio, low, high])
            print(
                f"{what}: {seconds[0] * 1e6:.1f} µs a round with telemetry, "
                f"{seconds[1] * 1e6:.1f} µs without; ratio {ratio:.4f} "
                f"({low:.4f} to {high:.4f})"
            )


if __name__ == "__main__":
    main()
