"""How long does a step take if work is shared, coded, or neither?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/sharing.py

Rank 0 is the root and has no data, all other ranks are workers. Work is a sleep: in
every step a model draws how slow each worker is, and a worker takes the corresponding
part of its step time for a block. All schemes get the same draws and take turns, some
steps at a time. No barrier separates the steps of a turn; the time of a step is from
sum to sum on the root. The benchmark compares it with the *ideal*: all work of that
step, divided among the workers so that all finish together. It prints a table for each
model and stores it.

With ``--stopped`` the last worker is stopped in the middle of a step, as if its host
hung, until the other workers have had time for eight more steps: how long do these
steps take? With ``--killed`` the last worker is killed instead, in a job with Open
MPI's fault tolerance and a single scheme:

    scripts/mpirun -n 13 --with-ft ulfm .venv/bin/python -m mpi4py benchmarks/sharing.py --killed

With ``--costs 1.5`` the costs of examples have a Pareto distribution of this shape,
which ranks know or do not know. The ideal is then at least the time of the most costly
example.

With ``--job`` the blocks are the microbatches of a real job from a file (columns job,
step, rank, microbatch, seconds), on as many workers as the job had ranks.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import signal
import subprocess
import time

import numpy as np
from mpi4py import MPI
from schemes import Scheme, opened
from tqdm import tqdm
from training_ranks import Unpaced

import jaxcoded
from jaxcoded.tools.simulator import stragglers
from jaxcoded.transport import engine

comm = MPI.COMM_WORLD
WORKERS = comm.size - 1
FEATURES = 1024  # float32: 4 KB
TURN = 10  # steps


def models(steps):
    """Return each worker's slowness relative to the usual speed, by the model's name."""
    nobody = 1 + 0.03 * np.random.default_rng(0).standard_normal((steps, WORKERS))
    return {
        "nobody": stragglers.Measured(nobody),
        "exponential": stragglers.Exponential(work=0.5),
        "pareto": stragglers.Pareto(shape=1.5, scale=0.2),
        "fixed": stragglers.FixedSlow(factor=10),
        # two workers that do not have equal data in fractional repetition
        "two": stragglers.FixedSlow((-1, -3), factor=10),
        "bursty": stragglers.Bursty(begin=0.02, end=0.2, factor=5),
        "speeds": stragglers.Measured(np.linspace(1, 2.5, WORKERS)[None]),
    }


def schemes(blocks, costs):
    """Return the schemes by label. ``costs``: whether examples have unequal costs."""
    shared = [
        Scheme(
            f"shared, data on {replicas} others{', in jit' if in_jit else ''}",
            work=jaxcoded.Shared(replicas=replicas, blocks=blocks, root_computes=False),
            in_jit=in_jit,
        )
        for in_jit in (False, True)
        for replicas in (WORKERS - 1, min(3, WORKERS - 1))
    ]
    verified = {"label": f"{shared[-1].label}, verified", "check": jaxcoded.Check()}
    shared.insert(-1, dataclasses.replace(shared[-1], **verified))
    star = jaxcoded.Uncoded(fanout=WORKERS, root_computes=False)
    others = [
        Scheme("uncoded", stragglers=0),
        Scheme("uncoded, by the step before", work=star, balanced=True),
    ]
    if costs:
        others.append(Scheme("uncoded, by known costs", work=star, known=True))
        shared = [
            scheme for scheme in shared if not scheme.in_jit
        ]  # jit needs equal shapes
        shared += [
            dataclasses.replace(
                scheme, label=f"{scheme.label}, by known costs", known=True
            )
            for scheme in shared
        ]
    else:
        others += [
            Scheme("fractional repetition", code="fractional_repetition"),
            Scheme("cyclic repetition", code="cyclic_repetition"),
        ]
    return {scheme.label: scheme for scheme in others + shared}


class Slept:
    """A batch whose gradients take time: one example for each block.

    The gradient of example ``k`` is 1 at ``k`` and 0 elsewhere, so a sum shows examples
    that are missing or counted twice.

    Attributes:
        work: float64 ``(steps, examples)``, seconds of a worker of usual speed.
        slowness: float64 ``(steps, workers)``, the factor that multiplies these seconds.
        strikes: the step in whose middle this process has a fault, and the fault.
    """

    features = FEATURES
    strikes = None

    def __init__(self, work, slowness):
        self.work, self.slowness = work, slowness
        self.examples = work.shape[1]
        self.exact = np.zeros(FEATURES)
        self.exact[: self.examples] = 1

    def begin(self, step):
        """Begin a step."""
        self.costs = self.work[step]
        self._seconds = self.costs * self.slowness[step, max(comm.rank - 1, 0)]
        self._overslept = 0.0
        self._step, self._worked = step, 0

    def gradient(self, theta, rows, weights):
        self._worked += len(rows)
        half = self._worked > self.examples // WORKERS // 2
        if self.strikes and self._step == self.strikes[0] and half:
            _, befalls = self.strikes
            self.strikes = None
            befalls()
        # a sleep lasts too long; a worker must not lose this time with every piece
        until = time.perf_counter() + self._seconds[rows].sum() - self._overslept
        time.sleep(max(0.0, until - time.perf_counter()))
        self._overslept = time.perf_counter() - until
        return np.bincount(rows, weights, self.features)

    def ideal(self):
        """Return the ideal seconds of every step, float64 ``(steps,)``: examples are
        not divided.
        """
        longest = self.work.max(axis=1) * self.slowness.min(axis=1)
        return np.maximum(
            self.work.sum(axis=1) / (1 / self.slowness).sum(axis=1), longest
        )


def drawn(model, steps, examples, work, shape=None):
    """Return a batch under a model: ``work`` seconds for each worker, in ``examples``
    examples. With ``shape`` each step draws their costs from a Pareto distribution.
    """
    slowness = [
        delays.factor for _, delays in zip(range(steps), model.rounds(WORKERS, seed=1))
    ]
    costs = np.ones((steps, WORKERS * examples))
    if shape is not None:
        costs += np.random.default_rng(2).pareto(shape, costs.shape)
    costs *= WORKERS * work / costs.sum(axis=1, keepdims=True)
    return Slept(costs, np.array(slowness))


def replayed(path, job, steps, work, cut):
    """Return the steps of a recorded job, scaled so that a worker works ``work``
    seconds on average. A microbatch takes its work times the overall slowness of its
    rank. Each microbatch is cut into ``cut`` equal blocks.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["job"] == job]
    if not rows:
        raise SystemExit(f"{path} has no job {job!r}")
    where = np.array(
        [[int(row[name]) for name in ("step", "rank", "microbatch")] for row in rows]
    )
    steps_of, ranks_of, blocks_of = (
        np.unique(column, return_inverse=True)[1] for column in where.T
    )
    seconds = np.zeros((steps_of.max() + 1, ranks_of.max() + 1, blocks_of.max() + 1))
    seconds[steps_of, ranks_of, blocks_of] = [float(row["seconds"]) for row in rows]
    if seconds.shape[1] != WORKERS:
        raise SystemExit(
            f"job {job!r} had {seconds.shape[1]} ranks: start {seconds.shape[1] + 1}"
        )
    seconds = seconds[:steps] * (work / seconds.sum(axis=2).mean())
    slowness = seconds.mean(axis=(0, 2)) / seconds.mean()
    work_of = (seconds / slowness[:, None]).reshape(len(seconds), -1)
    work_of = np.repeat(work_of / cut, cut, axis=1)
    return Slept(work_of, np.tile(slowness, (len(seconds), 1)))


def stop_for(seconds):
    """Stop this process."""
    command = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def meet():
    """Wait for all ranks without occupying a core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def turn(collective, problem, steps):
    """Return the seconds of each of these steps except the first, from sum to sum."""
    meet()
    ends, totals, theta = [], [], np.zeros(FEATURES, np.float32)
    for step in steps:
        problem.begin(step)
        totals.append(collective(theta, Unpaced()))
        ends.append(time.perf_counter())
    for total in totals:  # reading a total takes part of a millisecond
        np.testing.assert_allclose(total, problem.exact, atol=1e-3)
    return np.diff(ends)


def measured(problem, collectives, name):
    """Return the seconds of every step except the first, by scheme."""
    count = len(problem.work)
    seconds = {label: [] for label in collectives}
    for collective in collectives.values():
        collective.prepare(problem)
        turn(collective, problem, [0])  # compile first
    starts = range(0, count - 1, TURN)
    for first in tqdm(starts, desc=name, disable=comm.rank != 0, leave=False):
        steps = range(first, min(first + TURN + 1, count))
        for label, collective in collectives.items():
            seconds[label].extend(turn(collective, problem, steps))
    return {label: np.array(each) for label, each in seconds.items()}


def die():
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def without_one(collectives, args):
    """Print a table of step times around a stop or the death of the last worker."""
    strikes_in, without = 8, 8
    # how many times as much work the other workers have after the fault
    fair = WORKERS / (WORKERS - 1)
    steps = strikes_in + without + 8
    what = "killed" if args.killed else "stopped"
    stop = functools.partial(stop_for, without * fair * args.work * 1e-3)
    problem = drawn(models(steps)["nobody"], steps, args.blocks, args.work * 1e-3)
    if comm.rank == 0:
        print(f"\none worker is {what}, ms of a step: fair is {fair:.2f} × before")
        print(f"{'':42}{'before':>8}{'that step':>11}{'later':>8}{'× before':>10}")
    for label, collective in collectives.items():
        if not collective.plan.strategy.by_blocks:
            continue  # without blocks all ranks wait for the worker, or none notices
        collective.prepare(problem)
        turn(collective, problem, [0])
        if comm.rank == comm.size - 1:
            problem.strikes = strikes_in, die if args.killed else stop
        seconds = turn(collective, problem, range(steps))  # except the first one
        before = np.median(seconds[: strikes_in - 1])
        later = np.median(seconds[strikes_in : strikes_in + without - 2])
        if comm.rank == 0:
            print(
                f"{label:42}{1e3 * before:8.1f}{1e3 * seconds[strikes_in - 1]:11.1f}"
                f"{1e3 * later:8.1f}{later / before:10.2f}",
                flush=True,
            )


def report(name, seconds, ideal, args, path):
    """Print a table, and store it with its parameters."""
    lines = {
        label: {
            "median_of_ideal": np.median(each / ideal),
            "median_of_uncoded": np.median(each / seconds["uncoded"]),
            "mean_of_ideal": each.sum() / ideal.sum(),
            "mean_seconds": each.mean(),
            "seconds": each.tolist(),
        }
        for label, each in seconds.items()
    }
    print(f"\n{name}: {len(ideal)} steps, ideal {1e3 * ideal.mean():.1f} ms on average")
    print(f"{'median':42}{'÷ ideal':>10}{'÷ uncoded':>11}{'mean ÷ ideal':>14}{'ms':>8}")
    for label, line in lines.items():
        print(
            f"{label:42}{line['median_of_ideal']:10.2f}{line['median_of_uncoded']:11.2f}"
            f"{line['mean_of_ideal']:14.2f}{1e3 * line['mean_seconds']:8.1f}",
            flush=True,
        )
    fields = {
        "model": name,
        "workers": WORKERS,
        "blocks": args.blocks,
        "work_ms": args.work,
        "ideal_seconds": ideal.tolist(),
        "schemes": lines,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n")
    print(f"wrote {os.fspath(path)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--work", type=float, default=120, help="ms of a worker's step")
    parser.add_argument("--blocks", type=int, default=12, help="of a worker")
    parser.add_argument(
        "--costs", type=float, metavar="SHAPE", help="of a Pareto distribution: unequal"
    )
    parser.add_argument("--examples", type=int, default=1, help="of a block")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=list(models(2)))
    parser.add_argument("--jit", action="store_true", help="inside of jit, too")
    parser.add_argument("--stopped", action="store_true", help="a worker, for a while")
    parser.add_argument("--killed", action="store_true", help="a worker, in one scheme")
    parser.add_argument("--job", help="in the file, instead of models")
    parser.add_argument("--trace", type=pathlib.Path, help="the file, .csv.gz")
    parser.add_argument("--cut", type=int, default=1, help="each into so many blocks")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    if WORKERS < 3:  # see "two" in `models`
        parser.error("start 4 ranks or more")
    if (args.job is None) != (args.trace is None):
        parser.error("--job and --trace go together")
    if args.smoke:
        args.work, args.steps = min(args.work, 12), min(args.steps, 3)
    work, steps = args.work * 1e-3, args.steps + 1  # the first step does not count
    if args.job:
        problems = {args.job: replayed(args.trace, args.job, steps, work, args.cut)}
        args.blocks = problems[args.job].examples // WORKERS
    else:
        known = models(steps)
        problems = {
            name: drawn(
                known[name], steps, args.blocks * args.examples, work, args.costs
            )
            for name in args.models or known
        }
    chosen = [
        scheme
        for scheme in schemes(args.blocks, args.costs).values()
        if args.jit or not scheme.in_jit
    ]
    if args.killed:  # a dead rank is missing in all groups, so only one scheme can run
        if not engine.fault_tolerant():
            parser.error("--killed needs mpirun --with-ft ulfm, of Open MPI 5")
        chosen = chosen[-1:]
    with contextlib.ExitStack() as stack:
        collectives = {
            scheme.label: stack.enter_context(opened(scheme, comm)) for scheme in chosen
        }
        if args.stopped or args.killed:
            without_one(collectives, args)
            problems = {}
        for name, problem in problems.items():
            seconds = measured(problem, collectives, name)
            if comm.rank == 0:
                costs = "" if args.costs is None else f"-costs-{args.costs:g}"
                path = args.out / f"sharing-{args.work:g}ms-{name}{costs}.json"
                report(name, seconds, problem.ideal()[1:], args, path)


if __name__ == "__main__":
    main()
