"""How long does it take to continue without a dead or stuck rank?

    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py
    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py --fault root
    .venv/bin/jaxcoded run -n 13 --ft benchmarks/recovered.py --fault stuck
    .venv/bin/jaxcoded run -n 4 --ft benchmarks/recovered.py --fault replaced --deaths 9

Repeatedly a rank becomes faulty between two of its steps, while the other ranks begin
the next step. The last rank is killed, or sleeps for ever ("stuck"): the other ranks do
20 more steps, and then call `recovered`, which puts out the stuck rank after its
`timeout`. Or the root is killed: the step fails on all other ranks, which call
`recovered` at once. Or a new rank replaces the killed last rank ("replaced":
`extended`). Then the root broadcasts its state, and all ranks take a step with the new
group, which compiles the step. The benchmark prints medians of the slowest rank: a
usual step, the longest step after the fault (or the failing step), `recovered` (beyond
its `timeout` if it puts out a rank), `extended`, `tree_bcast`, and the first step after
`tree_bcast`.
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
TIMEOUT = 2.0  # argument of `recovered`, if it puts out a stuck rank
FAULTS = ("killed", "root", "stuck", "replaced")


def losses(w, x):
    return (x @ w - 1) ** 2


def step_of(group):
    """Return a step of a linear fit, which waits for its result."""
    part = group.batch(EXAMPLES)
    x = np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH))[part.indices]
    jitted = jax.jit(jaxcoded.coded_value_and_grad(losses, group))
    return lambda w: w - 1e-4 * jax.block_until_ready(jitted(w, part.of(x)))[1]


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
    """Do a step that raises an error on this rank."""
    try:
        step(w)
    except jax.errors.JaxRuntimeError:
        jaxcoded.effects_barrier()
    else:
        raise RuntimeError("the step has not failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="killed")
    parser.add_argument("--deaths", type=int, help="default: until 4 ranks live")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    root, stuck, replaced = (args.fault == fault for fault in FAULTS[1:])
    group = jaxcoded.CodedGroup.joining()
    joins = group is not None
    ranks = group.size if joins else MPI.COMM_WORLD.size
    deaths = args.deaths or ranks - 4
    if deaths < 1 or (ranks if replaced else ranks - deaths + 1) < 4:
        parser.error(
            f"{ranks} ranks are too few: start it as benchmarks/README.md says"
        )
    group = group or jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1))
    how = {"timeout": TIMEOUT, "put_out": True} if stuck else {}
    step, w, done, rows = step_of(group), jnp.zeros(WIDTH), 0, []
    while done < deaths:
        times = dict.fromkeys(["step", "fault", "recovered", "extended"], 0.0)
        if not joins:
            usual = []
            for _ in range(AFTER):
                w, took = seconds(step, w)
                usual.append(took)
            times["step"] = np.median(usual)
            group.comm.Barrier()  # wait until all ranks have the last sum
            time.sleep(0.1)  # wait until MPI's messages for the barrier have come
            if group.rank == (0 if root else group.size - 1):
                befall(args.fault)
            if root:
                _, times["fault"] = seconds(failing, step, w)
            else:
                times["fault"] = max(seconds(step, w)[1] for _ in range(AFTER))
            group, anew = seconds(group.recovered, **how)
            times["recovered"] = anew - how.get("timeout", 0)
            if replaced:
                group, times["extended"] = seconds(group.extended, 1)
        joins = False
        step = step_of(group)
        (done, w), times["tree_bcast"] = seconds(jaxcoded.tree_bcast, (done, w), group)
        done = int(done) + 1
        w, times["first"] = seconds(step, w)
        slowest = np.array(list(times.values()))
        group.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        rows.append(dict(zip(times, slowest)))
    writes = group.rank == 0
    group.close()
    if not writes:
        return
    after = "the step that fails" if root else "longest step after the fault"
    anew = "recovered, beyond its timeout" if stuck else "recovered"
    names = {
        "step": "step",
        "fault": after,
        "recovered": anew,
        "extended": "extended",
        "tree_bcast": "tree_bcast",
        "first": "first step after it",
    }
    if not replaced:
        del names["extended"]
    for key, name in names.items():
        median = np.median([row[key] for row in rows])
        print(f"{name:30}{median * 1e3:10.1f} ms")
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / f"recovered-{args.fault}-{ranks}.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names.values())
        writer.writerows([row[key] for key in names] for row in rows)


if __name__ == "__main__":
    main()
