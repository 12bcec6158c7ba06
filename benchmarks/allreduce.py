"""How long does a jitted all-reduce take, coded and uncoded?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/allreduce.py

No rank straggles. "2 x, alone" is a jitted function without communication: it measures JAX's own time on these ranks.
Every repetition times all collectives in turn, so that they run under the same
conditions. After a barrier the benchmark makes several calls without a barrier, and
waits for each result as a training step does. The benchmark checks the sums before and
after. ``README.md`` defines the time of a call and the bandwidths.

It prints a table and a verdict, and stores the table with pictures of it. If the folder has tables for several numbers
of ranks, it also draws the times against the number of ranks. ``allreduce_pictures.py`` draws the pictures alone.
"""

import argparse
import contextlib
import csv
import math
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from allreduce_calls import comm, compared
from allreduce_pictures import coded, draw, of
from mpi4py import MPI
from tqdm import tqdm

BASES = ("mpi4jax.allreduce", "psum over gloo", "mpi4py Allreduce")
BLOCK = 0.1  # intended seconds of the calls between two barriers
CALLS = 1000  # after this many calls of a collective no repetition follows
REPETITIONS = 3  # at least
# Memory that a rank needs while all collectives take turns, in lengths of a message. Measured with five groups of the
# engine, which keep most of the memory for later use.
MESSAGES = 40


def sizes_up_to(largest):
    """Return numbers of elements from 4 KiB on, in steps of a factor 4, up to
    ``largest`` bytes or four fifths of a host's memory.
    """
    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED).size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = comm.allreduce(0.8 * memory / on_host / MESSAGES, op=MPI.MIN)
    sizes = []
    while (size := 1024 * 4 ** len(sizes)) * 4 <= largest:
        if 4 * size > room:
            if comm.rank == 0:
                print(f"left out: no memory for {4 * size:,} B and more")
            break
        sizes.append(size)
    return sizes


def check(collectives, size):
    """Check that the timed calls give the right sum."""
    v = jax.random.normal(jax.random.key(size), (size,))
    largest = np.abs(v).max()
    for name, collective in collectives.items():
        got = np.asarray(collective.prepare(collective.share(v))()).reshape(-1)
        off = np.abs(got - collective.factor * v).max() / collective.factor / largest
        if not off < 1e-3:
            raise AssertionError(
                f"{name} of {4 * size} bytes is off by {off:.1e} at rank {comm.rank}"
            )


def block(run, calls):
    """Time consecutive calls. Return the seconds of each call on its slowest rank, ``(calls,)``, and the mean seconds
    on the slowest rank.
    """
    run()
    stamps = np.empty(calls + 1)
    comm.Barrier()
    stamps[0] = time.perf_counter()
    for i in range(calls):
        run()
        stamps[i + 1] = time.perf_counter()
    times = np.diff(stamps)
    mean = comm.allreduce(times.mean(), op=MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    return times, mean


def measure(collectives, size, until, repetitions, progress):
    """Return the calls' times and the means of the repetitions from `block`, by name.
    Repeat until there are enough repetitions or, on rank 0, the time is over.
    """
    progress.set_description(f"{4 * size:,} B")
    check(collectives, size)
    v = jnp.zeros(size, jnp.float32)
    shapes = {name: jax.eval_shape(each.share, v) for name, each in collectives.items()}

    def prepared(name):
        # made again each time: the operands of all collectives on all ranks may not fit into memory
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[name])
        return collectives[name].prepare(zeros)

    calls = {
        name: max(2, min(100, int(BLOCK / block(prepared(name), 3)[1])))
        for name in collectives
    }
    times = {name: ([], []) for name in collectives}
    for repetition in range(math.ceil(CALLS / min(calls.values()))):
        late = comm.bcast(time.monotonic() > until)
        if repetition >= repetitions and late:
            break
        for name in collectives:
            longest, mean = block(prepared(name), calls[name])
            times[name][0].extend(longest)
            times[name][1].append(mean)
    check(collectives, size)
    progress.update()
    return times


def rows(size, collectives, times):
    """Return the table of a size, a dictionary for each collective."""
    for name, (calls, means) in times.items():
        seconds = np.median(means)
        p50, p95, p99 = np.percentile(calls, (50, 95, 99))
        yield {
            "ranks": comm.size,
            "bytes": 4 * size,
            "collective": name,
            "code": collectives[name].code,
            "calls": len(calls),
            "seconds": seconds,
            "p50": p50,
            "p95": p95,
            "p99": p99,
            "algorithm_bandwidth": 4 * size / seconds,
            "bus_bandwidth": 4 * size / seconds * 2 * (comm.size - 1) / comm.size,
        } | {base: np.median(np.divide(means, times[base][1])) for base in BASES}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__ and __doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--fanout", type=int, help="default: 3, or 2 on 7 ranks")
    parser.add_argument(
        "--largest", type=int, default=64, help="message in MiB; the smallest is 4 KiB"
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="about how long to measure"
    )
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = sizes_up_to(2**14 if args.smoke else args.largest * 2**20)
    until = time.monotonic() + 60 * args.minutes
    table = []
    with contextlib.ExitStack() as closing:
        collectives = compared(args.fanout or (2 if comm.size == 7 else 3), closing)
        progress = closing.enter_context(
            tqdm(total=len(sizes), unit="size", disable=comm.rank != 0)
        )
        for i, size in enumerate(sizes):
            # large messages may use the time that small messages leave
            now = time.monotonic()
            share = now if args.smoke else now + (until - now) / (len(sizes) - i)
            repetitions = 1 if args.smoke else REPETITIONS
            times = measure(collectives, size, share, repetitions, progress)
            table += rows(size, collectives, times)
    if comm.rank == 0:
        report(table)
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"allreduce-{comm.size}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)
        draw(args.out)


def report(table):
    columns = ("seconds", "p50", "p95", "p99")
    print(f"{comm.size} ranks\n{'bytes':>10}  {'collective':36}", end="")
    print("".join(f"{column:>11}   " for column in columns), end="")
    print(f"{'bus':>13}", "".join(f"{'÷ ' + base:>20}" for base in BASES))
    for row in table:
        print(f"{row['bytes']:10}  {row['collective']:36}", end="")
        print("".join(f"{row[column] * 1e3:11.3f} ms" for column in columns), end="")
        print(f"{row['bus_bandwidth'] / 1e9:8.3f} GB/s", end=" ")
        print("".join(f"{row[base]:20.2f}" for base in BASES))
    codes = {row["collective"]: row["code"] for row in table if row["code"]}
    print(*(f"{name}: {code}" for name, code in codes.items()), sep="\n")
    verdict(table)


def verdict(table):
    """Return a text that compares the engine with the other collectives."""
    engine = coded(table)
    print(f"\nNobody straggling, {engine[0]['collective']}:")
    for base in BASES:
        ratios = {row["bytes"]: row[base] for row in engine}
        slower = [f"{size:,} B" for size, ratio in ratios.items() if ratio > 1]
        print(
            f"- takes {between(ratios.values())} times as long as {base},",
            f"longer at {', '.join(slower)}." if slower else "nowhere longer.",
        )
    own, usual = (
        between([row["p99"] / row["p50"] for row in rows])
        for rows in (engine, of(table, collective=BASES[0]))
    )
    print(f"- has a p99 of {own} times its p50, {BASES[0]} {usual} times.")


def between(numbers):
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


if __name__ == "__main__":
    main()
