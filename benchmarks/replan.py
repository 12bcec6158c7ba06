"""What does a new division of the data gain if too many machines are slow?

    scripts/mpirun -n 7 .venv/bin/python -m mpi4py benchmarks/replan.py

Two of the ranks always take three times as long for an example as the other ranks,
while the code tolerates one (s = 1). An example is a sleep, so waiting ranks take no
core from other ranks. The first half of the rounds has equal loads; then the group is
replanned with the speeds measured by its telemetry. Times are from one result to the
next on the root. The benchmark checks every sum.
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
SLOW, FACTOR, EXAMPLES = 2, 3, 120
WAIT = 2.5  # seconds in which step times reach the root


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--rounds", type=int, default=40, help="of each half")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    rounds, an_example = (30, 1e-3) if args.smoke else (args.rounds, 2e-3)
    if comm.rank >= comm.size - SLOW:
        an_example *= FACTOR
    group = jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=1, fanout=comm.size - 1), transport="engine"
    )
    gradients = np.random.default_rng(0).standard_normal((EXAMPLES, 1000))
    progress = tqdm(total=2 * rounds, disable=comm.rank != 0, desc="rounds")

    def half(group):
        """Return the seconds of each round except the first on this rank."""
        part = group.batch(EXAMPLES)
        own = (part.weights @ gradients[part.indices]).astype(np.float32)
        held = np.count_nonzero(part.weights)
        ends = []
        for _ in range(rounds):
            late = group.lag() > 0
            if not late:
                time.sleep(held * an_example)
            total = jaxcoded.host.allreduce(own, group, part.weights, skip=late)
            ends.append(time.perf_counter())
            np.testing.assert_allclose(total, gradients.sum(0), atol=1e-2)
            progress.update()
        return np.diff(ends)

    before = half(group)
    time.sleep(WAIT)
    speeds = group.telemetry().speeds
    summary = group.telemetry().summary()
    group = group.replan(speeds)
    after = half(group)
    if comm.rank == group.plan.root:
        progress.close()
        report(before, after, speeds, summary, group.plan, args.out)
    group.close()


def report(before, after, speeds, summary, plan, out):
    out.mkdir(parents=True, exist_ok=True)
    medians = np.median(before), np.median(after)
    with (out / f"replan-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "measured speed", "load"])
        writer.writerows(
            (rank, speeds[rank], float(plan.load_of(rank))) for rank in range(plan.size)
        )
    print(summary)
    print("loads after:", *(f"{float(plan.load_of(r)):.0%}" for r in range(plan.size)))
    print(
        f"a round took {medians[0] * 1e3:.1f} ms with equal loads and "
        f"{medians[1] * 1e3:.1f} ms replanned: {medians[0] / medians[1]:.2f} times faster"
    )


if __name__ == "__main__":
    main()
