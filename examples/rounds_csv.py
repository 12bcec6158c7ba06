"""Write each rank's telemetry as plain CSV: one line when each round ends.

    jaxcoded run -n 4 examples/rounds_csv.py build/rounds

``rounds-RANK.csv`` grows while the job runs (``tail -f``). Each line has the time when
the rank called, how long the call took, and whose message completed the sum. It also
has the rank's lag, the number of rounds that were decided before the rank called them.
``arrivals.csv`` has a line for each round and each rank below the root: when the rank's
message arrived, whether it was used, and the rank's lag. Fields are empty if no message
has come. Rank 2 is slow in every third step.
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


def losses(w, x):  # one loss for each example
    return (x - w) ** 2


def arrivals(seen):
    """Yield the lines of ``arrivals.csv`` from `jaxcoded.group.telemetry.Telemetry`:
    round, rank, seconds, used and lag.
    """
    for at, number in enumerate(seen.rounds):
        for child, rank in enumerate(seen.children):
            came = seen.arrived[at, child]
            lag = "" if np.isnan(came) else np.sum(seen.decided[at:] < came)
            yield number, rank, came - seen.started[at], seen.used[at, child], lag


def write(path, *rows, mode="a"):
    with path.open(mode, newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def train(comm, folder, steps=30, slow=2):
    """Return the trained weight."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own, root = folder / f"rounds-{comm.rank}.csv", folder / "arrivals.csv"
    header = ["round", "called", "work", "waited", "decided by", "left out", "lag"]
    write(own, header, mode="w")
    lags = {}  # the rank's lag in each round, by the round's number

    def ended(seen):  # called on a separate thread; delays no round
        seconds = seen.started, seen.work, seen.ended - seen.started
        rounded = (round(each, 6) for each in seconds)
        lag = lags.pop(seen.number)
        write(own, [seen.number, *rounded, seen.decided_by, seen.skipped, lag])

    x = np.random.default_rng(0).normal(size=60).astype(np.float32)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
    ) as group:
        group.on_round(ended)
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
        part = group.batch(len(x))
        w = jnp.zeros(())
        for number in range(steps):
            if group.rank == slow and number % 3 == 0:
                time.sleep(0.1)
            lags[number + 1] = group.lag()  # exact, as this rank's rounds have ended
            _, grad = jax.block_until_ready(step(w, part.of(x[part.indices])))
            w = w - 0.1 * grad
        if group.rank == 0:
            header = ["round", "rank", "arrived", "used", "lag"]
            write(root, header, *arrivals(group.telemetry()), mode="w")
    return w


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("folder")
    args = parser.parse_args()
    train(MPI.COMM_WORLD, args.folder)
    if MPI.COMM_WORLD.rank == 0:
        print(f"wrote rounds-*.csv and arrivals.csv into {args.folder}")
