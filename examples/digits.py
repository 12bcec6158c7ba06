"""Handwritten digits, trained by 13 ranks of which one is ten times slower.

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py examples/digits.py

Trains the same network on the same global batches, once with ``mpi4jax.allreduce``, every
worker holding its own part of each batch, and once with `jaxcoded.coded_value_and_grad` on
a tree in which any one child of every parent may be missing; each with one slow worker
and with nobody slow. Prints a table and writes ``summary.json`` and ``loss.png``.

The network is small, and 13 ranks may share a few cores here. So that a worker has
something to be slow in, its gradient takes a further time in proportion to its examples,
in which it sleeps. With the code every worker has more examples: that is its price.
"""

import argparse
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


class Worker:
    """A worker that takes its time for a gradient.

    Attributes:
        seconds: for each example.
        gradients: so many it has computed.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.gradients = 0

    def losses(self, params, batch):
        """Cross entropy of each example."""
        x, y = batch

        def work():
            self.gradients += 1
            time.sleep(self.seconds * len(x))
            return np.float32(0)

        # only where the gradient is computed, which a late rank leaves out
        x = x + jax.pure_callback(work, jax.ShapeDtypeStruct((), jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def uncoded_gradient(losses):
    """What people write today: the local gradient, then ``mpi4jax.allreduce``."""

    def gradient(params, batch, weights):
        def weighted(params):
            return weights @ losses(params, batch)

        def compute():
            return jax.value_and_grad(weighted)(params)

        def skip():
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(compute))

        local = jax.lax.cond(jnp.any(weights != 0), compute, skip)
        return jaxcoded.baselines.allreduce(local, comm)

    return gradient


def train(name, gradient, worker, assignment, train_set, args):
    """Run the steps and return parameters, losses, the times at which steps ended and
    the number of gradients that this rank has computed."""
    optimizer = optax.adam(args.learning_rate)
    indices, weights = assignment

    @jax.jit
    def step(params, state, batch):
        loss, grads = gradient(params, batch, weights)
        loss, grads = jax.tree.map(lambda v: v / args.batch, (loss, grads))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = initial_parameters()
    state = optimizer.init(params)
    x, y = train_set
    batches = np.random.default_rng(0)  # the same global batches in all runs
    history, ends = [], []
    jax.block_until_ready(step(params, state, (x[indices], y[indices])))  # compile
    comm.Barrier()
    worker.gradients = 0
    start = time.perf_counter()
    for _ in tqdm(range(args.steps), desc=name, disable=comm.rank != 0):
        mine = batches.permutation(len(x))[: args.batch][indices]
        params, state, loss = step(params, state, (x[mine], y[mine]))
        history.append(float(loss))
        ends.append(time.perf_counter() - start)
    return params, np.array(history), np.array(ends), worker.gradients


def report(params, history, ends, gradients, test_set, slow):
    x, y = test_set
    durations = np.diff(ends, prepend=0)
    return {
        "step_seconds_median": float(np.median(durations)),
        "step_seconds_p95": float(np.quantile(durations, 0.95)),
        "final_loss": float(history[-1]),
        "test_accuracy": float(np.mean(np.argmax(logits(params, x), axis=1) == y)),
        "slow_worker_gradients": comm.bcast(gradients, slow),
        "between_ranks": comm.allreduce(
            largest_difference(params, comm.bcast(params)), op=MPI.MAX
        ),
    }


def largest_difference(one, other):
    """Largest absolute difference between two sets of parameters."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def show(summary):
    def milliseconds(value):
        return f"{value * 1e3:.1f} ms"

    lines = (
        ("step, median", "step_seconds_median", milliseconds),
        ("step, 95 %", "step_seconds_p95", milliseconds),
        ("final loss", "final_loss", "{:.5f}".format),
        ("test accuracy", "test_accuracy", "{:.1%}".format),
        (
            f"gradients of rank {summary['slow_rank']}",
            "slow_worker_gradients",
            f"{{}} of {summary['steps']}".format,
        ),
        ("parameters, ranks differ by", "between_ranks", "{:.1e}".format),
    )
    runs = [summary[name] for name in RUNS]
    print(f"\n{'':28}{'mpi4jax.allreduce':>28}{'coded':>28}")
    print(f"{'':28}" + f"{'one slow':>14}{'nobody slow':>14}" * 2)
    for label, key, shown in lines:
        print(f"{label:28}" + "".join(f"{shown(run[key]):>14}" for run in runs))
    print(
        f"\nWith one worker {summary['slowdown']:g} times slower a step of the uncoded "
        f"run takes {summary['uncoded_over_coded']:.1f} times as long as one of the "
        f"coded run,\nwhich takes {summary['coded_over_ideal']:.2f} times as long as "
        "with nobody slow. With nobody slow the code costs "
        f"{summary['price']:.1f} times the uncoded step:\n{summary['examples_coded']} "
        f"examples for each worker in place of {summary['examples_uncoded']}."
    )


def draw(uncoded, coded, ideal, path):
    """Loss against wall-clock time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (_, history, ends, _), label, style, colour in (
        (uncoded, "mpi4jax.allreduce", "-", "tab:orange"),
        (coded, "coded", "-", "tab:blue"),
        (ideal, "coded, nobody slow", ":", "black"),
    ):
        axes.plot(ends, history, style, label=label, color=colour)
    axes.set(
        xlabel="wall-clock time [s]",
        ylabel="loss of the batch",
        yscale="log",
        title=f"Digits, {comm.size} ranks, one of them slow",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


RUNS = ("uncoded", "uncoded_ideal", "coded", "coded_ideal")


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
    parser.add_argument(
        "--slowdown", type=float, default=10, help="how many times slower it is"
    )
    parser.add_argument(
        "--work", type=float, default=5e-4, help="seconds for an example's gradient"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/demo"))
    args = parser.parse_args()
    if not 0 < args.slow < comm.size:
        parser.error(f"--slow={args.slow} is not a worker: 1 … {comm.size - 1}")

    train_set, test_set = digits()
    if not 0 < args.batch <= len(train_set[0]):
        parser.error(f"--batch must be in 1 … {len(train_set[0])}")
    with jaxcoded.CodedGroup(comm, stragglers=1, fanout=3) as group:
        plain = jaxcoded.make_plan(comm.size, stragglers=0, fanout=comm.size)
        own = jaxcoded.plan.assignment.assignment(plain, comm.rank, args.batch)
        examples = [
            comm.allreduce(int(np.count_nonzero(weights)), op=MPI.MAX)
            for _, weights in (own, group.assignment(args.batch))
        ]
        if comm.rank == 0:
            print(group.plan.describe())
            print(
                f"\nrank {args.slow} is {args.slowdown:g} times slower: its gradient takes "
                f"{args.work * args.slowdown * 1e3:g} ms for each example, others' "
                f"{args.work * 1e3:g} ms\n"
            )
        results = {}
        for name in RUNS:
            slow = comm.rank == args.slow and not name.endswith("ideal")
            worker = Worker(args.work * (args.slowdown if slow else 1))
            if name.startswith("uncoded"):
                gradient, assigned = uncoded_gradient(worker.losses), own
            else:
                gradient = jaxcoded.coded_value_and_grad(worker.losses, group)
                assigned = group.assignment(args.batch)
            results[name] = train(
                name.replace("_", ", "), gradient, worker, assigned, train_set, args
            )

        reports = {
            name: report(*result, test_set, args.slow)
            for name, result in results.items()
        }
        step = {name: run["step_seconds_median"] for name, run in reports.items()}
        summary = {
            "ranks": comm.size,
            "steps": args.steps,
            "batch": args.batch,
            "slow_rank": args.slow,
            "slowdown": args.slowdown,
            "work_seconds_per_example": args.work,
            "examples_uncoded": examples[0],
            "examples_coded": examples[1],
            **reports,
            "uncoded_over_coded": step["uncoded"] / step["coded"],
            "coded_over_ideal": step["coded"] / step["coded_ideal"],
            "price": step["coded_ideal"] / step["uncoded_ideal"],
            "between_runs": largest_difference(
                results["uncoded"][0], results["coded"][0]
            ),
            "plan": json.loads(group.plan.to_json()),
        }
        if comm.rank == 0:
            show(summary)
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / "summary.json"
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            draw(
                results["uncoded"],
                results["coded"],
                results["coded_ideal"],
                args.out / "loss.png",
            )
            print(f"\nwrote {path} and {args.out / 'loss.png'}")


if __name__ == "__main__":
    main()
