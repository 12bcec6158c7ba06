"""What would sequential gradient coding gain over codes and shared work?

    .venv/bin/python benchmarks/sequential.py

Simulated (`jaxcoded.tools.simulator`): 20 jobs on 256 workers with SR-SGC and M-SGC
(Krishnan et al. 2023), gradient coding with these schemes' rule of waiting, gradient
coding that waits for any n - s workers, shared work, and no code. Fractional repetition
needs one worker of each group. Delays have the form that the authors published: the
seconds of each worker in each round with load 0, plus the worker's load times the
seconds of a whole batch. These seconds include all messages. Each scheme has the best
parameters for these delays among those whose jobs end at most 10 rounds late.

The delays are random unless ``--profile`` names a file: a file that the authors published (``delay_profiles/*.pkl`` in
github.com/mamaj/Sequential-Gradient-Coding-2), or a table of seconds with a line for each round and a column for each
worker (.csv, .npy). For the authors' files ``--work`` is the slope of their runtimes over the loads, 1.12 s for
``sam-gc-cnn_profile_est_desktop_long``.

Random delays resemble the published ones: a worker takes 0.55 s (1 + x) with x exponential of mean 0.2, and twice that
while it is slow. In each round slowness begins with probability 0.04 and ends with probability 0.8.

Shared work has two cases. In the first case a worker takes part only when its delay is over, like an invocation that
has not started yet. In the second case it is late within its first block.
"""

import argparse
import csv
import dataclasses
import itertools
import pathlib
import pickle

import numpy as np
from tqdm import tqdm

from jaxcoded import Shared, make_plan
from jaxcoded.tools.simulator import (
    GradientCoding,
    Layout,
    Multiplexed,
    Network,
    SelectiveRepeat,
    ideal_seconds,
    simulate,
    simulate_sequence,
)
from jaxcoded.tools.simulator.sharing import Sharing
from jaxcoded.tools.simulator.stragglers import Measured, NoStragglers, Trace, named

DRAWN = "exponential(work=0.2) + bursty(begin=0.04, end=0.8, factor=2)"
NOTHING = Network(
    latency=0, overhead=0, call=0, combine=np.inf, bandwidth=np.inf
)  # the delays include messages


class Inert:
    """A replacement for everything in a pickle that is not a number, text, list or dictionary."""

    def __init__(self, *arguments):
        pass

    def __setstate__(self, state):
        pass


class Plain(pickle.Unpickler):
    """A reader of pickles that calls no function that a pickle names."""

    def find_class(self, module, name):
        return Inert


def published(path):
    """Return the seconds of each worker in each round, float64 (rounds, workers), from
    a file of the authors.
    """
    with path.open("rb") as file:
        rounds = Plain(file).load()
    return np.array(
        [
            [worker["finished"] - worker["started"] for worker in each["results"]]
            for each in rounds
        ]
    )


def drawn(rounds, workers):
    return np.array(
        [
            delays.time(0.55)
            for _, delays in zip(range(rounds), named(DRAWN).rounds(workers))
        ]
    )


def sequences(workers, delay):
    """Return the schemes to choose from, by name."""
    some = sorted({*range(1, workers // 4), *range(workers // 4, workers + 1, 8)})
    return {
        "GC": [GradientCoding(workers, s) for s in range(1, workers // 2)],
        "SR-SGC": [
            SelectiveRepeat(workers, stragglers, burst, window)
            for burst in range(1, delay + 1)
            for window in range(burst + 1, 2 * delay + 1, burst)
            for stragglers in some
        ],
        "M-SGC": [
            Multiplexed(workers, stragglers, burst, window)
            for window in range(2, delay + 2)
            for burst in range(1, min(window, delay + 3 - window))
            for stragglers in some
        ],
    }


def shared(table, work, replicas, within):
    """Return the seconds of all rounds with shared work. A worker is late before it takes part, or within its first
    block.
    """
    size = table.shape[1] + 1
    plan = make_plan(size, Shared(replicas=replicas, blocks=1, root_computes=False))
    layout = Layout.of(plan)
    if within:
        return star(layout, table, work)
    sharing = Sharing(layout, NOTHING, work)
    usual = next(NoStragglers().rounds(size))
    up = np.insert(table, 0, 0.0, axis=1)  # the root
    return sum(sharing.round(row, usual)[0].max() for row in up)


def star(layout, table, work):
    """Return the seconds of all rounds of a star, each of which all workers begin at once."""
    return simulate(
        layout,
        NOTHING,
        payload=0,
        work=work,
        stragglers=Measured(table, seconds=True),
        rounds=len(table),
        fresh=True,
    ).ends[-1]


def study(table, work, jobs, mus):
    """Return rows: scheme, variant, load, seconds of all jobs."""
    workers, delays = table.shape[1], Measured(table, seconds=True)
    delay = len(table) - jobs
    first = table[:jobs]
    rows = []

    def best(name, some, load, seconds):
        results = [(seconds(each), each) for each in tqdm(some, desc=name, leave=False)]
        least, which = min(results, key=lambda result: result[0])
        rows.append((name, str(which), load(which), least))

    def any_of(s, repetition=False):
        layout = Layout.balanced(workers + 1, workers, s)
        if not repetition:
            root = layout.counts > 0
            layout = dataclasses.replace(
                layout,
                needs=np.where(root, workers - s, 0),
                copies=np.ones_like(layout.copies),
            )
        return star(layout, first, work)

    best("uncoded", [0], lambda s: 1 / workers, any_of)
    for mu, one_by_one, (name, some) in itertools.product(
        mus, (False, True), sequences(workers, delay).items()
    ):
        best(
            f"{name}, waits {'one by one' if one_by_one else 'for all'}, mu = {mu:g}",
            some,
            lambda scheme: scheme.load,
            lambda scheme, mu=mu, one_by_one=one_by_one: simulate_sequence(
                scheme,
                work=work,
                stragglers=delays,
                jobs=jobs,
                mu=mu,
                one_by_one=one_by_one,
            ).ends[-1],
        )
    few = range(1, workers // 2)
    best("GC by any n - s", few, lambda s: (s + 1) / workers, any_of)
    best(
        "fractional repetition",
        [s for s in few if workers % (s + 1) == 0],
        lambda s: (s + 1) / workers,
        lambda s: any_of(s, repetition=True),
    )
    for replicas, within in ((1, False), (3, False), (7, False), (7, True)):
        best(
            f"shared{', late in a block' if within else ''}",
            [replicas],
            lambda replicas: 1 / workers,
            lambda replicas, within=within: shared(first, work, replicas, within),
        )
    ideal = ideal_seconds(workers, work=work, stragglers=delays, rounds=jobs).sum()
    rows.append(("ideal", "", 1 / workers, ideal))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--profile", type=pathlib.Path, help="measured delays")
    parser.add_argument(
        "--work", type=float, default=1.12, help="seconds of a whole batch"
    )
    parser.add_argument("--mu", type=float, nargs="+", default=[1.0, 0.2])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--delay", type=int, default=10, help="rounds, at most")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    if args.smoke:
        args.jobs, args.delay = 4, 3
    rounds = args.jobs + args.delay
    if args.profile is None:
        table = drawn(rounds, 16 if args.smoke else 256)
    elif args.profile.suffix == ".pkl":
        table = published(args.profile)
    else:
        table = Trace(args.profile).table
    if len(table) < rounds:
        parser.error(
            f"{args.profile} has {len(table)} rounds: give smaller --jobs and --delay, whose sum is at most this number"
        )
    rows = study(table[:rounds], args.work, args.jobs, args.mu)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "sequential.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["scheme", "which", "load", "seconds"])
        writer.writerows(rows)
    print(f"{args.jobs} jobs on {table.shape[1]} workers")
    for name, which, load, seconds in rows:
        print(f"{name:36}{load:8.4f}{seconds:8.2f} s  {which}")


if __name__ == "__main__":
    main()
