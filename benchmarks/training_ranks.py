"""The program of the ranks of `benchmarks/training.py`: they run rounds of training for each scheme and straggler model
in a file.

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/training_ranks.py JOB.json

Every rank writes its records to ``NAME-RANK.npz``. The rounds of a run have no barriers between them, and their sums
are checked after the run.
"""

import itertools
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
from datasets import Vectors
from mpi4py import MPI
from schemes import Scheme, opened
from tqdm import tqdm

from jaxcoded.tools.simulator import stragglers

comm = MPI.COMM_WORLD
WARM_UP = 2  # rounds


class Pace:
    """Make work take the time of a straggler model.

    Each example takes ``an_example`` seconds, times the model's factor. After the real
    computation the rank sleeps for the rest. Then the process is stopped or killed, if the model says so.

    Attributes:
        worked: whether this rank has worked since the last `begin`.
        overrun: seconds by which real computations exceeded the model's time.
    """

    def __init__(self, model, an_example):
        self._delays = stragglers.named(model).rounds(comm.size, seed=1)
        self._an_example = an_example
        self.overrun = 0.0

    def begin(self):
        """Begin a round."""
        delays = next(self._delays)
        self._factor = delays.factor[comm.rank]
        self._seconds = delays.seconds[comm.rank]
        self._stopped = delays.stopped[comm.rank]
        self._until = time.perf_counter()
        self.worked = False

    def work(self, examples):
        """Pace the work on ``examples`` examples since the last call."""
        if not examples:
            return
        self.worked = True
        if self._stopped:
            stop(self._seconds)
            self._until = time.perf_counter()
        else:
            self._until += self._seconds
        self._seconds, self._stopped = 0.0, False  # once a round
        self._until += self._an_example * examples * self._factor
        left = self._until - time.perf_counter()
        self.overrun += max(0.0, -left)
        time.sleep(max(0.0, left))


class Unpaced:
    """A replacement of `Pace` for rounds that are not timed."""

    def work(self, examples):
        pass


def stop(seconds):
    """Stop this process for ``seconds`` with SIGSTOP, or kill it."""
    if np.isinf(seconds):
        os.kill(os.getpid(), signal.SIGKILL)
    command = f"sleep {seconds}; kill -CONT {os.getpid()}"
    watcher = subprocess.Popen(["/bin/sh", "-c", command])
    os.kill(os.getpid(), signal.SIGSTOP)
    watcher.wait()


def measure_trace(problem, path, rounds=20, seconds=0.01):
    """Write a trace: the times of equal gradients of at least ``seconds`` on these
    ranks, in consecutive rounds, relative to the median. The ranks share the machine's
    cores.
    """
    rows = np.array_split(np.arange(problem.examples), comm.size)[comm.rank]
    theta, weights = problem.start()[0], np.ones(len(rows), np.float32)

    def gradients(count):
        start = time.perf_counter()
        for _ in range(count):
            problem.gradient(theta, rows, weights)
        return time.perf_counter() - start

    count = 1 + int(seconds / min(gradients(1) for _ in range(10)))
    comm.Barrier()
    times = np.array([gradients(count) for _ in range(rounds)])
    table = np.array(comm.allgather(times / np.median(times))).T
    if comm.rank == 0:
        np.savetxt(path, table, fmt="%.3f", delimiter=",")
    comm.Barrier()


def run(case, collective, problem, last, folder):
    """Run the rounds of one scheme under one model.

    Args:
        case: the name, the model, the most seconds and rounds, the fewest rounds, and the seconds of an example.
        last: a number in memory shared by all ranks. The root writes the number of the
            last round there before it takes part in that round.
        folder: the folder for the files.
    """
    theta = problem.start()[0]
    for _ in range(WARM_UP if case["warm_up"] else 0):
        collective(theta, Unpaced())
    pace = Pace(case["model"], case["an_example"])
    state, ends, worked = problem.start(), [], []
    thetas, totals = [], []
    first = collective.group.rounds if collective.group else 0
    comm.Barrier()
    start = time.perf_counter()
    for number in itertools.count(1):
        pace.begin()
        over = time.perf_counter() - start > case["seconds"]
        enough = number >= case["least"] and (over or number >= case["rounds"])
        if comm.rank == 0 and enough:
            last[0] = number
        total = collective(state[0], pace)
        ends.append(time.perf_counter() - start)
        worked.append(pace.worked)
        if comm.rank == 0:
            thetas.append(state[0])
            totals.append(total)
        state = problem.step(state, total)
        if last[0] == number:
            break
    used = uses(collective.group, first)
    np.savez(
        folder / f"{case['name']}-{comm.rank}.part.npz",
        ends=ends,
        worked=worked,
        overrun=pace.overrun,
        thetas=thetas,
        errors=relative_errors(problem, thetas, totals),
        **used,
    )
    path = folder / f"{case['name']}-{comm.rank}.npz"
    path.with_suffix(".part.npz").rename(path)


def relative_errors(problem, thetas, totals):
    """Return ``‖sum − exact‖ / ‖exact‖`` of every round, with the exact sum uncoded and
    in float64.
    """
    if not thetas:
        return np.zeros(0)
    pairs = zip(totals, problem.exact(thetas))
    return np.array(
        [np.linalg.norm(total - true) / np.linalg.norm(true) for total, true in pairs]
    )


def uses(group, first):
    """Return which ranks' messages entered this rank's sums after the first rounds."""
    if group is None:
        return {}
    seen = group.telemetry()
    these = seen.rounds > first
    return {
        "children": seen.children,
        "numbers": seen.rounds[these] - first,
        "used": seen.used[these],
    }


def main():
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    folder = pathlib.Path(job["folder"])
    board = np.memmap(folder / "board", np.int64, "r+")
    problems = {}
    for name, (kind, what) in job["problems"].items():
        if kind == "vectors":
            problems[name] = Vectors(*what)
        else:
            with open(what, "rb") as file:
                problems[name] = pickle.load(file)
    if job["trace"]:
        measure_trace(next(iter(problems.values())), job["trace"])
    cases = list(enumerate(job["cases"]))
    progress = tqdm(total=len(cases), disable=comm.rank != 0, unit="run")
    for scheme, these in itertools.groupby(cases, lambda case: case[1]["scheme"]):
        with opened(
            Scheme(**job["schemes"][scheme]), comm, job["patience"]
        ) as collective:
            prepared = None
            for number, case in these:
                progress.set_description(case["name"])
                if case["problem"] != prepared:
                    prepared = case["problem"]
                    collective.prepare(problems[prepared])
                slot = board[number : number + 1]
                run(case, collective, problems[prepared], slot, folder)
                progress.update()
    progress.close()


if __name__ == "__main__":
    main()
