"""What does each all-reduce do if one rank is slow, stuck, stopped or killed?

    .venv/bin/python benchmarks/one_faulty_rank.py

Four processes run on this machine, and a rank's equal part of the work is a sleep of 20
ms. After some steps rank 2 has a fault: it computes ten times as slowly; sleeps for
ever, alive ("stuck", as in https://github.com/jax-ml/jax/issues/38503); is stopped
(SIGSTOP); or is killed (SIGKILL). Rank 0 checks each sum and records its time. If no
step ends for ``--limit`` seconds, the benchmark kills the remaining processes.

"live_devices" is JAX's fault tolerance (``jax_enable_recoverability`` and
``multihost_utils.live_devices``), with JAX's default time-outs, and with 2 s for
heartbeats and gloo.
"""

import argparse
import csv
import functools
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
from tqdm import tqdm

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxcoded.tools.launch import job, launcher

RANKS, FAULTY = 4, 2
WORK = 0.02  # seconds of a rank's part
EXAMPLES, NUMBERS = 48, 1000
GRADIENTS = np.random.default_rng(0).standard_normal((EXAMPLES, NUMBERS))
FAULTS = ("none", "slow", "stuck", "stopped", "killed")
FIELDS = ("scheme", "fault", "before", "after", "longest", "outcome", "steps")
SHORT = 2  # seconds of JAX's time-outs in the short case


# The ranks' program.


class Rank:
    """Count a rank's steps: make the rank faulty after some of them, and record them on rank 0."""

    def __init__(self, args, number):
        self.args, self.number, self.steps = args, number, 0
        self.factor = 1
        self.file = (args.folder / "steps").open("a") if number == 0 else None

    def sleep(self, part):
        """Compute this part of the batch."""
        time.sleep(part * RANKS * WORK * self.factor)

    def begin(self):
        """Begin a step; return whether there is one."""
        if self.steps == self.args.before and self.number == FAULTY:
            if self.args.fault == "slow":
                self.factor = 10
            elif self.args.fault == "stuck":
                time.sleep(1e6)
            elif self.args.fault != "none":
                kinds = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
                os.kill(os.getpid(), kinds[self.args.fault])
        return self.steps < self.args.before + self.args.after

    def end(self, total):
        """Record and check a sum."""
        self.steps += 1
        if self.file:
            np.testing.assert_allclose(total, GRADIENTS.sum(0), atol=1e-3)
            print(time.monotonic(), file=self.file, flush=True)


def joined(**options):
    """Join JAX's runtime, without MPI; return the number of this process."""
    import jax

    number = int(os.environ["RANK"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["ADDRESS"], RANKS, number, **options)
    return number


def psum_over(devices):
    """Return ``jax.lax.psum`` over the processes of these devices."""
    import jax

    mesh = jax.sharding.Mesh(np.array(devices), ("ranks",))
    spec = jax.sharding.PartitionSpec("ranks")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    jitted = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )

    def total(own):
        own = own[None].astype(np.float32)
        shards = jax.make_array_from_process_local_data(sharding, own)
        return np.asarray(jitted(shards).addressable_data(0))[0]

    return total


def psum(args):
    """Sum over all processes by psum."""
    import jax

    number = joined()
    total = psum_over(jax.devices())
    rank = Rank(args, number)
    while rank.begin():
        rank.sleep(1 / RANKS)
        rank.end(total(GRADIENTS[number::RANKS].sum(0)))


def live_devices(args, seconds=None):
    """Sum over the live processes, as in JAX's guide to fault tolerance: the remaining
    processes divide the batch again and repeat a failed step. ``seconds`` are the
    time-outs of heartbeats and gloo; default: JAX's.
    """
    import jax
    from jax.experimental import multihost_utils

    limits = {}
    if seconds:
        limits["heartbeat_timeout_seconds"] = seconds
        os.environ["XLA_FLAGS"] += f" --xla_cpu_collective_timeout_seconds={seconds}"
    jax.config.update("jax_enable_recoverability", True)
    number = joined(**limits)
    rank, among = Rank(args, number), None
    while rank.begin():
        try:
            with multihost_utils.live_devices(jax.devices()) as devices:
                if devices != among:
                    among, total = devices, psum_over(devices)
                own = [each.process_index for each in devices].index(number)
                rank.sleep(1 / len(devices))
                out = total(GRADIENTS[own :: len(devices)].sum(0))
        except (multihost_utils.ProcessFailureError, jax.errors.JaxRuntimeError):
            continue
        rank.end(out)


def mpi4jax_allreduce(args):
    import jax
    from mpi4py import MPI

    from jaxcoded import baselines

    comm = MPI.COMM_WORLD
    total = jax.jit(lambda x: baselines.allreduce(x, comm))
    own = GRADIENTS[comm.rank :: RANKS].sum(0).astype(np.float32)
    rank = Rank(args, comm.rank)
    while rank.begin():
        rank.sleep(1 / RANKS)
        rank.end(np.asarray(total(own)))


def coded(args):
    """Sum by fractional or cyclic repetition over the three workers of a root without
    data.
    """
    from mpi4py import MPI

    import jaxcoded

    with jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded(stragglers=1)) as group:
        part = group.batch(EXAMPLES)
        own = (part.weights @ GRADIENTS[part.indices]).astype(np.float32)
        rank = Rank(args, group.rank)
        while rank.begin():
            late = group.lag() > 0
            if not late:
                rank.sleep(np.count_nonzero(part.weights) / EXAMPLES)
            rank.end(jaxcoded.host.allreduce(own, group, part.weights, skip=late))


def shared(args):
    from mpi4py import MPI

    import jaxcoded

    work = jaxcoded.Shared(replicas=2, blocks=4)
    with jaxcoded.CodedGroup(MPI.COMM_WORLD, work) as group:
        rank = Rank(args, group.rank)
        while rank.begin():
            own = np.zeros(NUMBERS, np.float32)
            with group.blocks(EXAMPLES) as blocks:
                for block in blocks:
                    rank.sleep(len(block.indices) / EXAMPLES)
                    own += GRADIENTS[block.indices].sum(0).astype(np.float32)
            rank.end(jaxcoded.host.allreduce(own, group))


PROGRAMS = {
    "psum over gloo": psum,
    "live_devices": live_devices,
    f"live_devices, {SHORT} s": functools.partial(live_devices, seconds=SHORT),
    "mpi4jax.allreduce": mpi4jax_allreduce,
    "coded": coded,
    "shared": shared,
}
SCHEMES = tuple(PROGRAMS)
WITHOUT_MPI = SCHEMES[:3]


# Jobs and their results.


def command(args, scheme, fault, folder):
    return [
        *(sys.executable, __file__, "--folder", str(folder), "--fault", fault),
        *("--program", scheme, "--before", str(args.before)),
        *("--after", str(args.after)),
    ]


def play_alone(command, output, finished):
    """Start processes one by one. Return their statuses, None for a killed process, and whether a rank without a fault
    was killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = os.environ | launcher.environment(threads=1) | {"ADDRESS": address}
    ranks = [
        subprocess.Popen(
            command, env=settings | {"RANK": str(n)}, stdout=output, stderr=output
        )
        for n in range(RANKS)
    ]
    try:
        while not finished() and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
        statuses = [rank.poll() for rank in ranks]
        return statuses, any(each is None for each in statuses[:FAULTY])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def play_mpi(command, output, scheme, fault, limit):
    """Run a job of mpirun, with fault-tolerant MPI if it must survive a death. Return
    its status, and whether it took too long.
    """
    mpirun = launcher.located(None, beside=ROOT / ".venv/bin/mpirun")
    tolerant = fault == "killed" and scheme in ("coded", "shared")
    start = ["--with-ft", "ulfm"] if tolerant else []
    program = command if tolerant else [command[0], "-m", "mpi4py", *command[1:]]
    end = job.play(
        [mpirun.path, *mpirun.crowded(), *start, "-n", str(RANKS), *program],
        os.environ | launcher.environment(threads=1),
        seconds=limit,
        output=output,
    )
    return end.status, end.too_long


def observed(args, scheme, fault):
    """Run a job; return the steps before and after the fault, its outcome as text, and the end of each step, in ms
    after the end of the last step before the fault.
    """
    limit = args.limit
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        steps = folder / "steps"
        begun = time.monotonic()

        def times():
            lines = steps.read_text().split() if steps.exists() else []
            return [float(line) for line in lines]

        def finished():
            """Return whether all steps are done, or no step has ended for too long."""
            done = times()
            idle = time.monotonic() - (done[-1] if done else begun + 3 * args.start)
            return len(done) == args.before + args.after or idle > limit

        with (folder / "output").open("w") as output:
            line = command(args, scheme, fault, folder)
            if scheme in WITHOUT_MPI:
                status, hung = play_alone(line, output, finished)
            else:  # limit the job, which should end by itself after its last step
                usual = (args.before + 12 * args.after) * 2 * WORK + args.start
                status, hung = play_mpi(line, output, scheme, fault, usual + limit)
        ended = time.monotonic()
        done = times()
        text = (folder / "output").read_text(errors="replace")
    if len(done) < args.before:
        print(text[-2000:], file=sys.stderr)
        raise RuntimeError(f"{scheme}, {fault}: only {len(done)} steps")
    seconds = np.diff(done)
    before, after = np.split(seconds, [args.before - 1])
    complete = len(done) == args.before + args.after
    if complete:
        outcome = "goes on"
    elif hung:
        outcome = f"no step any more, no error, in {limit:g} s"
    else:
        outcome = f"the job ends after {ended - done[-1]:.0f} s, status {status}"
    return {
        "scheme": scheme,
        "fault": fault,
        "before": float(np.median(before)),
        "after": float(np.median(after)) if complete else None,
        "longest": float(np.max(after)) if complete else None,
        "outcome": outcome,
        "steps": " ".join(
            f"{1000 * (each - done[args.before - 1]):.0f}" for each in done
        ),
    }


def milliseconds(seconds):
    return "–" if seconds is None else f"{1000 * seconds:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--before", type=int, default=20, help="steps before the fault")
    parser.add_argument("--after", type=int, default=20, help="steps after it")
    parser.add_argument(
        *("--limit", "-l"), type=float, default=150, help="seconds without a step"
    )
    parser.add_argument(
        "--start", type=float, default=40, help="seconds for the ranks to start"
    )
    parser.add_argument("--only", choices=SCHEMES, action="append", help="of them")
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=FAULTS)
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    parser.add_argument("--program", choices=SCHEMES, help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        PROGRAMS[args.program](args)
        return
    if args.smoke:
        args.before, args.after, args.limit = 3, 5, 5
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = list(itertools.product(args.only or SCHEMES, args.faults))
    print("ms of a step, median before and after the fault, and the longest after it")
    with (args.out / "one_faulty_rank.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for scheme, fault in tqdm(jobs, desc="jobs"):
            row = observed(args, scheme, fault)
            writer.writerow(row)
            file.flush()
            times = [milliseconds(row[name]) for name in FIELDS[2:5]]
            words = [f"{scheme:18} {fault:8}", *(f"{each:>6}" for each in times)]
            tqdm.write(" ".join([*words, "", row["outcome"]]), file=sys.stdout)


if __name__ == "__main__":
    main()
