"""Train on handwritten digits with 13 ranks, one of them ten times slower.

    scripts/mpirun -n 13 .venv/bin/python -m mpi4py examples/digits.py

The program trains the same network on the same global batches in three ways:

- uncoded: ``mpi4jax.allreduce``. Every worker computes its own part of each batch.
- coded: `jaxcoded.coded_value_and_grad` on a tree that tolerates one missing child of
  every parent. Several workers compute the same examples.
- shared: the same call in a group with `jaxcoded.Shared`. Workers compute every example
  once. Workers that have finished their own examples compute examples of late workers.

Each way runs once without slow workers and once with one slow worker. The program
prints a table and writes ``summary.json`` and ``loss.png``.

The network is small, and 13 ranks may share a few cores. So a worker sleeps for each
example whose gradient it computes. A step takes these sleeps, plus the real computation
and communication on these cores.
"""

import argparse
import json
import os
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
    """Load 1,797 images of 8 × 8 pixels from scikit-learn on rank 0, for all ranks.

    Return training and test set, each float32 ``(n, 64)`` and int32 ``(n,)``.
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
    """A worker that sleeps for each gradient.

    Attributes:
        seconds: how long it sleeps for each example.
        examples: the number of examples that it has computed.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.examples = 0

    def losses(self, params, batch):
        """Return the cross entropy of each example."""
        x, y = batch

        def work():
            self.examples += len(x)
            time.sleep(self.seconds * len(x))
            return np.float32(0)

        # runs only if the gradient is computed; a late rank skips both
        x = x + jax.pure_callback(work, jax.ShapeDtypeStruct((), jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def uncoded_gradient(losses, weights, batch_size):
    """Return the usual uncoded step: the local gradient, then ``mpi4jax.allreduce``."""

    def gradient(params, batch):
        def weighted(params):
            return weights @ losses(params, batch) / batch_size

        def compute():
            return jax.value_and_grad(weighted)(params)

        def skip():
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(compute))

        local = jax.lax.cond(jnp.any(weights != 0), compute, skip)
        return jaxcoded.baselines.allreduce(local, comm)

    return gradient


def coded_gradient(losses, group, part):
    value_and_grad = jaxcoded.coded_value_and_grad(losses, group)
    return lambda params, batch: value_and_grad(params, part.of(batch))


def training_step(gradient, optimizer):
    @jax.jit
    def step(params, state, batch):
        loss, grads = gradient(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(name, step, optimizer, worker, indices, train_set, args):
    """Run the steps. Return parameters, losses, the times at which steps ended, and the
    number of examples that this rank has computed.
    """
    params = initial_parameters()
    state = optimizer.init(params)
    x, y = train_set
    batches = np.random.default_rng(0)  # the same global batches in all runs
    history, ends = [], []
    jax.block_until_ready(step(params, state, (x[indices], y[indices])))  # compile
    comm.Barrier()
    worker.examples = 0
    start = time.perf_counter()
    for _ in tqdm(range(args.steps), desc=name, disable=comm.rank != 0):
        own = batches.permutation(len(x))[: args.batch][indices]
        params, state, loss = step(params, state, (x[own], y[own]))
        history.append(float(loss))
        ends.append(time.perf_counter() - start)
    return params, np.array(history), np.array(ends), worker.examples


def report(params, history, ends, examples, test_set, slow):
    x, y = test_set
    durations = np.diff(ends, prepend=0)
    return {
        "step_seconds_median": float(np.median(durations)),
        "step_seconds_p95": float(np.quantile(durations, 0.95)),
        "final_loss": float(history[-1]),
        "test_accuracy": float(np.mean(np.argmax(logits(params, x), axis=1) == y)),
        "slow_worker_examples": comm.bcast(examples, slow),
        "between_ranks": comm.allreduce(
            largest_difference(params, comm.bcast(params)), op=MPI.MAX
        ),
    }


def work_alone(args, examples):
    """Return for each way the seconds of a step in which workers only sleep."""
    workers = comm.size - 1
    whole = args.batch * args.work
    return {
        "uncoded_ideal": examples[0] * args.work,
        "uncoded": examples[0] * args.work * args.slowdown,
        "coded_ideal": examples[1] * args.work,
        "coded": examples[1] * args.work,
        "shared_ideal": whole / workers,
        "shared": whole / (workers - 1 + 1 / args.slowdown),
    }


def largest_difference(first, second):
    """Return the largest absolute difference between two sets of parameters."""
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def show(summary):
    late = f"rank {summary['slow_rank']} slow"
    computes = f"rank {summary['slow_rank']} computes"
    print(
        f"\n{'':21}{'step':>8}{'work alone':>12}{'95 % below':>12}{'final loss':>12}"
        f"{'accuracy':>10}{computes:>18}"
    )
    for scheme in SCHEMES:
        for when, who in (("_ideal", "nobody slow"), ("", late)):
            run = summary[scheme + when]
            each = run["slow_worker_examples"] / summary["steps"]
            step, work, p95 = (
                f"{1e3 * run[name]:.0f} ms"
                for name in ("step_seconds_median", "work_seconds", "step_seconds_p95")
            )
            print(
                f"{scheme if when else '':9}{who:12}{step:>8}{work:>12}{p95:>12}"
                f"{run['final_loss']:12.5f}{run['test_accuracy']:10.1%}"
                f"{each:9.0f} examples"
            )
    print(
        f"\nNobody slow: with the code a step takes {summary['price']:.1f} times as long as "
        f"uncoded ({summary['examples_coded']} examples for each worker in place of "
        f"{summary['examples_uncoded']}),\nand with shared work "
        f"{summary['price_of_sharing']:.1f} times (every example is computed once)."
        f"\nOne worker {summary['slowdown']:g} times slower: uncoded "
        f"{summary['uncoded_over_ideal']:.1f} times as long as with nobody slow, coded "
        f"{summary['coded_over_ideal']:.1f} times, shared "
        f"{summary['shared_over_ideal']:.1f} times."
        f"\n(Work alone: the sleep in a step. Apart from it, {summary['ranks']} ranks compute and "
        f"communicate on {os.cpu_count()} cores. While a rank waits,\nmpi4jax.allreduce keeps its "
        "core busy, and jaxcoded leaves the core to other ranks.)"
        f"\nThe sums are the same: parameters differ by {summary['between_ranks']:.0e} "
        f"between ranks, and by {summary['between_runs']:.0e} between these runs."
    )


def draw(results, summary, path):
    """Draw the loss against wall-clock time, and the time of a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, steps) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained"
    )
    late = f"one worker {summary['slowdown']:g} × slower"
    for x, (scheme, colour) in enumerate(SCHEMES.items()):
        for when, style, shift, alpha in (
            ("_ideal", ":", -0.2, 0.45),
            ("", "-", 0.2, 1),
        ):
            _, history, ends, _ = results[scheme + when]
            loss.plot(ends, history, style, color=colour)
            run = summary[scheme + when]
            took = 1e3 * run["step_seconds_median"]
            bar = steps.bar(x + shift, took, 0.38, color=colour, alpha=alpha)
            steps.bar_label(bar, fmt="%.0f", padding=2)
            alone = 1e3 * run["work_seconds"]
            steps.plot([x + shift - 0.19, x + shift + 0.19], [alone, alone], "k", lw=1)
        loss.plot([], [], color=colour, label=f"{scheme}, {late}")
    loss.plot([], [], ":", color="gray", label="the same with nobody slow")
    loss.set(
        xlabel="wall-clock time [s]",
        ylabel="loss of the batch",
        yscale="log",
        title=f"The same training on {summary['ranks']} ranks",
    )
    steps.bar(0, 0, color="gray", alpha=0.45, label="nobody slow")
    steps.bar(0, 0, color="gray", label=late)
    steps.plot([], [], "k", lw=1, label="work alone")
    steps.set(ylabel="milliseconds", title="What a step takes")
    steps.set_xticks(range(len(SCHEMES)), SCHEMES)
    steps.margins(y=0.1)
    for axes in (loss, steps):
        axes.legend()
    loss.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


SCHEMES = {"uncoded": "tab:orange", "coded": "tab:blue", "shared": "tab:green"}


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=300, help="global batch size")
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument(
        "--slow",
        type=int,
        default=min(5, comm.size - 1),
        help="rank of the slow worker",
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=10,
        help="how many times slower that worker is",
    )
    parser.add_argument(
        "--work",
        type=float,
        default=3e-3,
        help="seconds of sleep for an example's gradient",
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/demo"))
    args = parser.parse_args()
    if not 0 < args.slow < comm.size:
        parser.error(
            f"--slow={args.slow} is not a worker: give a rank from 1 to {comm.size - 1}"
        )

    train_set, test_set = digits()
    if not 0 < args.batch <= len(train_set[0]):
        parser.error(f"--batch must be from 1 to {len(train_set[0])}")
    # if many ranks share a few cores, compiling a step may take long
    options = jaxcoded.Options(deadline=100.0)
    with (
        jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=1, fanout=3), options=options
        ) as coded,
        jaxcoded.CodedGroup(
            comm,
            jaxcoded.Shared(
                replicas=min(2, comm.size - 2), blocks=5, root_computes=False
            ),
            options=options,
        ) as shared,
    ):
        plain = jaxcoded.make_plan(
            comm.size, jaxcoded.Coded(stragglers=0, fanout=comm.size)
        )
        own = plain.strategy.assignment(plain, comm.rank, args.batch)
        examples = [
            comm.allreduce(int(np.count_nonzero(weights)), op=MPI.MAX)
            for weights in (own[1], coded.batch(args.batch).weights)
        ]
        if comm.rank == 0:
            print(f"coded: {coded.plan.describe()}\n\nshared: {shared.plan.describe()}")
            print(
                f"\nAn example's gradient takes {args.work * 1e3:g} ms of sleep, and "
                f"{args.work * args.slowdown * 1e3:g} ms on rank {args.slow} while it is slow. "
                f"A batch has {args.batch} examples.\n"
            )
        results = {}
        for scheme in SCHEMES:
            worker = Worker(args.work)
            if scheme == "uncoded":
                indices, weights = own
                gradient = uncoded_gradient(worker.losses, weights, args.batch)
            else:
                group = coded if scheme == "coded" else shared
                part = group.batch(args.batch)
                indices = part.indices
                gradient = coded_gradient(worker.losses, group, part)
            optimizer = optax.adam(args.learning_rate)
            step = training_step(gradient, optimizer)
            for when, who in (("_ideal", "nobody"), ("", f"rank {args.slow}")):
                slow = comm.rank == args.slow and not when
                worker.seconds = args.work * (args.slowdown if slow else 1)
                results[scheme + when] = train(
                    *(f"{scheme}, {who} slow", step, optimizer, worker, indices),
                    *(train_set, args),
                )

        reports = {
            name: report(*result, test_set, args.slow)
            for name, result in results.items()
        }
        for name, seconds in work_alone(args, examples).items():
            reports[name]["work_seconds"] = seconds
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
            **{
                f"{name}_over_ideal": step[name] / step[f"{name}_ideal"]
                for name in SCHEMES
            },
            "uncoded_over_coded": step["uncoded"] / step["coded"],
            "uncoded_over_shared": step["uncoded"] / step["shared"],
            "price": step["coded_ideal"] / step["uncoded_ideal"],
            "price_of_sharing": step["shared_ideal"] / step["uncoded_ideal"],
            "between_ranks": max(run["between_ranks"] for run in reports.values()),
            "between_runs": max(
                largest_difference(results["uncoded"][0], result[0])
                for result in results.values()
            ),
            "plan": json.loads(coded.plan.to_json()),
        }
        if comm.rank == 0:
            show(summary)
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / "summary.json"
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            draw(results, summary, args.out / "loss.png")
            print(f"\nwrote {path} and {args.out / 'loss.png'}")


if __name__ == "__main__":
    main()
