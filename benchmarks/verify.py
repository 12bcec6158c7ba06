"""What does it cost to verify sums?

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/verify.py

Three groups with the same plan run jitted all-reduces of a donated float32 vector,
ordered by a token, and training steps of a small network: without a ``check``, with a ``check``, and with a ``check``
that waits. All messages are right. Every repetition times all groups in turn. Times are those of the slowest rank. The
benchmark prints and stores medians, the medians of the ratios within a repetition, and the fraction of rounds in which
the root compared messages.
"""

import argparse
import contextlib
import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from tqdm import tqdm
from wire import prepared, seconds

import jaxcoded

comm = MPI.COMM_WORLD
INPUTS, BATCH = 256, 1024
OPTIONS = {
    "without": {},
    "check": {"check": jaxcoded.Check("drop")},
    "check, wait": {"check": jaxcoded.Check("drop", wait=True)},
}


def compared(group):
    """Return the number of rounds in which the root had surplus messages."""
    return comm.bcast(group.statistics()["compared_rounds"], group.plan.root)


def all_reduce(group, size):
    return prepared(group, None, size)


def training_step(group, size):
    """Return a training step of a network with about ``size`` parameters, whose
    gradient is summed.
    """
    rng = np.random.default_rng(0)
    hidden = max(1, size // (INPUTS + 1))
    params = {
        "in": jnp.asarray(rng.normal(size=(INPUTS, hidden)) / INPUTS**0.5, jnp.float32),
        "out": jnp.asarray(rng.normal(size=hidden) / hidden**0.5, jnp.float32),
    }
    x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
    batch = group.batch((jnp.asarray(x), jnp.asarray(np.sin(x.sum(1)))))

    def loss(params, example):
        x, y = example
        return (jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2 / BATCH

    @jax.jit
    def step(params, batch):
        gradient = jaxcoded.coded_value_and_grad(loss, group, mean=False)(
            params, batch
        )[1]
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    def run():
        nonlocal params
        params = jax.block_until_ready(step(params, batch))

    return run


def measure(groups, kind, sizes, repetitions):
    """Return rows of kind, bytes, name, seconds, ratio, and the fraction of rounds with a comparison."""
    rows = []
    with tqdm(total=len(sizes) * repetitions, disable=comm.rank != 0) as progress:
        for size in sizes:
            calls = max(2, min(30, 4_000_000 // size))
            runs = {name: KINDS[kind](group, size) for name, group in groups.items()}
            for run in runs.values():
                run()
            before = {name: compared(group) for name, group in groups.items()}
            times = {name: [] for name in groups}
            for _ in range(repetitions):
                for name, run in runs.items():
                    times[name].append(seconds(run, calls))
                progress.update()
            for name, group in groups.items():
                ratios = np.array(times[name]) / np.array(times["without"])
                share = (compared(group) - before[name]) / (calls * repetitions)
                medians = np.median(times[name]), np.median(ratios)
                rows.append((kind, 4 * size, name, *medians, share))
    return rows


KINDS = {"all-reduce": all_reduce, "training step": training_step}


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[4, 1000, 16_000])
    parser.add_argument("--stragglers", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [1_000, 4_000] if args.smoke else [250 * kb for kb in args.kilobytes]
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                jaxcoded.CodedGroup(
                    comm,
                    jaxcoded.Coded(fanout=comm.size - 1, stragglers=args.stragglers),
                    transport="engine",
                    options=jaxcoded.Options(**options),
                )
            )
            for name, options in OPTIONS.items()
        }
        rows = [
            row
            for kind in KINDS
            for row in measure(
                groups, kind, sizes, 2 if args.smoke else args.repetitions
            )
        ]
    if comm.rank:
        return
    code = groups["without"].plan.strategy.code
    print(f"{comm.size} ranks, {code}, any {args.stragglers} of them may be late")
    print(
        f"{'':15}{'bytes':>10}  {'':14}{'median':>12}{'÷ without':>12}{'compared':>12}"
    )
    for kind, size, name, median, ratio, share in rows:
        print(
            f"{kind:15}{size:10}  {name:14}{median * 1e3:9.3f} ms{ratio:12.2f}{share:12.0%}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"verify-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "bytes", "options", "seconds", "ratio", "compared"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
