"""How much of a step's communication hides behind its computation?

    scripts/mpirun -n 4 .venv/bin/python -m mpi4py benchmarks/overlap.py
    .venv/bin/python scripts/on_hosts.py --rate 200mbit -- .venv/bin/python -m mpi4py benchmarks/overlap.py

No rank straggles. A step is the gradient of a perceptron of 8 equal layers and its
all-reduce, in one jitted function. There are three kinds. The first sums in one round
after the backward pass. The second starts a round for each layer as soon as its
gradient exists, and waits at the end; one group does this, or two alternate. The third
waits for a step's round only after the next backward pass, as with gradients
accumulated over batches. The number of examples makes computing as long as the round.
The settings take turns, and times are those of the slowest rank. On one host ranks compute and communicate on the same
cores; on several hosts with slow links the cores are free while messages travel. With --sleep each layer's passes only
sleep, as if a GPU computed them, or each host had separate cores. The benchmark prints and stores medians, the medians
of the ratios within a repetition, and the processor time of all ranks.
"""

import argparse
import csv
import pathlib
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcoded

comm = MPI.COMM_WORLD
LAYERS = 8


def slept(weights, x):
    """Run the backward pass of layers that take ``x[0]`` seconds each; their forward pass takes half as long."""

    def sleep(seconds, _):
        time.sleep(float(seconds))
        return np.float32(0)

    def layer(seconds, after):
        return jax.pure_callback(
            sleep, jax.ShapeDtypeStruct((), np.float32), seconds, after
        )

    done = layer(len(weights) * x[0] / 2, x[0])
    grads = []
    for w in reversed(weights):
        done = layer(x[0], done)
        grads.append(w + done)
    return grads[::-1]


def computed(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h)

    return jax.grad(loss)(weights)


def settings(group, other, width, gradients):
    """Return steps ``(weights, x, token) -> (weights, token)``, by name."""
    layer = 4 * width**2
    counted = group.batch(comm.size).weights

    def compute(weights, x, token):
        return gradients(weights, x), token

    def communicate(weights, x, token):
        return jaxcoded.coded_allreduce(weights, group, counted, token=token)

    def communicate_in(groups):
        def step(weights, x, token):
            handle, _, token = jaxcoded.coded_allreduce_start(
                weights, groups, counted, bucket_bytes=layer, token=token
            )
            return jaxcoded.coded_allreduce_done(handle, token=token)

        return step

    def blocking(weights, x, token):
        return jaxcoded.coded_allreduce(
            gradients(weights, x), group, counted, token=token
        )

    def buckets(weights, x, token):
        grads = gradients(weights, x)
        handle, _, token = jaxcoded.coded_allreduce_start(
            grads, group, counted, bucket_bytes=layer, token=token
        )
        return jaxcoded.coded_allreduce_done(handle, after=grads, token=token)

    def taking_turns(weights, x, token):
        grads = gradients(weights, x)
        handle, _, token = jaxcoded.coded_allreduce_start(
            grads, [group, other], counted, bucket_bytes=layer, token=token
        )
        return jaxcoded.coded_allreduce_done(handle, after=grads, token=token)

    def without_after(weights, x, token):
        handle, _, token = jaxcoded.coded_allreduce_start(
            gradients(weights, x), group, counted, bucket_bytes=layer, token=token
        )
        return jaxcoded.coded_allreduce_done(handle, token=token)

    return {
        "compute alone": jax.jit(compute),
        "communicate alone": jax.jit(communicate),
        "alone, in 8 rounds": jax.jit(communicate_in(group)),
        "alone, in 8 of two groups": jax.jit(communicate_in([group, other])),
        "one round at the end": jax.jit(blocking),
        "a round for each layer": jax.jit(buckets),
        "the same without after=": jax.jit(without_after),
        "by two groups in turns": jax.jit(taking_turns),
        "the round of the step before": step_before(group, gradients),
    }


def step_before(group, gradients):
    """Return a step during which the previous step's gradient is summed."""

    counted = group.batch(comm.size).weights

    @jax.jit
    def start(grads, token):
        return jaxcoded.coded_allreduce_start(grads, group, counted, token=token)

    @jax.jit
    def step(handle, weights, x, token):
        grads = gradients(weights, x)
        total, _, token = jaxcoded.coded_allreduce_done(
            handle, after=grads, token=token
        )
        handle, _, token = jaxcoded.coded_allreduce_start(
            grads, group, counted, token=token
        )
        return handle, total, token

    handle = None

    def run(weights, x, token):
        nonlocal handle
        if handle is None:
            handle, _, token = start(weights, token)
        handle, total, token = step(handle, weights, x, token)
        return total, token

    return run


def seconds(step, weights, x, count):
    """Return the seconds of a step on the slowest rank, and of all ranks' processors."""
    token = jnp.int32(0)
    jax.block_until_ready(step(weights, x, token))
    comm.Barrier()
    start, begun = time.perf_counter(), time.process_time()
    for _ in range(count):
        out, *_, token = step(weights, x, token)
        jax.block_until_ready(out)
    own = time.perf_counter() - start
    busy = time.process_time() - begun
    return comm.allreduce(own / count, MPI.MAX), comm.allreduce(busy / count, MPI.SUM)


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument(
        "--sleep", action="store_true", help="compute nothing, and take as long"
    )
    parser.add_argument("--width", type=int, default=512, help="of a layer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    width = 32 if args.smoke else args.width
    repetitions, count = (1, 2) if args.smoke else (args.repetitions, 3)
    random = np.random.default_rng(0)
    weights = [
        jnp.asarray(random.normal(size=(width, width)) / width**0.5, jnp.float32)
        for _ in range(LAYERS)
    ]
    hosts = len(set(comm.allgather(socket.gethostname())))
    with (
        jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=int(comm.size > 2))
        ) as group,
        jaxcoded.CodedGroup(comm, group.plan) as other,
    ):
        gradients, kind = (slept, "-asleep") if args.sleep else (computed, "")
        steps = settings(group, other, width, gradients)
        communicate, _ = seconds(
            steps["communicate alone"], weights, jnp.zeros(1), count
        )
        if args.sleep:
            x = jnp.array([communicate / (1.5 * LAYERS)], jnp.float32)
            what = f"layers of {1e3 * x[0]:.1f} ms"
        else:
            examples = 64
            for _ in range(3):
                x = jnp.ones((examples, width), jnp.float32)
                compute, _ = seconds(steps["compute alone"], weights, x, count)
                examples = max(16, round(examples * communicate / compute))
            x = jnp.ones((examples, width), jnp.float32)
            what = f"{examples} examples"
        times = {name: [] for name in steps}
        for _ in range(repetitions):
            for name, step in steps.items():
                times[name].append(seconds(step, weights, x, count))
    if comm.rank == 0:
        report(times, hosts, 4 * LAYERS * width**2, what, args.out, kind)


def report(times, hosts, size, what, out, kind):
    print(f"{comm.size} ranks on {hosts} hosts, {size:,} B, {what}")
    rows = []
    base = np.array(times["one round at the end"])[:, 0]
    for name, values in times.items():
        took, busy = np.array(values).T
        gain = np.median(base / took)
        rows.append(
            (comm.size, hosts, size, name, np.median(took), gain, np.median(busy))
        )
        print(
            f"{name:28}{np.median(took) * 1e3:10.2f} ms   gain {gain:5.2f}"
            f"   processors {np.median(busy) * 1e3:8.2f} ms"
        )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"overlap-{comm.size}-on-{hosts}{kind}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["ranks", "hosts", "bytes", "step", "seconds", "gain", "processors"]
        )
        writer.writerows(rows)


if __name__ == "__main__":
    main()
