"""How long do long sums take in sections, by the root, and in a ring?

    .venv/bin/python scripts/on_hosts.py --hosts 13 --rate 200mbit --both-ways -- \\
        .venv/bin/python -m mpi4py benchmarks/sections.py

All ranks are the root's children, unless ``--fanout`` sets the number of children per parent; ``--by-host`` adds trees
that follow hosts. Jitted all-reduces of float32 vectors, ordered by a token and donated, take turns once their inputs
are ready; a root without data contributes zeros. Times are those of the slowest rank. With one late worker, which calls
when the other ranks are done, times are those of the slowest other rank. Ratios are
medians of the ratios within a repetition. The traffic is what the busiest rank fetches,
in lengths of the vector.
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
from jaxcoded.collectives import baselines

comm = MPI.COMM_WORLD
LATE = comm.size - 1


def barrier():
    """Wait for all ranks without occupying a core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def groups(stragglers, fanout, by_host):
    """Return groups that form all sums in sections, and groups that form none."""
    trees = {"": {"fanout": fanout or comm.size - 1}}
    if by_host:
        trees["by host, "] = {"by_host": True}
    for tree, shape in trees.items():
        for name, least in ("in sections", 1), ("by the root", 0):
            yield (
                tree + name,
                jaxcoded.CodedGroup(
                    comm,
                    jaxcoded.Coded(stragglers=stragglers, **shape),
                    transport="engine",
                    options=jaxcoded.Options(sections_from=least),
                ),
            )


def coded(group, size):
    """Return a function that makes an input, and one that sums it."""
    weights = group.batch(comm.size).weights
    step = jax.jit(
        lambda x, token: jaxcoded.coded_allreduce(x, group, weights, token=token),
        donate_argnums=(0, 1),
    )
    own = float(group.plan.load_of(comm.rank) > 0)
    token = jnp.int32(0)

    def run(x):
        nonlocal token
        total, _, token = step(x, token)
        total.block_until_ready()

    return lambda: jnp.full(size, own, jnp.float32), run


def plain(collective, size):
    step = jax.jit(lambda x: collective(x, comm), donate_argnums=0)
    return lambda: jnp.ones(size, jnp.float32), lambda x: step(x).block_until_ready()


def mpi(size):
    own, total = np.ones((2, size), np.float32)
    return lambda: own, lambda x: comm.Allreduce(x, total)


def seconds(make, run, late):
    """Return the seconds of the slowest rank, or of the slowest punctual rank if one rank is late."""
    x = jax.block_until_ready(make())
    barrier()
    if late and comm.rank == LATE:
        barrier()
        run(x)
        own = 0.0
    else:
        start = time.perf_counter()
        run(x)
        own = time.perf_counter() - start
        if late:
            barrier()
    return comm.allreduce(own, MPI.MAX)


def fetched(group):
    return group.statistics()["fetched_bytes"]


def measure(size, made, repetitions, progress):
    """Return rows of bytes, name, whether a rank is late, seconds, ratio to the ring,
    traffic.
    """
    runs = {(name, False): coded(group, size) for name, group in made.items()}
    if next(iter(made.values())).plan.strategy.stragglers:
        runs |= {(name, True): runs[name, False] for name in made}
    runs["ring", False] = plain(baselines.ring_allreduce, size)
    runs["mpi4jax.allreduce", False] = plain(baselines.allreduce, size)
    runs["mpi4py Allreduce", False] = mpi(size)
    times = {key: [] for key in runs}
    moved = dict.fromkeys(runs, 0.0)
    for repetition in range(-1, repetitions):  # the first repetition compiles
        for (name, late), (make, run) in runs.items():
            before = fetched(made[name]) if name in made else 0
            took = seconds(make, run, late)
            if repetition < 0:
                continue
            times[name, late].append(took)
            if name in made and not late:
                each = (fetched(made[name]) - before) / (4 * size)
                moved[name, late] += comm.allreduce(each, MPI.MAX) / repetitions
        progress.update()
    ring = np.array(times["ring", False])
    return [
        (
            4 * size,
            name,
            late,
            np.median(took),
            np.median(took / ring),
            moved[name, late],
        )
        for (name, late), took in times.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--stragglers", type=int, default=1)
    parser.add_argument("--fanout", type=int, help="of the tree; default: one family")
    parser.add_argument("--by-host", action="store_true", help="also such trees")
    parser.add_argument(
        "--kilobytes", type=int, nargs="+", default=[4, 64, 200, 2000, 20000]
    )
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [200_000, 400_000] if args.smoke else [250 * kb for kb in args.kilobytes]
    repetitions = 2 if args.smoke else args.repetitions
    made = dict(groups(args.stragglers, args.fanout, args.by_host))
    rows = []
    with tqdm(total=len(sizes) * (repetitions + 1), disable=comm.rank != 0) as progress:
        for size in sizes:
            rows += measure(size, made, repetitions, progress)
    for group in made.values():
        group.close()
    if comm.rank:
        return
    print(f"{comm.size} ranks, {group.plan.strategy.code}, s = {args.stragglers}")
    print(f"{'bytes':>10}  {'':28}{'median':>12}{'÷ ring':>10}{'traffic':>10}")
    for size, name, late, median, ratio, traffic in rows:
        name += ", one late" * late
        moved = f"{traffic:10.2f}" if traffic else ""
        print(f"{size:10}  {name:28}{median * 1e3:9.2f} ms{ratio:10.2f}{moved}")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"sections-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["bytes", "collective", "late", "seconds", "ratio", "traffic"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
