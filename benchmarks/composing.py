"""What does the gradient of a function of a sum cost, compared with the gradient of a sum?

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/composing.py

The benchmark computes two jitted gradients of a small network on one batch. The first
is the gradient of the mean loss, by `coded_value_and_grad` (one round). The second is
the gradient of a function of the losses' `coded_sum` (two rounds). Every repetition
times both in turn, without late ranks and with one rank that sleeps before each call.
Times are those of rank 0, as rounds may end without the other ranks. The benchmark
prints medians, and the medians of the ratios within a repetition.

It also prints the temporary memory that XLA plans on the last rank for the gradients of a network of 8 more layers, and
for the gradient of one process with the same examples.
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
STRATEGIES = {
    "shared": jaxcoded.Shared(),
    "coded": jaxcoded.Coded(stragglers=1),
}


def problem(group, examples, hidden, layers=0):
    """Return the losses of each example, parameters, and a batch."""
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(256, hidden)).astype(np.float32) / 16,
        "layers": [
            rng.normal(size=(hidden, hidden)).astype(np.float32) / hidden**0.5
            for _ in range(layers)
        ],
        "out": rng.normal(size=hidden).astype(np.float32),
    }
    x = rng.normal(size=(examples, 256)).astype(np.float32)

    def losses(params, batch):
        x, y = batch
        h = jnp.tanh(x @ params["in"])
        for w in params["layers"]:
            h = jnp.tanh(h @ w)
        return (h @ params["out"] - y) ** 2

    return losses, jax.device_put(params), group.batch((x, np.sin(x.sum(1))))


def gradients(group, losses):
    """Return jitted functions of parameters and a batch, by name."""
    total = jaxcoded.coded_sum(losses, group)

    def of_sum(params, batch):
        return jnp.log1p(total(params, batch) / batch.weights.examples)

    mean = jaxcoded.coded_value_and_grad(losses, group)
    return {
        "coded_value_and_grad": jax.jit(lambda p, b: mean(p, b)[1]),
        "f(coded_sum)": jax.jit(jax.grad(of_sum)),
    }


def measure(group, examples, hidden, repetitions, calls, delay):
    """Return the seconds of a call, for each name and repetition."""
    losses, params, batch = problem(group, examples, hidden)
    runs = gradients(group, losses)
    for run in runs.values():
        jax.block_until_ready(run(params, batch))
    times = {name: [] for name in runs}
    for _ in tqdm(range(repetitions), disable=comm.rank != 0):
        for name, run in runs.items():
            comm.Barrier()
            begun = time.perf_counter()
            for _ in range(calls):
                if comm.rank == comm.size - 1:
                    time.sleep(delay)
                jax.block_until_ready(run(params, batch))
            times[name].append((time.perf_counter() - begun) / calls)
    return {name: np.array(each) for name, each in times.items()}


def memory(group, examples, hidden):
    """Return the MiB of temporary memory on the last rank, by name."""
    losses, params, batch = problem(group, examples, hidden, layers=8)

    def of_mean(params, data):
        return jnp.log1p(jnp.mean(losses(params, data)))

    def planned(gradient, data):
        compiled = gradient.lower(params, data).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    runs = gradients(group, losses)
    out = {name: planned(run, batch) for name, run in runs.items()}
    alone = f"one process, {len(batch.weights)} examples"
    out[alone] = planned(jax.jit(jax.grad(of_mean)), batch.data)
    return comm.bcast(out, root=comm.size - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--late", type=float, default=0.1, help="seconds")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = (64, 8, 2, 2) if args.smoke else None
    sizes = sizes or (args.examples, args.hidden, args.repetitions, 5)
    rows, plans = [], []
    for name, strategy in STRATEGIES.items():
        with jaxcoded.CodedGroup(comm, strategy) as group:
            for of, mib in memory(group, *sizes[:2]).items():
                plans.append((name, of, mib))
        for late in (0, args.late):
            with jaxcoded.CodedGroup(comm, strategy) as group:
                times = measure(group, *sizes, late)
                comm.Barrier()
            base = times["coded_value_and_grad"]
            for of, each in times.items():
                ratio = np.median(each / base)
                rows.append((name, late, of, np.median(each), ratio))
    if comm.rank:
        return
    print(f"{comm.size} ranks, the last one late or not, {sizes[0]} examples")
    for name, late, of, seconds, ratio in rows:
        who = f"late by {late * 1e3:.0f} ms" if late else "nobody late"
        print(f"{name:8} {who:16} {of:22}{seconds * 1e3:9.2f} ms{ratio:8.2f}")
    print("temporary memory, 8 more layers")
    for name, of, mib in plans:
        print(f"{name:8} {of:39}{mib:9.2f} MiB")
    save(args.out / f"composing-{comm.size}.csv", "late,gradient,seconds,ratio", rows)
    save(args.out / f"composing-memory-{comm.size}.csv", "gradient,mib", plans)


def save(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", *columns.split(",")])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
