"""How long does a step of training take, coded and uncoded, when some ranks straggle?

    .venv/bin/python benchmarks/training.py
    .venv/bin/python benchmarks/training.py --ranks 85 --fanout 4 --stragglers 1
    .venv/bin/python benchmarks/training.py --hosts 13 --rate 200mbit

The benchmark starts its ranks itself. Rank 0 is the root, without data; all other ranks
are workers. Each scheme gets the same time under each straggler model of
`jaxcoded.tools.simulator.stragglers`. It runs whole rounds, timed from result to
result, without a barrier.

**Compute model.** Every rank computes the true gradient of its examples (numpy, one
thread). The time for it is modelled, since all ranks share a few cores, as
``seconds of an example · examples · factor + seconds``. The straggler model gives ``factor`` and ``seconds``. After the
real computation the rank sleeps for the rest. So a code with twice as many examples per rank pays twice the time, and
waiting ranks take no core from other ranks. A rank that is behind skips its gradient.
SIGSTOP and SIGKILL are real, and so is the time of communication.

The benchmark compares every round's sum with the gradient over all examples. It prints
a table and a verdict, and stores them with pictures.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time

import datasets
import numpy as np
import training_report as report
from schemes import PATIENCE, SCHEMES

from jaxcoded.tools.simulator.stragglers import named

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import on_hosts

RANKS = pathlib.Path(__file__).with_name("training_ranks.py")
# By the names of `jaxcoded.tools.simulator.stragglers.MODELS`; the arguments differ
# from the defaults.
MODELS = {
    "none": "none()",
    "exponential": "exponential(work=0.5)",
    "pareto": "pareto(shape=1.5, scale=0.2)",
    "fixed": "fixed(factor=10.0)",
    "bursty": "bursty(begin=0.02, end=0.2, factor=5.0)",
    "trace": "trace(path={trace!r})",
    "stopped": "stopped(round=5, seconds=0.5, every=10)",
    "killed": "killed(round=3)",
}
PARTS = ("models", "mixture", "killed", "tandon")
RANK_BYTES = 150 << 20  # memory of a rank that computes no gradients
NAIVE = 0.03  # seconds of a rank's work without a code
# Delays that do not depend on the load; the scale of the delays is fitted to the published figure.
TANDON = "exponential(work=0.0, seconds=0.075)"
TANDON_NAIVE = 0.01


@dataclasses.dataclass
class Job:
    """The runs of one ``mpirun``."""

    ranks: int
    problems: dict  # problems of `datasets`, by name
    cases: list
    schemes: dict
    trace: str = ""
    patience: float = PATIENCE

    def seconds(self):
        """Return the job's time limit, with time for starting ranks, compiling schemes, and long last rounds."""
        runs = sum(2 * case["seconds"] + 8 for case in self.cases)
        return 60 + self.ranks * 2 + runs


def case(problem, scheme, model, text, work, seconds, workers, examples, **more):
    """Return the description of one run."""
    return {
        "name": f"{problem}-{model}-{scheme}".replace(" ", "_"),
        "problem": problem,
        "scheme": scheme,
        "model": text,
        "model_name": model,
        "an_example": work * workers / examples,
        "seconds": seconds,
        "rounds": 1000,
        "least": 2,
        "warm_up": True,
    } | more


@contextlib.contextmanager
def on_this_host(job, folder):
    """Return a function that makes the command to start ranks, and its environment."""
    settings = {
        "JAXCODED_MPIRUN_TIMEOUT": str(job.seconds()),
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    if on_hosts.BESIDE.exists():
        settings["JAXCODED_MPIRUN"] = str(on_hosts.BESIDE)
    # without fault tolerance mpirun ends the job after a rank is killed
    killed = any(case["model_name"] == "killed" for case in job.cases)
    tolerant = ("--with-ft", "ulfm") if killed else ()

    def start(*command):
        ranks = on_hosts.MPIRUN, *tolerant, "-n", job.ranks
        first = sys.executable, *ranks, sys.executable
        return list(map(str, [*first, *command]))

    yield start, os.environ | settings


@contextlib.contextmanager
def on_several_hosts(rate, job, folder):
    """Return the same as `on_this_host`, for one rank on each host of ``scripts/on_hosts.py``."""
    with on_hosts.network(job.ranks, rate, both_ways=True) as names:
        settings = {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        environment = on_hosts.environment(job.seconds()) | settings

        def start(*command):
            return on_hosts.job(names, folder, job.ranks, sys.executable, *command)

        yield start, environment


def goes_on_without_the_dead():
    """Return whether this MPI has User Level Failure Mitigation."""
    settings = on_hosts.environment(60)
    version = on_hosts.run(on_hosts.MPIRUN, "--version", check=False, env=settings)
    return re.search(r"Open MPI\S* [5-9]\.", version.stdout) is not None


def carried_out(job, place=on_this_host):
    """Run a job; return the arrays of its ranks by case and rank."""
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        described = {}
        for name, problem in job.problems.items():
            if isinstance(problem, datasets.Vectors):
                described[name] = "vectors", (problem.features, problem.examples)
            else:
                described[name] = "stored", str(folder / f"{name}.pickle")
                (folder / f"{name}.pickle").write_bytes(pickle.dumps(problem))
        text = {
            "folder": directory,
            "problems": described,
            "cases": job.cases,
            "schemes": {k: dataclasses.asdict(v) for k, v in job.schemes.items()},
            "trace": job.trace,
            "patience": job.patience,
        }
        (folder / "job.json").write_text(json.dumps(text))
        np.zeros(len(job.cases), np.int64).tofile(folder / "board")
        with place(job, folder) as (start, environment):
            command = ["-m", "mpi4py", str(RANKS), str(folder / "job.json")]
            run_until_written(start(*command), environment, job, folder)
        return {case["name"]: read(folder, case, job.ranks) for case in job.cases}


def expected(job, folder):
    """Return the files that the job's ranks write."""
    for case in job.cases:
        dead = job.ranks - 1 if case["model_name"] == "killed" else None
        for rank in range(job.ranks):
            if rank != dead:
                yield folder / f"{case['name']}-{rank}.npz"


def run_until_written(command, environment, job, folder):
    """Start the ranks and wait. With dead ranks MPI may never end, so the job counts as over when the other ranks have
    written their results.
    """
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    killed = any(case["model_name"] == "killed" for case in job.cases)
    try:
        if killed:
            while process.poll() is None:
                if all(path.exists() for path in expected(job, folder)):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(job.patience + 3)
                    break
                time.sleep(0.1)
        else:
            process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # scripts/mpirun ends all ranks
            process.wait()
    missing = [path.name for path in expected(job, folder) if not path.exists()]
    if missing:
        raise SystemExit(
            f"the ranks ended with status {process.returncode} and without {missing[0]}"
        )


def read(folder, case, ranks):
    out = {}
    for rank in range(ranks):
        path = folder / f"{case['name']}-{rank}.npz"
        if path.exists():
            with np.load(path) as file:
                out[rank] = dict(file)
    return out


def schemes_for(fanout=None, stragglers=None, size=None):
    """Return `SCHEMES` with trees of this fan-out, and star codes that lose the same fraction of all workers as a
    parent loses of its children.
    """
    if fanout is None:
        return SCHEMES
    out = dict(SCHEMES)
    for name, scheme in SCHEMES.items():
        if scheme.fanout and scheme.slices == 1:
            out[name] = dataclasses.replace(
                scheme,
                fanout=fanout,
                stragglers=stragglers * (name == "coded_reduce"),
            )
    workers = size - 1
    most = workers * stragglers // fanout
    # S = αN, or the largest smaller S that fractional repetition has
    resilient = max(s for s in range(most + 1) if workers % (s + 1) == 0)
    out["frc"] = dataclasses.replace(
        SCHEMES["frc"],
        label=f"GC star, S = {resilient}",
        stragglers=resilient,
    )
    return out


def one_host(args):
    """Run all schemes under all models, on real data."""
    ranks = 7 if args.smoke else 13
    seconds = args.seconds or (0.3 if args.smoke else 2.0)
    examples, features = (240, 300) if args.smoke else (6552, 5000)
    real = datasets.load("real", args.data, examples, features)
    print(f"{real.name}: {real.examples:,} examples; {ranks - 1} workers", flush=True)
    trace = str((args.out / "trace.csv").resolve())
    models = {name: MODELS[name].format(trace=trace) for name in args.models}
    if args.trace:
        models["trace"] = MODELS["trace"].format(trace=str(args.trace.resolve()))
    results, cases, problems = {}, [], {"real": real}

    def new(problem, scheme, model, text, work=NAIVE, workers=ranks - 1):
        return case(
            *(problem, scheme, model, text, work, seconds, workers),
            problems[problem].examples,
        )

    living = {name: text for name, text in models.items() if name != "killed"}
    for scheme in args.schemes:
        if "models" in args.only:
            cases += [new("real", scheme, *model) for model in living.items()]
        if "mixture" in args.only and scheme in report.DRAWN:
            if "mixture" not in problems:
                problems["mixture"] = datasets.load("mixture", None, examples, features)
            cases.append(new("mixture", scheme, "bursty", MODELS["bursty"]))
    if cases:
        measure = trace if "trace" in models and not args.trace else ""
        job = Job(ranks, problems, cases, SCHEMES, measure)
        results |= carried_out(job)
    killing = "killed" in models and "killed" in args.only
    if killing and not goes_on_without_the_dead():
        print("killed: left out, since this MPI ends a job in which a rank dies")
        killing = False
    if killing:
        for scheme in args.schemes:
            if SCHEMES[scheme].survives:
                killed = [new("real", scheme, "killed", models["killed"])]
                job = Job(ranks, {"real": real}, killed, SCHEMES, patience=2.0)
                results |= carried_out(job)
                cases += killed
    runs = report.runs(cases, results, problems, SCHEMES, ranks)
    if killing:
        runs += report.that_do_not_end(args.schemes, SCHEMES)
    report.one_host(runs, args.out, NAIVE)
    if "tandon" in args.only:
        tandon(args, real, seconds)


def tandon(args, real, seconds):
    """Run 10 workers with s = 1, as in the figure of Tandon et al. 2017."""
    ranks = 7 if args.smoke else 11
    chosen = [name for name in report.PUBLISHED if name in args.schemes]
    cases = [
        case(
            *("tandon", scheme, "exponential", TANDON, TANDON_NAIVE, 2 * seconds),
            *(ranks - 1, real.examples),
        )
        for scheme in chosen
    ]
    if cases:
        results = carried_out(Job(ranks, {"tandon": real}, cases, SCHEMES))
        runs = report.runs(cases, results, {"tandon": real}, SCHEMES, ranks)
        report.tandon(runs, args.out, ranks - 1)


def available():
    """Return the available memory in bytes."""
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable: +(\d+) kB", text)[1]) * 1024


def many_ranks(args):
    """Run the setting of CodedReduce on ranks that compute no gradients."""
    needed, free = args.ranks * RANK_BYTES, available()
    if needed > free:
        raise SystemExit(
            f"{args.ranks} ranks need about {needed / 2**30:.0f} GiB of memory, but "
            f"{free / 2**30:.0f} GiB are available: take fewer --ranks"
        )
    seconds = args.seconds or (0.3 if args.smoke else 5.0)
    schemes = schemes_for(args.fanout, args.stragglers, args.ranks)
    problem = datasets.Vectors(5000, 40 * (args.ranks - 1))
    chosen = [
        name
        for name in ("naive", "ring", "tree", "frc", "coded_reduce")
        if name in args.schemes
    ]
    cases = [
        case(
            *("vectors", scheme, model, MODELS[model], NAIVE, seconds),
            *(args.ranks - 1, problem.examples),
            rounds=args.rounds,
        )
        for scheme in chosen
        for model in ("none", "fixed", "bursty")
        if model in args.models
    ]
    results = carried_out(Job(args.ranks, {"vectors": problem}, cases, schemes))
    runs = report.runs(cases, results, {"vectors": problem}, schemes, args.ranks)
    report.many_ranks(runs, args.out, args.ranks, args.fanout)


def several_hosts(args):
    """Run on several hosts, whose links are the bottleneck."""
    sizes = [1_000, 20_000] if args.smoke else args.sizes
    seconds = args.seconds or (0.3 if args.smoke else 2.0)
    workers, examples = args.hosts - 1, 40 * (args.hosts - 1)
    problems = {str(size): datasets.Vectors(size, examples) for size in sizes}
    chosen = [
        name
        for name in ("naive", "frc", "ring", "tree", "coded_reduce", "allreduce")
        if name in args.schemes
        and (name != "allreduce" or len(args.schemes) < len(SCHEMES))
    ]
    cases = [
        case(
            *(size, scheme, model, MODELS[model], NAIVE, seconds, workers, examples),
            rounds=args.rounds,
            least=1 if int(size) > 1_000_000 else 2,
            warm_up=size == str(sizes[0]) or scheme == "allreduce",
        )
        for scheme in chosen
        for size in problems
        for model in ("none", "fixed")
        if model in args.models
    ]
    job = Job(args.hosts, problems, cases, SCHEMES)
    place = functools.partial(on_several_hosts, args.rate)
    try:
        results = carried_out(job, place)
    except on_hosts.Unavailable as reason:
        raise SystemExit(f"several hosts: {reason}") from None
    runs = report.runs(cases, results, problems, SCHEMES, args.hosts)
    report.several_hosts(runs, args.out, args.hosts, args.rate)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__ and __doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = functools.partial(parser.add_argument, type=lambda text: text.split(","))

    def numbers(text):
        return [int(size) for size in text.split(",")]

    names("--models", default=list(MODELS), help="straggler models, with commas")
    names("--schemes", default=list(SCHEMES), help="with commas")
    names("--only", default=list(PARTS), help="parts of the run on one host")
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks on this host, which compute no gradients",
    )
    parser.add_argument("--fanout", type=int, default=4, help="with --ranks")
    parser.add_argument("--stragglers", type=int, default=1, help="with --ranks")
    parser.add_argument("--hosts", type=int, help="so many hosts with a rank each")
    parser.add_argument("--rate", default="200mbit", help="with --hosts, both ways")
    sizes = [5_000, 50_000, 500_000, 5_000_000]
    names("--sizes", type=numbers, default=sizes, help="of gradients, with --hosts")
    parser.add_argument("--rounds", type=int, default=30, help="at most, of these two")
    parser.add_argument("--seconds", type=float, help="for each scheme and model")
    parser.add_argument("--data", type=pathlib.Path, help="folder of the real data")
    parser.add_argument("--trace", type=pathlib.Path, help="default: measured here")
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks/training")
    args = parser.parse_args()
    for what, known in (("models", MODELS), ("schemes", SCHEMES), ("only", PARTS)):
        if unknown := set(getattr(args, what)) - set(known):
            parser.error(f"--{what} has {min(unknown)!r}; there are {', '.join(known)}")
    for name, text in MODELS.items():
        if name != "trace":
            named(text)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if args.hosts:
        several_hosts(args)
    elif args.ranks:
        many_ranks(args)
    else:
        one_host(args)
    print(f"took {time.monotonic() - start:.0f} s; pictures and tables: {args.out}")


if __name__ == "__main__":
    main()
