"""Does the simulator predict the time of real jobs?

    .venv/bin/python benchmarks/simulate.py

The benchmark runs jobs on this machine, and simulates the same jobs with equal plans and equal delays: a straggler
model draws the same numbers for both. The network is measured, and nothing is fitted to
rounds. Its latency comes from messages there and back, and its bandwidth from a copy in
memory or from the link. Its overhead is the processor time for a small message while
all ranks send small messages. Computation is a sleep. Some jobs run on one host, where
computation dominates; others run on several hosts (network namespaces), where links
dominate. It compares the median time of a round, from result to result on the root,
without barriers, and checks the first and the last number of every sum. Then it times
the simulator for a million ranks. It prints a table and stores it, with a picture.

mpirun also runs this file (``--job``). Jobs on several hosts need Linux and root
privileges. Otherwise the benchmark skips them and prints why.
"""

import argparse
import csv
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

from jaxcoded import Coded, Shared, Strategy, make_plan
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate, stragglers

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
TOLERANCE = 0.15
# The rate of a link, and the bytes per second that it carries without the headers of TCP.
RATE, GOODPUT = "200mbit", 200e6 / 8 * 1448 / 1514


@dataclasses.dataclass(frozen=True)
class Setting:
    """A job. ``fanout`` 0: an uncoded all-reduce of MPI, simulated as a ring; ``work_shared``: whether work is shared."""

    fanout: int
    s: int
    model: str
    kilobytes: int
    work: float  # seconds for the whole batch by one rank
    m: int = 1
    work_shared: str = ""

    def __str__(self):
        if self.work_shared:
            shape = self.work_shared
        elif self.fanout:
            shape = f"fan-out {self.fanout}, s = {self.s}"
        else:
            shape = "Allreduce"
        size = (
            f"{self.kilobytes} KB"
            if self.kilobytes < 1000
            else f"{self.kilobytes // 1000} MB"
        )
        return f"{shape}, {self.model}, {size}"

    def plan(self, size):
        if self.work_shared:
            return make_plan(size, Strategy.parse(self.work_shared))
        return make_plan(
            size, Coded(fanout=self.fanout, stragglers=self.s, slices=self.m)
        )

    def layout(self, size):
        return Layout.of(self.plan(size)) if self.fanout else Ring(size)


def shared(replicas, blocks):
    """Return a setting with shared work and a root that computes nothing."""
    return repr(Shared(replicas=replicas, blocks=blocks, root_computes=False))


# (hosts, ranks) and their jobs; one host is this machine itself.
SETTINGS = {
    (1, 13): [
        Setting(3, 0, "none", 4, 0.6),
        Setting(3, 1, "none", 4, 0.6),
        Setting(3, 0, "exponential(work=0.5)", 4, 0.6),
        Setting(3, 1, "exponential(work=0.5)", 4, 0.6),
        Setting(3, 0, "pareto(shape=1.5, scale=0.2)", 4, 0.6),
        Setting(3, 1, "pareto(shape=1.5, scale=0.2)", 1000, 0.6),
        Setting(3, 0, "fixed(factor=4)", 4, 0.6),
        Setting(3, 1, "fixed(factor=4)", 1000, 0.6),
        Setting(12, 2, "bursty(begin=0.05, end=0.2, factor=4)", 4, 0.6),
        Setting(0, 0, "exponential(work=0.5)", 4, 0.6),
        *(
            Setting(12, 0, model, 4, work, work_shared=shared(r, blocks))
            for work, blocks in ((1.44, 12), (0.36, 6))
            for model, r in (
                ("none", 3),
                ("exponential(work=0.5)", 3),
                ("exponential(work=0.5)", 11),
                ("pareto(shape=1.5, scale=0.2)", 3),
                ("fixed(factor=10)", 3),
                ("bursty(begin=0.02, end=0.2, factor=5)", 3),
            )
        ),
    ],
    (1, 7): [
        Setting(2, 1, "exponential(seconds=0.05)", 4, 0.1),
        Setting(6, 2, "pareto(shape=1.2, scale=0.3)", 1000, 0.3),
    ],
    (4, 4): [
        Setting(3, 0, "none", 4000, 0.0),
        Setting(3, 1, "none", 4000, 0.0),
        Setting(3, 1, "exponential(work=1)", 1000, 0.3),
        Setting(3, 1, "none", 20000, 0.0),
    ],
    (13, 13): [
        Setting(3, 0, "none", 2000, 0.0),
        Setting(3, 1, "none", 2000, 0.0),
        Setting(12, 0, "none", 1000, 0.0),
        Setting(3, 1, "exponential(work=0.5)", 1000, 2.0),
        Setting(12, 1, "pareto(shape=1.5, scale=0.2)", 400, 2.0),
        Setting(12, 0, "none", 2000, 0.0),
        Setting(12, 1, "none", 2000, 0.0),
        Setting(12, 1, "fixed(factor=4)", 2000, 2.0),
    ],
}
SMOKE = {
    (1, 4): [
        Setting(3, 0, "none", 4, 0.06),
        Setting(3, 1, "fixed(factor=3)", 4, 0.06),
        Setting(0, 0, "none", 4, 0.06),
        Setting(3, 0, "fixed", 4, 0.06, work_shared=shared(1, 4)),
    ]
}


def run_job(settings, rounds, out):
    """Run the rounds of each setting on this rank; the root stores when they ended."""
    from mpi4py import MPI

    import jaxcoded
    from jaxcoded.transport.agreement import wait

    comm = MPI.COMM_WORLD
    stored = {"latency": latency(comm), "overhead": overhead(comm), "ends": []}
    for setting in settings:
        size = setting.kilobytes * 250
        delays = stragglers.named(setting.model).rounds(comm.size)
        group = None
        if setting.fanout:
            group = jaxcoded.CodedGroup(comm, setting.plan(comm.size))
            part = group.batch(10_000)
            # an example's gradient has the example's number in all places
            own = np.full(size, part.weights @ part.indices / 10_000, np.float32)
            load, expected = float(group.plan.load_of(comm.rank)), 9999 / 2
            total = jaxcoded.host.allreduce(own, group, part.weights)
        else:
            own = np.ones(size, np.float32)
            load, expected, total = 1 / comm.size, comm.size, np.empty_like(own)
        shares = Shares(group, size) if setting.work_shared else None
        wait(comm.Ibarrier())
        start, ends = time.perf_counter(), []
        for _ in range(rounds):
            delay = next(delays).time(setting.work * load)[comm.rank]
            if shares:
                shares.compute(delay, out=total)
                ends.append(time.perf_counter() - start)
                np.testing.assert_allclose(total[[0, -1]], expected, rtol=1e-4)
                continue
            late = group is not None and group.lag() > 0
            if not late:
                time.sleep(delay)
            if group is None:
                comm.Allreduce(own, total)
            else:
                jaxcoded.host.allreduce(own, group, part.weights, out=total, skip=late)
            ends.append(time.perf_counter() - start)
            np.testing.assert_allclose(total[[0, -1]], expected, rtol=1e-4)
        wait(comm.Ibarrier())
        stored["ends"].append(ends)
        if group is not None:
            group.close()
    if comm.rank == 0:
        pathlib.Path(out).write_text(json.dumps(stored))


class Shares:
    """A rank that takes part in rounds with shared work."""

    def __init__(self, group, size, batch_size=10_000):
        self.group, self.size, self.batch_size = group, size, batch_size
        self.own = max(batch_size * float(group.plan.load_of(group.rank)), 1.0)

    def compute(self, seconds, out):
        """Do a round in which this rank takes ``seconds`` for its own part."""
        import jaxcoded

        own, overslept = np.zeros(self.size, np.float32), 0.0
        with self.group.blocks(self.batch_size) as blocks:
            for block in blocks:
                part = len(block.indices) / self.own
                # a sleep lasts too long; a rank must not lose this time with every
                # piece
                until = time.perf_counter() + seconds * part - overslept
                time.sleep(max(0.0, until - time.perf_counter()))
                overslept = time.perf_counter() - until
                own += block.indices.sum() / self.batch_size
        jaxcoded.host.allreduce(own, self.group, out=out)


def latency(comm, times=100):
    """Return the seconds of a small message between the first and the last rank; the
    other ranks sleep.
    """
    from jaxcoded.tools.planner.measuring import answer_pings, end_pings, ping
    from jaxcoded.transport.agreement import wait

    note, last = np.zeros(1, np.uint8), comm.size - 1
    taken = 0.0
    if comm.rank == 0:
        taken = float(np.median([ping(comm, last, note) / 2 for _ in range(times)]))
        end_pings(comm, last)
    elif comm.rank == last:
        answer_pings(comm, 0)
    wait(comm.Ibarrier())
    return taken


def overhead(comm, count=1000, times=5):
    """Return the processor seconds to send or receive a small message, while every rank sends small messages to the
    next rank.
    """
    from mpi4py import MPI

    from jaxcoded.transport.agreement import wait

    received, note = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    taken = []
    for _ in range(times):
        wait(comm.Ibarrier())
        start = time.perf_counter()
        requests = [comm.Irecv(received, before) for _ in range(count)]
        requests += [comm.Isend(note, after) for _ in range(count)]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-3)  # other ranks need this core
        taken.append((time.perf_counter() - start) / (2 * count))
    return float(np.median(taken))


def copying():
    """Return the bytes per second of a copy in memory by one core."""
    source, target = np.ones(2**24, np.uint8), np.empty(2**24, np.uint8)
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return len(source) / float(np.median(taken[1:]))


def real(hosts, ranks, settings, rounds, directory, limit):
    """Run the job of these settings; return its stored results."""
    out = directory / f"ends-{hosts}-{ranks}.json"
    command = [sys.executable, "-m", "mpi4py", __file__, "--job", str(out)]
    command += ["--settings", json.dumps([dataclasses.astuple(s) for s in settings])]
    command += ["--rounds", str(rounds)]
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    chosen = {"JAXCODED_MPIRUN": str(beside)} if beside.exists() else {}
    if hosts == 1:
        command = [sys.executable, ROOT / "scripts/mpirun", "-n", str(ranks), *command]
    else:
        count = ("--hosts", str(hosts), "--rate", RATE, "--limit", str(limit))
        command = [sys.executable, ROOT / "scripts/on_hosts.py", *count, "--", *command]
    environment = {"JAXCODED_MPIRUN_TIMEOUT": str(limit), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env=os.environ | environment | chosen,
        check=False,
        timeout=limit + 60,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def network_of(hosts, measured):
    """Return the measured links, for the simulator."""
    costs = {name: measured[name] for name in ("latency", "overhead")}
    if hosts > 1:
        # a link is throttled where it begins; two cores handle arriving messages
        return Network(
            **costs,
            bandwidth=copying() / hosts,
            send_bandwidth=GOODPUT,
        )
    # ranks read each other's memory, and two cores share the copying
    return Network(**costs, bandwidth=copying() / 2, trips=1)


def compare(places, rounds, limit, progress):
    """Return rows: hosts, ranks, setting, real and simulated median seconds."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for (hosts, ranks), settings in places.items():
            if hosts > 1 and (why := no_hosts(hosts)):
                print(f"{hosts} hosts are left out: {why}")
                continue
            stored = real(
                hosts, ranks, settings, rounds, pathlib.Path(directory), limit
            )
            network = network_of(hosts, stored)
            for setting, ends in zip(settings, stored["ends"]):
                out = simulate(
                    setting.layout(ranks),
                    network,
                    payload=setting.kilobytes * 1000,
                    work=setting.work,
                    stragglers=stragglers.named(setting.model),
                    rounds=rounds,
                )
                times = np.median(np.diff(ends)), np.median(out.seconds[1:])
                rows.append((hosts, ranks, str(setting), *map(float, times)))
                progress.update()
    return rows


def no_hosts(count):
    """Return why this machine cannot simulate hosts; empty if it can."""
    import on_hosts

    try:
        with on_hosts.network(count, RATE):
            return ""
    except on_hosts.Unavailable as reason:
        return str(reason)


def million(size, rounds):
    """Simulate a million ranks. Return the seconds, and the largest memory of this process in bytes."""
    start = time.perf_counter()
    layout = Layout.balanced(size, 100, 1)
    simulate(
        layout,
        Network(),
        payload=4e6,
        work=0.1 * size,
        stragglers=stragglers.Pareto(),
        rounds=rounds,
    )
    taken = time.perf_counter() - start
    return taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw(rows, path):
    from jaxcoded.tools.report.pictures import COLOURS, MARKERS, picture

    with picture(path, size=(4.8, 4.6)) as (_, axes):
        times = [time * 1e3 for row in rows for time in row[3:]]
        line = np.geomspace(min(times) / 1.5, max(times) * 1.5, 50)
        axes.fill_between(
            line,
            line * (1 - TOLERANCE),
            line * (1 + TOLERANCE),
            color="0.9",
            label=f"within {TOLERANCE:.0%}",
        )
        axes.plot(line, line, color="0.6", linewidth=1)
        places = list(dict.fromkeys(row[:2] for row in rows))
        for number, (hosts, ranks) in enumerate(places):
            some = [row for row in rows if row[:2] == (hosts, ranks)]
            where = "1 host" if hosts == 1 else f"{hosts} hosts at 200 Mbit/s"
            axes.loglog(
                [row[3] * 1e3 for row in some],
                [row[4] * 1e3 for row in some],
                MARKERS[number],
                color=COLOURS[number],
                label=f"{ranks} ranks on {where}",
            )
        axes.set(
            xlabel="real median time of a round, ms",
            ylabel="simulated, ms",
            title="What jobs take, and what the simulator says",
            aspect="equal",
        )
        axes.legend()


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--only", default="", help="settings with this in their name")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return run_job([Setting(*s) for s in args.settings], args.rounds, args.job)
    from tqdm import tqdm

    places = {
        where: some
        for where, all_of_them in (SMOKE if args.smoke else SETTINGS).items()
        if (some := [setting for setting in all_of_them if args.only in str(setting)])
    }
    rounds = 12 if args.smoke else args.rounds
    with tqdm(total=sum(map(len, places.values())), desc="settings") as progress:
        rows = compare(places, rounds, 300, progress)
    print(
        f"{'hosts':>5} {'ranks':>5}  {'setting':60}{'real':>10}{'simulated':>11}  ratio"
    )
    for hosts, ranks, name, seconds, simulated in rows:
        print(
            f"{hosts:5} {ranks:5}  {name:60}{seconds * 1e3:7.1f} ms{simulated * 1e3:8.1f} ms"
            f"{simulated / seconds:7.2f}"
        )
    near = sum(abs(row[4] / row[3] - 1) <= TOLERANCE for row in rows)
    print(f"{near} of {len(rows)} settings are within {TOLERANCE:.0%}")
    size = 10_101 if args.smoke else 1_010_101
    taken, memory = million(size, 100)
    print(f"{size:,} ranks, 100 rounds: {taken:.1f} s, {memory / 1e9:.2f} GB")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "simulate.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hosts", "ranks", "setting", "seconds", "simulated"])
        writer.writerows(rows)
    draw(rows, args.out / "simulate.png")
    return None


if __name__ == "__main__":
    main()
