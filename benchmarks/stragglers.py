"""What does a late rank cost the other ranks, and what does the engine cost while it
waits?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/stragglers.py

Straggler models: none; a leaf or an inner rank that sleeps for 20 round times before every round; or random ranks that
do so. A delay is a sleep, so that waiting ranks take no core. Ranks that are not late time their rounds, without
barriers; the two settings of a ratio take turns. The benchmark prints a table and stores it.
"""

import argparse
import csv
import os
import pathlib
import resource
import time

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

import jaxcoded

comm = MPI.COMM_WORLD
FANOUT = 3
HISTORY = 256 << 20  # bytes


class Rounds:
    """The rounds of a group on NumPy arrays, in place."""

    def __init__(self, group, size):
        self.group, self.weights = group, group.batch(comm.size).weights
        self.x = np.zeros(size, np.float32)

    def __call__(self):
        jaxcoded.host.allreduce(self.x, self.group, self.weights, out=self.x)


def timed(rounds, count, late=(), delay=0.0):
    """Return the seconds of each round on this rank. Late ranks sleep before each round
    while they are not behind.
    """
    comm.Barrier()
    out = np.empty(count)
    for i in range(count):
        if comm.rank in late and rounds.group.lag() == 0:
            time.sleep(delay)
        start = time.perf_counter()
        rounds()
        out[i] = time.perf_counter() - start
    return out


def median_of_others(seconds, late):
    """Return the median, over the ranks that are not late, of their median round."""
    medians = comm.allgather(np.median(seconds))
    return np.median([m for rank, m in enumerate(medians) if rank not in late])


def lateness(group, size, late, repetitions, count):
    """Return the other ranks' median round time with and without a late rank, and the
    median of the ratios.
    """
    rounds = Rounds(group, size)
    timed(rounds, 10)
    with_it, without = [], []
    for _ in range(repetitions):
        without.append(median_of_others(timed(rounds, count), late))
        delay = 20 * without[-1]
        with_it.append(
            median_of_others(timed(rounds, count, late, comm.bcast(delay)), late)
        )
    ratio = np.median(np.array(with_it) / np.array(without))
    return np.median(with_it), np.median(without), ratio


def catching_up(group, size, late, behind):
    """Return the time of a round that a late rank catches up on, and of a normal round."""
    rounds = Rounds(group, size)
    normal = median_of_others(timed(rounds, 50), ())
    comm.Barrier()
    replayed = None
    if comm.rank == late:
        while not comm.Iprobe(source=0):  # all other ranks continue
            time.sleep(0.01)
        comm.recv(source=0)
        start = time.perf_counter()
        for _ in range(behind):
            rounds()
        replayed = (time.perf_counter() - start) / behind
    else:
        for _ in range(behind):
            rounds()
        if comm.rank == 0:
            comm.send(None, dest=late)
    return comm.bcast(replayed, late), normal


def resident():
    """Return the memory of this process now, in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory(group, size, budget):
    """Return the largest memory of any rank's engine in addition to ``budget``, in payloads; the bound is the number of
    children + 2.
    """
    rounds = Rounds(group, size)
    most = 0
    for _ in range(20):
        rounds()
        most = max(most, group.statistics()["memory_bytes"] - budget)
    return comm.allreduce(most / (4 * size), op=MPI.MAX)


def growth(group, size, count):
    """Return the bytes by which the largest process grew over the second half of many
    rounds with random stragglers.
    """
    rounds = Rounds(group, size)
    random = np.random.default_rng(comm.rank)
    middle = 0
    for i in tqdm(range(count), desc="random stragglers", disable=comm.rank != 0):
        # at most one child of every parent, the last one
        if comm.rank and comm.rank % FANOUT == 0 and random.random() < 0.02:
            time.sleep(random.random() * 0.02)
        rounds()
        if i == count // 2:
            middle = resident()
    return comm.allreduce(resident() - middle, op=MPI.MAX)


def idle(group, seconds):
    """Return the fraction of a core that all ranks together use while rank 0 is late
    and all other ranks wait, and while all ranks sleep.
    """
    rounds = Rounds(group, 1_000)
    rounds()

    def used(wait):
        comm.Barrier()
        before = time.process_time()
        wait()
        return comm.allreduce(time.process_time() - before) / seconds

    def wait_for_root():
        if comm.rank == 0:
            time.sleep(seconds)
        rounds()

    return used(wait_for_root), used(lambda: time.sleep(seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--rounds", type=int, default=10_000, help="for memory")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [1_000] if args.smoke else [1_000, 250_000, 4_000_000]
    repetitions, scale = (1, 0.1) if args.smoke else (5, 1.0)
    leaf, inner = comm.size - 1, 1
    rows = []

    def row(what, value, must, unit="×"):
        rows.append((comm.size, what, value, must, unit))
        if comm.rank == 0:
            print(f"{what:64}{value:10.3f} {unit:10}{must}", flush=True)

    def new_group():
        return jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(fanout=FANOUT),
            transport="engine",
            options=jaxcoded.Options(history_bytes=HISTORY),
        )

    with new_group() as group:
        row(
            f"{4 * sizes[-1]:,} B, memory while nobody is late",
            memory(group, sizes[-1], 0),
            f"≤ {FANOUT + 2}",
            "payloads",
        )
    with new_group() as group:
        for size in sizes:
            count = max(5, int(scale * min(100, 80_000_000 // size)))
            for name, late in (("leaf", leaf), ("inner rank", inner)):
                _, without, ratio = lateness(group, size, {late}, repetitions, count)
                row(
                    f"{4 * size:,} B, {name} late by 20 rounds: others ÷ without",
                    ratio,
                    f"≤ 1.1  (a round: {without * 1e3:.2f} ms)",
                )
        for size in sizes:
            behind = max(5, int(scale * min(60, 30_000_000 // size)))
            replayed, normal = catching_up(group, size, leaf, behind)
            row(
                f"{4 * size:,} B, leaf catches up: replayed round ÷ normal",
                replayed / normal,
                f"≤ 0.3  ({replayed * 1e3:.3f} ms)",
            )
        size = sizes[-1]
        row(
            f"{4 * size:,} B, memory beyond the history's {HISTORY >> 20} MiB",
            memory(group, size, HISTORY),
            f"≤ {FANOUT + 2}",
            "payloads",
        )
        many = 200 if args.smoke else args.rounds
        row(
            f"4,000 B, growth in rounds {many // 2:,} … {many:,}",
            growth(group, 1_000, many) / 2**20,
            "flat",
            "MiB",
        )
        waiting, asleep = idle(group, 1.0 if args.smoke else 5.0)
        row(f"{comm.size} ranks waiting in a round, cores", waiting, "≤ 0.05", "")
        row(f"{comm.size} ranks asleep, cores", asleep, "≤ 0.05", "")

    if comm.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"stragglers-{comm.size}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["ranks", "what", "value", "must", "unit"])
            writer.writerows(rows)
        print(f"wrote {os.fspath(path)}")


if __name__ == "__main__":
    main()
