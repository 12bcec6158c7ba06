"""Handwritten digits, trained by 13 ranks of which one is slow.

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py examples/digits.py

Trains the same network twice on the same global batches: first with
``mpi4jax.allreduce``, every worker holding its own part of each batch, then with
`jaxcoded.coded_allreduce` on a tree in which any one child of every parent may be
missing. One worker's gradient takes longer, by the same delay in both runs; the coded run
leaves it out of every round. Prints a table and writes ``summary.json`` and ``loss.png``.
"""

import argparse
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from tqdm import tqdm

import jaxcoded

comm = MPI.COMM_WORLD

NOTE = (
    "With the mpi4jax transport every rank turns up in every round, so the coded run "
    "waits for the slow worker too: it shows that the sum is exact without that worker's "
    "gradients, not yet that training is faster."
)


def digits():
    """1,797 images of 8 × 8 pixels from scikit-learn, read by one rank for all.

    Returns training and test set, each float32 ``(n, 64)`` and int32 ``(n,)``.
    """
    data = None
    if comm.rank == 0:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        data = train_test_split(
            (x / 16).astype(np.float32), y.astype(np.int32), random_state=0
        )
    x, x_test, y, y_test = comm.bcast(data)
    return (x, y), (x_test, y_test)


def initial_parameters(hidden=64):
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (64, hidden)) / 8,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) / hidden**0.5,
        "b2": jnp.zeros(10),
    }


def logits(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def losses(params, batch):
    """Cross entropy of each example."""
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def slowed(weights, delay):
    """The same weights, ``delay`` seconds later: a worker that is slow in its gradient."""

    def sleep():
        time.sleep(delay)
        return np.float32(0)

    return weights + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32))


def uncoded_gradient(params, batch, weights):
    """What people write today: the local gradient, then ``mpi4jax.allreduce``."""

    def weighted(params):
        return weights @ losses(params, batch)

    return jaxcoded.baselines.allreduce(jax.value_and_grad(weighted)(params), comm)


def train(name, gradient, assignment, train_set, args):
    """Run the steps and return parameters, losses and the times at which steps ended."""
    optimizer = optax.adam(args.learning_rate)
    indices, weights = assignment
    delay = args.delay * (comm.rank == args.slow)

    @jax.jit
    def step(params, state, batch):
        coding = slowed(weights, delay) if delay else weights
        loss, grads = gradient(params, batch, coding)
        loss, grads = jax.tree.map(lambda v: v / args.batch, (loss, grads))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = initial_parameters()
    state = optimizer.init(params)
    x, y = train_set
    batches = np.random.default_rng(0)  # the same global batches in both runs
    history, ends = [], []
    jax.block_until_ready(step(params, state, (x[indices], y[indices])))  # compile
    comm.Barrier()
    start = time.perf_counter()
    for _ in tqdm(range(args.steps), desc=name, disable=comm.rank != 0):
        mine = batches.permutation(len(x))[: args.batch][indices]
        params, state, loss = step(params, state, (x[mine], y[mine]))
        history.append(float(loss))
        ends.append(time.perf_counter() - start)
    return params, np.array(history), np.array(ends)


def gradients_used(plan, rank, erased, steps):
    """Steps in which a rank's gradient entered the sum, read off the coefficients."""
    used = True
    while rank != plan.root:
        parent = plan.tree.parents[rank]
        column = plan.coefficients(parent, erased)[
            :, plan.coded_children(parent).index(rank)
        ]
        used = used and bool(column.any())
        rank = parent
    return steps * used


def report(params, history, ends, test_set, used):
    x, y = test_set
    durations = np.diff(ends, prepend=0)
    return {
        "step_seconds_median": float(np.median(durations)),
        "step_seconds_p95": float(np.quantile(durations, 0.95)),
        "final_loss": float(history[-1]),
        "test_accuracy": float(np.mean(np.argmax(logits(params, x), axis=1) == y)),
        "slow_worker_gradients_used": used,
    }


def largest_difference(one, other):
    """Largest absolute difference between two sets of parameters."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def show(summary):
    runs = summary["uncoded"], summary["coded"]
    rows = [
        ("", "mpi4jax.allreduce", "coded"),
        *(
            (label, *(shown(run[key]) for run in runs))
            for label, key, shown in (
                ("step, median", "step_seconds_median", lambda v: f"{v * 1e3:.1f} ms"),
                ("step, 95 %", "step_seconds_p95", lambda v: f"{v * 1e3:.1f} ms"),
                ("final loss", "final_loss", "{:.5f}".format),
                ("test accuracy", "test_accuracy", "{:.1%}".format),
                (
                    "slow worker's gradients used",
                    "slow_worker_gradients_used",
                    f"{{}} of {summary['steps']}".format,
                ),
            )
        ),
    ]
    print()
    for label, *cells in rows:
        print(f"{label:30}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\nlargest difference of parameters, runs   {summary['between_runs']:.1e}")
    print(f"largest difference of parameters, ranks  {summary['between_ranks']:.1e}")


def draw(uncoded, coded, path):
    """Loss against wall-clock time of the two runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (history, ends), label, style in (
        (uncoded, "mpi4jax.allreduce", "-"),
        (coded, "coded, slow worker left out", "--"),
    ):
        axes.plot(ends, history, style, label=label)
    axes.set(
        xlabel="wall-clock time [s]",
        ylabel="loss of the batch",
        yscale="log",
        title=f"Digits, {comm.size} ranks, one slow worker",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=300, help="global batch size")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument(
        "--slow",
        type=int,
        default=min(5, comm.size - 1),
        help="rank of the slow worker",
    )
    parser.add_argument("--delay", type=float, default=0.1, help="seconds per gradient")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/demo"))
    args = parser.parse_args()
    if not 0 < args.slow < comm.size:
        parser.error(f"--slow={args.slow} is not a worker: 1 … {comm.size - 1}")

    train_set, test_set = digits()
    if not 0 < args.batch <= len(train_set[0]):
        parser.error(f"--batch must be in 1 … {len(train_set[0])}")
    with jaxcoded.CodedGroup(comm, stragglers=1, fanout=3) as group:
        if comm.rank == 0:
            print(group.plan.describe())
            print(
                f"\nrank {args.slow} is slow: {args.delay} s more in every gradient\n"
            )
        plain = jaxcoded.make_plan(comm.size, stragglers=0, fanout=comm.size)
        own = jaxcoded.allocation.assignment(plain, comm.rank, args.batch)
        uncoded = train("uncoded", uncoded_gradient, own, train_set, args)

        erased = np.arange(comm.size) == args.slow
        coded_gradient = functools.partial(
            jaxcoded.coded_value_and_grad(losses, group), erasures=erased
        )
        coded = train(
            "coded", coded_gradient, group.assignment(args.batch), train_set, args
        )

        nobody = np.zeros(comm.size, bool)
        used_uncoded = gradients_used(plain, args.slow, nobody, args.steps)
        used = gradients_used(group.plan, args.slow, erased, args.steps)
        here = largest_difference(coded[0], comm.bcast(coded[0]))
        summary = {
            "ranks": comm.size,
            "steps": args.steps,
            "batch": args.batch,
            "slow_rank": args.slow,
            "delay_seconds": args.delay,
            "uncoded": report(*uncoded, test_set, used_uncoded),
            "coded": report(*coded, test_set, used),
            "between_runs": largest_difference(uncoded[0], coded[0]),
            "between_ranks": comm.allreduce(here, op=MPI.MAX),
            "plan": json.loads(group.plan.to_json()),
            "note": NOTE,
        }
    if comm.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw(uncoded[1:], coded[1:], args.out / "loss.png")
        show(summary)
        print(f"\n{NOTE}\n\nwrote {args.out}/summary.json and {args.out}/loss.png")


if __name__ == "__main__":
    main()
