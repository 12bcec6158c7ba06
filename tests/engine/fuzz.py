"""Run random schedules of the engine's state machine for a given time.

    make fuzz MINUTES=10                                every test, seeds drawn
    python tests/engine/fuzz.py --minutes 10 --seed 7   the same schedules as last time with 7
    python tests/engine/fuzz.py --only test_late --replay 123 --most 4      one schedule again
    python tests/engine/fuzz.py --only schedules        those on ranks that are simulated in C++

Half of the runs play `schedules`, many at a time, on ranks that are simulated in C++ (`groups`, tests/nodes). The other
runs are this folder's seeded tests with new seeds. Messages arrive in any order that links allow. Ranks call, stop,
stay away, skip, leave and fail at any moment. If a schedule fails, crashes or does not end, the fuzzer searches for the
failure on smaller trees, and prints the command that replays it.
"""

import argparse
import collections
import importlib
import multiprocessing
import os
import pathlib
import random
import re
import secrets
import sys
import time
import traceback
from multiprocessing.connection import wait

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 120  # most processor seconds for one schedule
SMALLER = (2, 3, 4, 6, 9)  # ranks of the plans on which a failure is searched for
SMALLER_SECONDS = 20  # seconds for each of these numbers
OUTCOMES = ("", "calls done", "calls failed", "calls of ranks out of the history")
sys.path[:0] = [str(HERE), str(HERE.parent)]


def kinds():
    """Return the names of messages, in the engine's numbering."""
    header = HERE.parent.parent / "jaxcoded/transport/cpp/message.h"
    (listed,) = re.findall(
        r"enum class Kind[^{]*{(.*?)}", header.read_text(), re.DOTALL
    )
    return re.findall(r"^\s*(\w+),", listed, re.MULTILINE)


def tests(most, seen):
    """Return the tests that draw schedules from a seed, by name.

    Args:
        most: the most ranks that a plan may have.
        seen: a counter of events in the schedules.
    """
    import groups
    import simulation

    names = kinds()

    class Watched(simulation.World):
        def deliver(self, link):
            kind = self.queues[link][0][0]
            seen["message: " + (names[kind] if kind < len(names) else "nonsense")] += 1
            super().deliver(link)

        def submit(self, rank):
            seen["skipped calls"] += (
                rank,
                self.nodes[rank].next_round(),
            ) in self.skips
            seen["late calls"] += self.nodes[rank].lag() > 0
            seen["calls whose messages are compared"] += self.compares
            super().submit(rank)

        def extend(self, rank):
            seen["parts that follow"] += 1
            super().extend(rank)

        def check_end(self, rank):
            running = self.running[rank]
            super().check_end(rank)
            if running is not None and self.running[rank] is None:
                seen[OUTCOMES[self.ends[rank][running.round].outcome]] += 1

        def recover(self, rank):
            restored = len(self.restored[rank])
            moved = super().recover(rank)
            seen["returns by a snapshot"] += len(self.restored[rank]) - restored
            return moved

        def arrive(self, answer):
            seen["pieces that are sent" if answer[-1] else "pieces that are gone"] += 1
            super().arrive(answer)

        def leave(self, rank):
            seen["ranks that leave"] += 1
            super().leave(rank)

        def kill(self, rank, **how):
            seen["ranks that die"] += 1
            super().kill(rank, **how)

        def bury(self):
            before = len(self.dead)
            super().bury()
            seen["ranks that end"] += len(self.dead) - before

        def step(self, pace=None):
            seen["steps"] += 1
            seen["steps with stopped ranks"] += bool(self.frozen)
            seen["steps with ranks that stay away"] += bool(self.idle)
            super().step(pace)

    draw = simulation.random_plan

    largest = most

    def random_plan(rng, least=1, most=14, **more):
        return draw(rng, least, max(least, min(most, largest)), **more)

    # replaced before the test modules import them
    simulation.World, simulation.random_plan = Watched, random_plan
    out = {"schedules": lambda number: play(groups, number, largest, seen, names)}
    for path in sorted(HERE.glob("test_node_*.py")):
        module = importlib.import_module(path.stem)
        for name, test in vars(module).items():
            if hasattr(test, "hypothesis"):
                out[name] = test.hypothesis.inner_test
    return out


def play(groups, number, most, seen, names):
    """Play `groups.SCHEDULES` schedules on one group, and count what happens."""
    counted = collections.Counter()
    groups.play(number, most, counted)
    for event, times in counted.items():
        what, _, kind = event.partition("message: ")
        seen[f"message: {names[int(kind)]}" if kind else what] += times
    seen["schedules"] += groups.SCHEDULES


def asked_for(known, only):
    """Return the names of all tests, of a file's tests, or of one test. Half of all tests'
    names are "schedules".
    """
    if only:
        return [name for name, test in known.items() if only in (name, test.__module__)]
    return [*known, *["schedules"] * (len(known) - 2)]


def work(pipe, seed, only, most, replay):
    """Run schedules and report each, until the process is ended."""
    seen = collections.Counter()
    known = tests(most, seen)
    names = asked_for(known, only)
    rng = random.Random(seed)
    while True:
        name = rng.choice(names)
        number = rng.getrandbits(32) if replay is None else replay
        seen.clear()
        pipe.send(("begins", name, number))
        try:
            known[name](number)
        except BaseException:  # noqa: BLE001  # any exception is a finding
            pipe.send(("fails", name, number, traceback.format_exc()))
            return
        pipe.send(("ends", name, number, dict(+seen)))


class Finding(Exception):
    """A schedule that failed: the test's name, its seed, and what happened."""


def used(process):
    """Return the processor seconds that a process has used, which do not depend on the
    load.
    """
    stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Fuzzer:
    """Processes that run schedules.

    Args:
        seed: the seed from which the schedules' seeds are drawn.
        jobs: number of processes.
    """

    def __init__(self, seed, jobs, only=None, most=14, replay=None):
        context = multiprocessing.get_context("spawn")
        self.schedules = 0
        self.of_tests, self.times, self.schedules_with = (
            collections.Counter() for _ in range(3)
        )
        self._processes = {}
        for job in range(jobs):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, f"{seed}-{job}", only, most, replay)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = [process, ("nothing yet", None), 0.0]

    def run(self, seconds, progress=None):
        """Run schedules for ``seconds``; raise `Finding` when one fails."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for pipe in wait(list(self._processes), min(left, 1)):
                self._hear(pipe)
            for process, doing, since in self._processes.values():
                if used(process) - since > LIMIT:
                    words = f"has not ended after {LIMIT} s of a processor"
                    raise Finding(*doing, words)
            if progress is not None:
                progress.set_postfix(schedules=self.schedules, refresh=False)
                progress.update(min(seconds, seconds - left) - progress.n)

    def _hear(self, pipe):
        entry = self._processes[pipe]
        entry[2] = used(entry[0])
        try:
            what, name, number, *more = pipe.recv()
        except EOFError:
            entry[0].join()
            status = entry[0].exitcode
            raise Finding(*entry[1], f"ended its process, status {status}") from None
        entry[1] = name, number
        if what == "fails":
            raise Finding(name, number, more[0])
        if what == "ends":
            self.schedules += more[0].pop("schedules", 1)
            self.of_tests[name] += 1
            self.times.update(more[0])
            self.schedules_with.update(dict.fromkeys(more[0], 1))

    def close(self):
        for pipe, (process, _, _) in self._processes.items():
            process.kill()
            process.join()
            pipe.close()


def attempt(seconds, progress=None, **arguments):
    """Run a fuzzer with these arguments for ``seconds``; return its finding, if any,
    and the fuzzer."""
    fuzzer = Fuzzer(**arguments)
    try:
        fuzzer.run(seconds, progress)
    except Finding as finding:
        return finding.args, fuzzer
    finally:
        fuzzer.close()
    return None, fuzzer


def report(finding, most, jobs):
    """Print a finding, on the smallest tree on which it occurs again."""
    name, number, words = finding
    print(f"\n{name}({number}): {words}", file=sys.stderr, flush=True)
    for ranks in SMALLER:
        if ranks >= most:
            break
        print(f"looking for it on {ranks} ranks at most", file=sys.stderr, flush=True)
        smaller, _ = attempt(
            SMALLER_SECONDS, seed=number, jobs=jobs, only=name, most=ranks
        )
        if smaller:
            most, (name, number, words) = ranks, smaller
            print(f"\n{name}({number}): {words}", file=sys.stderr)
            break
    print(
        f"\nTo run it again:\n    {sys.executable} tests/engine/fuzz.py "
        f"--only {name} --most {most} --replay {number}",
        file=sys.stderr,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help="the name of a test, or of a file of them")
    parser.add_argument("--most", type=int, default=14, help="ranks of a plan")
    parser.add_argument("--replay", type=int, help="the seed of one schedule")
    given = parser.parse_args()
    known = tests(given.most, collections.Counter())
    if not asked_for(known, given.only):
        parser.error(f"no test draws schedules from a seed in --only {given.only}")
    if given.replay is not None:
        if given.only not in known:
            parser.error("--replay needs the name of a test: --only")
        known[given.only](given.replay)
        return

    from tqdm import tqdm

    print(f"seed {given.seed}", flush=True)
    seconds = 60 * given.minutes
    fuzzing = {"jobs": given.jobs, "only": given.only, "most": given.most}
    form = "{percentage:3.0f}% |{bar}| {n:.0f} of {total:.0f} s{postfix}"
    with tqdm(total=seconds, bar_format=form, mininterval=1) as progress:
        finding, fuzzer = attempt(seconds, progress, seed=given.seed, **fuzzing)
    rate = fuzzer.schedules / seconds
    print(
        f"{fuzzer.schedules:,} schedules, {rate:.1f} in a second; in so many of them:"
    )
    for what, count in sorted(fuzzer.schedules_with.items()):
        print(f"{count:10,}  {what} ({fuzzer.times[what]:,})")
    for name, count in sorted(fuzzer.of_tests.items()):
        print(f"{count:10,}  {name}")
    if finding:
        report(finding, given.most, given.jobs)
        sys.exit(1)


if __name__ == "__main__":
    main()
