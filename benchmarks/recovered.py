"""How long does it take to go on without a rank that is dead or stuck, with the step compiled anew?

    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py
    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py --fault root
    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py --fault stuck

Again and again a rank turns faulty between two of its steps, while the others begin the next one. The last
rank is killed, or sleeps for good ("stuck"): the others go on for 20 steps, and then call `recovered`, which
puts out the stuck one after its `timeout`. Or the root is killed: the step fails on all others, which call
`recovered` at once. Then the root hands on what it has, and they take a step with the new group, which compiles
it. Prints the medians of the slowest rank: of a usual step, of the longest one after the fault (or of the one
that fails), of `recovered` (beyond its `timeout` where it puts out), of `tree_bcast`, and of the first step
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
TIMEOUT = 2.0  # of `recovered`, where it puts out a stuck rank
FAULTS = ("killed", "root", "stuck")


def losses(w, x):
    return (x @ w - 1) ** 2


def step_of(group):
    """A step of a linear fit, waited for."""
    indices, weights = group.assignment(EXAMPLES)
    x = np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH))[indices]
    jitted = jax.jit(jaxcoded.coded_value_and_grad(losses, group, mean=True))
    return lambda w: w - 1e-4 * jax.block_until_ready(jitted(w, x, weights))[1]


def seconds(action, *arguments, **options):
    start = time.perf_counter()
    out = action(*arguments, **options)
    return out, time.perf_counter() - start


def befall(fault):
    """Make this process faulty."""
    if fault == "stuck":
        time.sleep(1e6)
    os.kill(os.getpid(), signal.SIGKILL)


def failing(step, w):
    """A step that raises an error on this rank."""
    try:
        step(w)
    except jax.errors.JaxRuntimeError:
        jaxcoded.effects_barrier()
    else:
        raise RuntimeError("the step has not failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="killed")
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
    root, stuck = args.fault == "root", args.fault == "stuck"
    how = {"timeout": TIMEOUT, "put_out": True} if stuck else {}
    step, w = step_of(group), jnp.zeros(WIDTH)
    rows = []
    for _ in range(deaths):
        usual = []
        for _ in range(AFTER):
            w, took = seconds(step, w)
            usual.append(took)
        group.comm.Barrier()  # all have the last sum
        time.sleep(0.1)  # and what MPI sends for it has come
        if group.rank == (0 if root else group.size - 1):
            befall(args.fault)
        if root:
            _, longest = seconds(failing, step, w)
        else:
            longest = max(seconds(step, w)[1] for _ in range(AFTER))
        group, anew = seconds(group.recovered, **how)
        step = step_of(group)
        w, handed_on = seconds(jaxcoded.tree_bcast, w, group)
        w, first = seconds(step, w)
        beyond = anew - how.get("timeout", 0)
        slowest = np.array([np.median(usual), longest, beyond, handed_on, first])
        group.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        rows.append(slowest)
    writes = group.rank == 0
    group.close()
    if not writes:
        return
    after = "the step that fails" if root else "longest step after the fault"
    anew = "recovered, beyond its timeout" if stuck else "recovered"
    columns = ["step", after, anew, "tree_bcast", "first step after it"]
    medians = np.median(rows, axis=0)
    for name, value in zip(columns, medians):
        print(f"{name:30}{value * 1e3:10.1f} ms")
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / f"recovered-{args.fault}-{ranks}.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
