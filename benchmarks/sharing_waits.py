"""How long do ranks wait for the next block of shared work?

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py benchmarks/sharing_waits.py

Rank 0 is the root and has no data. Work is a sleep, and every worker is slower by an
exponential delay in each step. The benchmark prints means over workers and steps: the
time of a step, and the waits between two blocks in it, for the worker's own blocks and
for blocks of other workers. The wait after a worker's last block does not count.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI

import jaxcoded
from jaxcoded import host

comm = MPI.COMM_WORLD


def step(group, work):
    """Return the seconds of a step, and of the waits for own and for other ranks'
    blocks."""
    placement = group.plan.placement
    own, waits = set(placement.owned(group.rank)), [0.0, 0.0]
    begun = time.perf_counter()
    with group.blocks(len(placement.holders)) as blocks:
        asked = None
        for block in blocks:
            if asked is not None:
                waits[block.number not in own] += time.perf_counter() - asked
            time.sleep(work)
            asked = time.perf_counter()
    host.allreduce(np.ones(1024, np.float32), group)
    return time.perf_counter() - begun, *waits


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--work", type=float, default=30, help="ms of a worker's step")
    parser.add_argument("--blocks", type=int, default=6, help="of a worker")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if comm.size < 3:
        parser.error("start 3 ranks or more")
    steps = 3 if args.smoke else args.steps
    replicas = min(args.replicas, comm.size - 2)
    work = jaxcoded.Shared(replicas=replicas, blocks=args.blocks, root_computes=False)
    slowness = 1 + np.random.default_rng(0).exponential(0.5, (steps, comm.size))
    with jaxcoded.CodedGroup(comm, work, transport="engine") as group:
        block = args.work * 1e-3 / args.blocks
        rows = [step(group, block * slow[comm.rank]) for slow in slowness]
    means = np.array(comm.gather(np.mean(rows, axis=0)))
    if comm.rank == 0:
        whole, own, others = 1e3 * means[1:].mean(axis=0)
        print(
            f"a step: {whole:.1f} ms; waits between blocks: {own:.3f} ms for own ones, "
            f"{others:.3f} ms for others' ({others / whole:.2%})"
        )


if __name__ == "__main__":
    main()
