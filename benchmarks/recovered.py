"""How long does it take to go on without dead ranks, and with the step compiled anew?

    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py

Again and again the last rank is killed between two of its steps, while the others begin the next one,
which goes on without it. 20 steps later all that live call `recovered`, and take a step with the new group, which compiles it. Prints the medians of
the slowest rank: of a usual step, of the longest one after a death, of `recovered`, and of the first step
after it.
"""

import argparse
import csv
import os
import pathlib
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

WIDTH, EXAMPLES = 1000, 26
AFTER = 20  # steps between a death and `recovered`


def losses(w, x):
    return (x @ w - 1) ** 2


def step_of(group):
    """A step of a linear fit, waited for."""
    indices, weights = group.assignment(EXAMPLES)
    x = np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH))[indices]
    jitted = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=True))
    return lambda w: w - 1e-4 * jax.block_until_ready(jitted(w, x, weights))[1]


def seconds(action, *arguments):
    start = time.perf_counter()
    out = action(*arguments)
    return out, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deaths", type=int, help="default: until 4 ranks live")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    ranks = MPI.COMM_WORLD.size
    deaths = args.deaths or ranks - 4
    if not 1 <= deaths <= ranks - 3:
        parser.error(
            f"{ranks} ranks are too few: start it as benchmarks/README.md says"
        )
    group = jaxcoded.CodedGroup(MPI.COMM_WORLD, stragglers=1)
    step, w = step_of(group), jnp.zeros(WIDTH)
    rows = []
    for _ in range(deaths):
        usual = []
        for _ in range(AFTER):
            w, took = seconds(step, w)
            usual.append(took)
        if group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        longest = max(seconds(step, w)[1] for _ in range(AFTER))
        group, anew = seconds(group.recovered)
        step = step_of(group)
        w, first = seconds(step, w)
        slowest = np.array([np.median(usual), longest, anew, first])
        group.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        rows.append(slowest)
    root = group.rank == 0
    group.close()
    if not root:
        return
    columns = ["step", "longest step after a death", "recovered", "first step after it"]
    medians = np.median(rows, axis=0)
    for name, value in zip(columns, medians):
        print(f"{name:30}{value * 1e3:10.1f} ms")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"recovered-{ranks}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
