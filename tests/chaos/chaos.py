"""Play schedules of faults on real processes, under Open MPI's fault-tolerant MPI.

    make chaos SEEDS=500                                  500 schedules, random seeds
    make chaos MINUTES=10                                 as many as 10 minutes allow
    python tests/chaos/chaos.py --seeds 20 --first 1000   seeds 1000 to 1019
    python tests/chaos/chaos.py --replay 1003 --ranks 9   one schedule alone
    python tests/chaos/chaos.py --minutes 5 --hosts 4     on 4 hosts of on_hosts.py

One of ten jobs runs on three hosts if this machine can make them; `--hosts` sets
another number.

A job plays one schedule after the other on the ranks that are left. This program is the job's conductor. It continues
ranks that stop themselves, kills ranks that hang by their schedule, and detects other hangs. At the end it compares the
ranks' results and looks for processes and files that are left.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "scripts")]

import compiled
import launch
import on_hosts
from board import Board
from schedule import FEWEST, MOST, Schedule, schedule

from jaxcoded.tools.launch import launcher
from jaxcoded.tools.launch.rank import TAKES_IN

OF_A_JOB = 16  # schedules of a job
HOSTS, OF_JOBS = 3, 10  # one of 10 jobs runs on 3 hosts
LOOK = 0.02  # seconds between two looks at the board
# Seconds on an idle machine without progress, after which ranks hang; `extended` may wait for 30 s
# (`joining.opening_seconds`) until it gives up
HANGS = 45.0
STARTS = 60.0  # seconds within which a job starts
ENDS = 20.0  # seconds within which processes end after the last schedule
ASKED = 1.0  # seconds within which ranks write their stacks
LINES = 60  # lines of the ranks' output that are shown with a finding


@dataclasses.dataclass(eq=False)
class Finding(Exception):
    """A fault that the conductor has found.

    Attributes:
        what: the fault in words.
        schedule: the schedule in which it was found, if any.
        said: the ranks' output.
        job: the seeds, ranks and hosts of the job that found it, if any.
    """

    what: str
    schedule: Schedule | None
    said: str = ""
    job: tuple[list[int], int, int] | None = None

    def __str__(self) -> str:
        seeds, ranks, hosts = self.job or ([], 0, 0)
        if self.schedule is not None:
            drawn = self.schedule
            again = f"--replay {drawn.seed} --ranks {drawn.ranks}"
        elif seeds:  # the fault belongs to no single schedule
            again = f"--first {seeds[0]} --seeds {len(seeds)} --ranks {ranks}"
        else:
            return f"{self.what}\n{self.said}"
        return (
            f"{self.what}\n{self.schedule or ''}\n{self.said}\nTo run it again:\n    "
            f"{sys.executable} tests/chaos/chaos.py {again} --hosts {hosts}"
        )


def arranged(seeds: list[int], ranks: int, *, hosts: bool = False) -> list[Schedule]:
    """Return the schedules of these seeds that a job of ``ranks`` ranks plays;
    ``hosts``: see `schedule`.
    """
    out: list[Schedule] = []
    for seed in seeds[:OF_A_JOB]:
        if ranks < FEWEST:
            break
        out.append(schedule(seed, ranks, hosts=hosts))
        ranks = out[-1].survivors
    return out


class Job:
    """A job whose ranks play schedules.

    Args:
        schedules: the schedules, in order.
        hosts: hosts of `on_hosts`; none: this machine itself.
    """

    def __init__(self, schedules: list[Schedule], hosts: Sequence[str] = ()) -> None:
        self._schedules = schedules
        self._ranks = schedules[0].ranks
        self._hosts = hosts
        self._cut: set[int] = set()  # numbers of hosts, from 1
        self._slowness = launch.slowness()
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
        self._temporary = self._directory / "tmp"
        self._temporary.mkdir()
        processes = self._ranks + sum(drawn.joining for drawn in schedules)
        self._board = Board(self._directory / "board", processes)
        self._name = f"JAXCODED_JOB=chaos.{os.getpid()}.{time.time_ns()}"
        (self._directory / "schedules").write_bytes(pickle.dumps(schedules))
        self._said = self._directory / "said"
        self._looked_at: set[int] = set()  # processes
        # files of /dev/shm that the processes have mapped
        self._shared: set[str] = set()
        self.ended_late = False  # whether the launcher ended too late

    def play(self) -> None:
        """Run the job, and raise `Finding` for a fault."""
        environment = launch.limited(0)
        # scripts/mpirun must not clean up: see `_look_around`
        del environment["JAXCODED_MPIRUN_TIMEOUT"]
        key, _, value = self._name.partition("=")
        environment |= {
            key: value,
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": str(launch.ROOT),
            TAKES_IN: "1",
            **launcher.TAKES_IN,
        }
        if self._hosts:
            environment["PRTE_MCA_prte_if_include"] = on_hosts.NETWORK
        with self._said.open("wb") as file:
            job = subprocess.Popen(
                self._command(),
                stdout=file,
                stderr=file,
                env=environment,
                cwd=launch.ROOT,
                start_new_session=True,
            )
        try:
            self._watch(job)
            self._compare()
            self._look_around()
        finally:
            self._end(job)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _command(self) -> list[str]:
        tolerant = ["--with-ft", "ulfm"]
        program = [sys.executable, str(HERE / "play.py"), str(self._directory)]
        if self._hosts:
            where = self._hosts, self._directory
            return on_hosts.job(*where, self._ranks, *program, options=tolerant)
        mpirun = str(launch.ROOT / "scripts" / "mpirun")
        return [mpirun, *tolerant, "-n", str(self._ranks), *program]

    # While it runs.

    def _watch(self, job: "subprocess.Popen[bytes]") -> None:
        since = time.monotonic()
        ends_at = float("inf")
        while job.poll() is None:
            time.sleep(LOOK)
            rows, now = self._board.rows, time.monotonic()
            for pid in set(rows["pid"][rows["schedule"] > 0]) - self._looked_at:
                self._looked_at.add(pid)
                self._shared |= _mapped(pid)
            here = [rank for rank in range(len(rows)) if self._lives(rank)]
            started = bool(rows["pid"][: self._ranks].all())
            for rank in here:
                self._help(rank, now)
            self._cut_and_mend(now)
            if rows["failed"].any():
                self._fail("a rank has found something wrong", here)
            if started and not here:
                # only MPI's launcher is left
                ends_at = min(ends_at, now + ENDS * self._slowness)
                if now > ends_at:
                    self.ended_late = True
                    return
                continue
            last = max(since, rows["progress"][here].max(initial=0.0))
            if now - last > (HANGS if started else STARTS) * self._slowness:
                self._fail("no rank has come on", here)
            behind = [
                rank
                for rank in here
                if started
                and not rows["wake"][rank]
                and not rows["kill"][rank]
                and now - max(since, rows["progress"][rank])
                > 2 * HANGS * self._slowness
            ]
            if behind:
                self._fail(f"ranks {behind} have not come on", here)
        if job.returncode:
            self._fail(f"the job has ended with status {job.returncode}", [])

    def _lives(self, rank: int) -> bool:
        pid = int(self._board.rows["pid"][rank])
        return bool(pid) and _state(pid) not in ("", "Z", "X")

    def _help(self, rank: int, now: float) -> None:
        """Continue or kill a rank whose board asks for it now."""
        row = self._board.rows[rank]
        pid = int(row["pid"])
        with contextlib.suppress(ProcessLookupError):
            if 0 < row["wake"] <= now and _state(pid) == "T":
                row["wake"] = 0
                os.kill(pid, signal.SIGCONT)
            if 0 < row["kill"] <= now:
                os.kill(pid, signal.SIGKILL)

    def _cut_and_mend(self, now: float) -> None:
        rows = self._board.rows
        for number, name in enumerate(self._hosts, 1):
            cut = bool((rows["cut"][rows["host"] == number] > now).any())
            if cut != (number in self._cut):
                on_hosts.cable(name, whole=not cut)
                self._cut ^= {number}

    def _fail(self, what: str, here: list[int]) -> None:
        playing = int(self._board.rows["schedule"].max())
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for rank in here:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self._board.rows["pid"][rank]), number)
        if here:
            time.sleep(ASKED * self._slowness)
        said = self._said.read_text(errors="replace").splitlines()
        # Open MPI says this thousands of times after a death
        lines = [each for each in said if each and "NBC_Progress" not in each]
        lines = lines[-LINES:]
        stacks = (
            [] if self._board.rows["failed"].any() else self._directory.glob("stacks-*")
        )
        for path in sorted(stacks):
            if text := path.read_text(errors="replace"):
                lines += [f"--- {path.name}", text]
        steps = self._board.rows["steps"].tolist()
        raise Finding(
            f"{what}; processes live of ranks {here}, which have done the steps {steps}",
            self._schedules[playing - 1] if playing else None,
            "\n".join(lines),
        )

    # Afterwards.

    def _compare(self) -> None:
        """Check that all live ranks have the same bits."""
        left: dict[int, list[dict]] = {}
        for path in self._directory.glob("rank-*.jsonl"):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                left.setdefault(row["seed"], []).append(row)
        for drawn in self._schedules:
            rows = left.get(drawn.seed, [])
            if len(rows) != drawn.survivors:
                raise Finding(
                    f"{drawn.survivors} ranks should have reached the end, not {len(rows)}",
                    drawn,
                    self._said.read_text(errors="replace")[-8000:],
                )
            if any(row != rows[0] for row in rows):
                raise Finding(f"ranks differ: {rows}", drawn)

    def _look_around(self) -> None:
        """Check that nothing is left of the job."""
        until = time.monotonic() + ASKED * self._slowness
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(LOOK)
        if self.ended_late:  # processes other than ranks belong to the launcher
            left = [pid for pid in left if "play.py" in _program(pid)]
        if left:
            raise Finding(f"processes are left: {left}", None)
        if self.ended_late:
            return
        if files := [str(path) for path in self._temporary.rglob("*")]:
            raise Finding(f"files are left: {files}", None)
        if shared := sorted(self._shared & set(os.listdir("/dev/shm"))):
            raise Finding(f"files are left in /dev/shm: {shared}", None)

    def _processes(self) -> list[int]:
        out = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._name.encode() in path.read_bytes().split(b"\0"):
                    out.append(int(path.parent.name))
        return out

    def _end(self, job: "subprocess.Popen[bytes]") -> None:
        for _ in range(3):  # a process may start others before it ends
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.wait()


def _state(pid: int) -> str:
    """Return the state of a process, one letter of proc(5); empty if there is no
    process.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _program(pid: int) -> str:
    """Return the script that a Python process runs."""
    with contextlib.suppress(OSError):
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if pathlib.Path(words[0]).name.startswith("python"):
            return " ".join(words[1:2])
    return ""


def can_make_hosts() -> bool:
    """Return whether this machine can make hosts; print why not."""
    try:
        with on_hosts.network(1, "1gbit"):
            return True
    except on_hosts.Unavailable as why:
        print(f"no job is on several hosts: {why}", flush=True)
        return False


def _mapped(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has mapped."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {
        line.rpartition("/dev/shm/")[2].split()[0]
        for line in lines
        if "/dev/shm/" in line
    }


def play(
    seeds: list[int], ranks: int, hosts: int = 0, rate: str = ""
) -> tuple[list[Schedule], bool]:
    """Play the first of these seeds in a job of ``ranks`` ranks; raise `Finding` for a
    fault.

    Args:
        hosts: number of hosts; 0: this machine itself.
        rate: the rate of a host's cable.

    Returns:
        The schedules that were played, and whether MPI's launcher did not end.
    """
    schedules = arranged(seeds, ranks, hosts=bool(hosts))
    network = on_hosts.network(hosts, rate) if hosts else contextlib.nullcontext(())
    with network as names:
        job = Job(schedules, names)
        try:
            job.play()
        except Finding as finding:
            finding.job = [drawn.seed for drawn in schedules], ranks, hosts
            raise
    return schedules, job.ended_late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seeds", type=int, help="how many; default: as many as can be"
    )
    parser.add_argument("--minutes", type=float, help="for how long at most")
    parser.add_argument("--first", type=int, default=secrets.randbits(24), help="seed")
    parser.add_argument("--replay", type=int, help="one seed, alone")
    parser.add_argument(
        "--ranks", type=int, help=f"of a job; default: {FEWEST + 1} to {MOST}"
    )
    parser.add_argument(
        "--hosts",
        type=int,
        help=f"on which the ranks are; default: one of {OF_JOBS} jobs on {HOSTS}",
    )
    parser.add_argument("--rate", default="100mbit", help="of a host's cable")
    parser.add_argument("--go-on", action="store_true", help="after a finding, too")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the job is ended
    compiled.make_haste()
    compiled.share()
    if given.replay is not None:
        try:
            play([given.replay], given.ranks or MOST, given.hosts or 0, given.rate)
        except Finding as finding:
            sys.exit(str(finding))
        return
    if given.seeds is None and given.minutes is None:
        parser.error("say how many --seeds, or for how many --minutes")
    mixed = given.hosts is None and can_make_hosts()
    start, findings, late, jobs, on_several = time.monotonic(), 0, 0, 0, 0
    seed, end = given.first, given.first + (given.seeds or 1 << 40)
    while seed < end and (
        given.minutes is None or time.monotonic() - start < 60 * given.minutes
    ):
        ranks = given.ranks or FEWEST + 1 + seed % (MOST - FEWEST)
        seeds = list(range(seed, min(end, seed + OF_A_JOB)))
        jobs += 1
        hosts = HOSTS if mixed and jobs % OF_JOBS == 0 else given.hosts or 0
        try:
            played, ended_late = play(seeds, ranks, hosts, given.rate)
            late += ended_late
            on_several += len(played) if hosts else 0
            seed += len(played)
        except Finding as finding:
            findings += 1
            print(f"\n{finding}\n", flush=True)
            if not given.go_on:
                sys.exit(1)
            seed = finding.schedule.seed + 1 if finding.schedule else seed + OF_A_JOB
        minutes = (time.monotonic() - start) / 60
        print(
            f"{seed - given.first} schedules from seed {given.first} on, {on_several} of them on several hosts, "
            f"{minutes:.1f} minutes, {findings} findings; the launcher of MPI has not ended {late} times",
            flush=True,
        )
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
