"""How long is a jitted all-reduce, coded and uncoded, side by side?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/allreduce.py

Nobody straggles. "2 x, alone" is a jitted function without any communication: what JAX
itself takes on these ranks at the same time. Every repetition times all of them one after the other, so that they
share the machine's moods: a barrier, then some calls in a row without one, each waited
for as a training step would. Times are of the slowest rank. Prints medians and the
medians of the ratios within a repetition, and stores them.
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
from tqdm import tqdm

import jaxcoded
from jaxcoded import baselines

comm = MPI.COMM_WORLD
BASES = ("mpi4jax.allreduce", "psum over gloo", "mpi4py Allreduce")


def donated(call):
    """Each call's result is the operand of the next one, in the same memory."""
    jitted = jax.jit(call, donate_argnums=0)

    def prepare(size):
        x = jnp.zeros(size, jnp.float32)

        def run():
            nonlocal x
            x = jitted(x)
            x.block_until_ready()

        return run

    return prepare


def kept(call):
    """The operand is used again."""
    jitted = jax.jit(call)

    def prepare(size):
        x = jnp.zeros(size, jnp.float32)
        return lambda: jitted(x).block_until_ready()

    return prepare


def with_token(group, donate=True):
    """Ordered by a token."""
    jitted = jax.jit(
        lambda x, token: jaxcoded.coded_allreduce(x, group, token=token),
        donate_argnums=(0, 1) if donate else 1,
    )

    def prepare(size):
        x, token = jnp.zeros(size, jnp.float32), jnp.int32(0)

        def run():
            nonlocal x, token
            out, token = jitted(x, token)
            out.block_until_ready()
            x = out if donate else x

        return run

    return prepare


def bare(size):
    """mpi4py on numpy arrays, without JAX."""
    x, out = np.zeros(size, np.float32), np.zeros(size, np.float32)
    return lambda: comm.Allreduce(x, out)


def on_numpy(group):
    """The engine on numpy arrays, in place, without XLA."""

    def prepare(size):
        x = np.zeros(size, np.float32)
        return lambda: jaxcoded.host.coded_allreduce(x, group, out=x)

    return prepare


def psum(size):
    """``jax.lax.psum`` over all processes, by JAX's own collectives on the CPU."""
    mesh = jax.make_mesh((comm.size,), ("ranks",))
    spec = jax.sharding.PartitionSpec("ranks")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    x = jax.make_array_from_process_local_data(
        sharding, np.zeros((1, size), np.float32), (comm.size, size)
    )
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )
    return lambda: total(x).block_until_ready()


def start_gloo():
    """Join the processes in one JAX runtime, whose collectives are gloo's."""
    address = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(comm.bcast(address), comm.size, comm.rank)


def seconds(run, calls):
    """Wall-clock time of a call, of the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return comm.allreduce(time.perf_counter() - start, op=MPI.MAX) / calls


def check(group):
    """The sum is right before it is timed."""
    indices, weights = group.assignment(4 * comm.size)
    gradients = np.random.default_rng(0).standard_normal((4 * comm.size, 1000))
    own = jnp.asarray(weights @ gradients[indices], jnp.float32)
    total = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group))(own)
    np.testing.assert_allclose(total, gradients.sum(0), atol=1e-3)


def measure(collectives, sizes, repetitions):
    """Times by size and name: arrays ``(repetitions,)``."""
    out = {}
    with tqdm(
        total=len(sizes) * repetitions, disable=comm.rank != 0, desc="rounds"
    ) as progress:
        for size in sizes:
            calls = max(1, min(30, 6_000_000 // size))
            runs = {name: prepare(size) for name, prepare in collectives.items()}
            for run in runs.values():
                run()
                run()
            times = {name: [] for name in runs}
            for _ in range(repetitions):
                for name, run in runs.items():
                    times[name].append(seconds(run, calls))
                progress.update()
            out[size] = {name: np.array(values) for name, values in times.items()}
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--fanout", type=int, help="default: 3, or 2 on 7 ranks")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = [1_000, 4_000] if args.smoke else [1_000, 250_000, 4_000_000]
    fanout = args.fanout or (2 if comm.size == 7 else 3)
    start_gloo()

    def group(stragglers, transport="auto"):
        return jaxcoded.CodedGroup(
            comm, fanout=fanout, stragglers=stragglers, transport=transport
        )

    with (
        group(int(comm.size > 2)) as coded,
        group(0) as uncoded,
        group(int(comm.size > 2), "mpi4jax") as reference,
    ):
        for each in (coded, uncoded, reference):
            check(each)
        s = coded.plan.stragglers
        collectives = {
            "2 x, alone": donated(lambda x: 2 * x),
            "2 x, alone, not donated": kept(lambda x: 2 * x),
            "mpi4py Allreduce": bare,
            "mpi4jax.allreduce": kept(lambda x: baselines.allreduce(x, comm)),
            "psum over gloo": psum,
            f"engine, s={s}": donated(lambda x: jaxcoded.coded_allreduce(x, coded)),
            f"engine, s={s}, token": with_token(coded),
            f"engine, s={s}, token, not donated": with_token(coded, donate=False),
            f"engine, s={s}, numpy": on_numpy(coded),
            "engine, s=0": donated(lambda x: jaxcoded.coded_allreduce(x, uncoded)),
            "engine, s=0, token": with_token(uncoded),
            f"mpi4jax transport, s={s}": kept(
                lambda x: jaxcoded.coded_allreduce(x, reference)
            ),
            "ring": kept(lambda x: baselines.ring_allreduce(x, comm)),
            "master-worker": kept(lambda x: baselines.master_worker_allreduce(x, comm)),
        }
        times = measure(collectives, sizes, 3 if args.smoke else args.repetitions)
        if comm.rank == 0:
            report(times, coded.plan, args.out)


def report(times, plan, out):
    kinds = {coding.code.name for coding in plan.codings if coding is not None}
    print(f"{comm.size} ranks, code at s={plan.stragglers}: {', '.join(sorted(kinds))}")
    print(f"{'bytes':>10}  {'collective':28}{'median':>12}", end="")
    print("".join(f"{'÷ ' + base:>20}" for base in BASES))
    rows = []
    for size, by_name in times.items():
        for name, values in by_name.items():
            ratios = [np.median(values / by_name[base]) for base in BASES]
            rows.append((comm.size, 4 * size, name, np.median(values), *ratios))
            print(f"{4 * size:10}  {name:28}{np.median(values) * 1e3:9.3f} ms", end="")
            print("".join(f"{ratio:20.2f}" for ratio in ratios))
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"allreduce-{comm.size}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks", "bytes", "collective", "seconds", *BASES])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
