"""What do replicas do under torchft if one of them is slow, stuck, stopped or killed?

    python3.11 -m venv build/torchft
    build/torchft/bin/pip install torch==2.13.0 torchft-nightly==2026.10.26 numpy tqdm
    build/torchft/bin/python benchmarks/one_faulty_replica_torchft.py

This benchmark matches ``one_faulty_rank.py`` for JAX: four processes run on this machine, over gloo, and the work of
each is a sleep of 20 ms. In the middle of the job replica 2 has a fault: it computes ten times as slowly; sleeps for
ever, alive ("stuck"); is stopped (SIGSTOP); is killed (SIGKILL); or is killed and restarted at once. Each case runs
with torchft's default time-outs, and with ``--short`` seconds for the manager, the sum and the lighthouse.

The gradient of replica n is 1 in every fourth number from n on, so that the mean shows which gradients it contains, and
the divisor: "013/3".
"""

import argparse
import csv
import datetime
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
from tqdm import tqdm

REPLICAS, FAULTY = 4, 2
WORK = 0.02  # seconds of a replica's part
NUMBERS = 1000
FULL = "0123/4"
FAULTS = ("none", "slow", "stuck", "stopped", "killed", "restarted")
TIMEOUTS = ("default", "short")
FIELDS = (
    *("timeouts", "fault", "before", "after", "longest", "discarded"),
    *("gradients", "back", "outcome", "steps"),
)


# The replicas' program.


def train(args):
    """Train for ever; print a line for each step: when, whether it was committed, and
    which gradients its mean contained.
    """
    import torch
    import torchft

    class Model(torch.nn.Module):
        """A model whose gradient is its input."""

        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(NUMBERS))

        def forward(self, gradient):
            return (self.weights * gradient).sum()

    limits = {}
    if args.seconds:
        limits["timeout"] = datetime.timedelta(seconds=args.seconds)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    bare = Model()
    sgd = torch.optim.SGD(bare.parameters(), lr=1e-3)

    def load(state):
        bare.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(**limits),
        load_state_dict=load,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{args.replica}",
        hostname="127.0.0.1",
        **limits,
    )
    model = torchft.DistributedDataParallel(manager, bare)
    optimizer = torchft.Optimizer(manager, sgd)
    gradient = torch.zeros(NUMBERS)
    gradient[args.replica :: REPLICAS] = 1
    work, full = WORK, 0
    with (args.folder / f"steps{args.replica}").open("a") as file:
        while True:
            number = manager.current_step()
            optimizer.zero_grad()
            time.sleep(work / 2)
            if full == args.before and args.fault != "none":
                (args.folder / "fault").write_text(str(time.monotonic()))
                full += 1
                if args.fault == "slow":
                    work *= 10
                elif args.fault == "stuck":
                    time.sleep(1e6)
                else:
                    stop = args.fault == "stopped"
                    os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)
            time.sleep(work / 2)
            model(gradient).backward()
            optimizer.step()
            taken = manager.current_step() > number
            mean = bare.weights.grad[:REPLICAS].tolist()
            who = "".join(str(n) for n in range(REPLICAS) if mean[n]) or "-"
            by = round(1 / max(mean)) if max(mean) else 0
            full += taken and len(who) == REPLICAS
            print(time.monotonic(), int(taken), f"{who}/{by}", file=file, flush=True)


# Jobs and their results.


def lighthouse(args, seconds, output):
    """Start torchft's server; return it and its address."""
    limits = []
    if seconds:
        milliseconds = str(1000 * seconds)
        limits = ["--heartbeat_timeout_ms", milliseconds]
        limits += ["--join_timeout_ms", milliseconds]
    binary = pathlib.Path(sys.executable).parent / "torchft_lighthouse"
    address = f"127.0.0.1:{args.port}"
    server = subprocess.Popen(
        [binary, "--bind", address, "--min_replicas", "2", *limits],
        stdout=output,
        stderr=output,
    )
    return server, f"http://{address}"


def lines(folder, replica):
    """Return a replica's steps so far: times, whether they were committed, and which
    gradients they held.
    """
    file = folder / f"steps{replica}"
    text = file.read_text() if file.exists() else ""
    return [
        (float(when), taken == "1", who)
        for when, taken, who in re.findall(r"(\S+) (\S+) (\S+)\n", text)
    ]


def observed(args, timeouts, fault):
    """Run a job; return the steps before and after the fault, its outcome as text, and the
    end of each step of replica 0, in ms after the fault.
    """
    seconds = args.short if timeouts == "short" else 0
    others = [n for n in range(REPLICAS) if n != FAULTY]
    processes, output = {}, (args.out / f"torchft.{timeouts}.{fault}").open("w")

    def start(replica, fault):
        line = [sys.executable, __file__, "--folder", folder, "--fault", fault]
        line += ["--before", str(args.before), "--replica", str(replica)]
        line += ["--seconds", str(seconds)]
        settings = os.environ | {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
        processes[replica] = subprocess.Popen(
            line, env=settings, stdout=output, stderr=output
        )

    with tempfile.TemporaryDirectory() as name, output:
        folder = pathlib.Path(name)
        server, address = lighthouse(args, seconds, output)
        restarted = back = None
        begun = time.monotonic()
        try:
            for replica in range(REPLICAS):
                start(replica, fault if replica == FAULTY else "none")
            while True:
                time.sleep(0.1)
                mark = folder / "fault"
                text = mark.read_text() if mark.exists() else ""
                at = float(text) if text else None
                done = {n: lines(folder, n) for n in others}
                taken = [line for line in done[0] if line[1]]
                if fault == "none" and at is None:
                    full = [line for line in taken if line[2] == FULL]
                    at = full[args.before - 1][0] if len(full) >= args.before else None
                ended = [n for n in others if processes[n].poll() is not None]
                after = [line for line in taken if at and line[0] > at]
                if fault == "restarted" and at and processes[FAULTY].poll() is not None:
                    if restarted:
                        raise RuntimeError("it ended again")
                    start(FAULTY, "none")
                    restarted = time.monotonic()
                if restarted and not back:
                    full = [t for t, _, who in after if who == FULL]
                    # The step in which the fault came may have been complete.
                    full = [t for t in full if t > restarted]
                    if full:
                        back = full[0] - restarted
                        after = after[-1:]
                enough = len(after) >= args.after and (fault != "restarted" or back)
                idle = time.monotonic() - (done[0][-1][0] if done[0] else begun)
                if enough or ended or idle > args.limit:
                    break
        finally:
            for process in (*processes.values(), server):
                process.kill()
                process.wait()
    if at is None:
        raise RuntimeError(f"{timeouts}, {fault}: no fault; see {output.name}")
    if ended:
        outcome = f"replicas {ended} end {time.monotonic() - at:.0f} s after the fault"
    else:
        outcome = "goes on" if enough else f"no step any more in {args.limit:g} s"
    gaps = {}
    for n in others:
        times = np.array([when for when, taken, _ in done[n] if taken])
        gaps[n] = np.diff(times), times[1:]
    before = [seconds[times <= at][-args.before :] for seconds, times in gaps.values()]
    after = [seconds[times > at] for seconds, times in gaps.values()]
    longest = [max(each) for each in after if len(each)]
    return {
        "timeouts": timeouts,
        "fault": fault,
        "before": float(np.median(np.concatenate(before))),
        "after": float(np.median(np.concatenate(after))) if enough else None,
        "longest": float(max(longest)) if enough else None,
        "discarded": max(
            sum(not taken for when, taken, _ in done[n] if when > at) for n in others
        ),
        "gradients": done[0][-1][2],
        "back": back,
        "outcome": outcome,
        "steps": " ".join(
            f"{1000 * (when - at):.0f}" for when, taken, _ in done[0] if taken
        ),
    }


def milliseconds(seconds):
    return "–" if seconds is None else f"{1000 * seconds:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--before", type=int, default=20, help="steps before the fault")
    parser.add_argument("--after", type=int, default=20, help="steps after it")
    parser.add_argument(
        "--limit", type=float, default=200, help="seconds without a step"
    )
    parser.add_argument("--short", type=int, default=2, help="short time-outs, seconds")
    parser.add_argument("--timeouts", choices=TIMEOUTS, nargs="+", default=TIMEOUTS)
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=FAULTS)
    parser.add_argument("--port", type=int, default=29510, help="of the lighthouse")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        train(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = list(itertools.product(args.timeouts, args.faults))
    print("ms of a step, median before and after the fault, and the longest after it;")
    print("steps discarded; whose gradients are in the last; s until it is back")
    file = args.out / "one_faulty_replica_torchft.csv"
    with file.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for timeouts, fault in tqdm(jobs, desc="jobs"):
            row = observed(args, timeouts, fault)
            writer.writerow(row)
            file.flush()
            words = [f"{timeouts:8} {fault:9}"]
            words += [f"{milliseconds(row[name]):>6}" for name in FIELDS[2:5]]
            words += [f"{row['discarded']:>3}", f"{row['gradients']:6}"]
            words += ["" if row["back"] is None else f"{row['back']:.1f} s"]
            tqdm.write(" ".join([*words, row["outcome"]]), file=sys.stdout)


if __name__ == "__main__":
    main()
