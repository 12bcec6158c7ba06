"""Report the measurements of `benchmarks/training.py` as tables, pictures and text."""

import csv
import dataclasses

import numpy as np

from jaxcoded.tools.report.pictures import COLOURS, MARKERS, picture
from jaxcoded.tools.simulator.stragglers import named

# Bound on the relative error of a sum in float32, with the codes' amplification.
TOLERANCE = 1e-3
# Seconds of an iteration with 10 workers and s = 1, read from a figure of Tandon et al.
PUBLISHED = {"naive": 0.230, "frc": 0.204, "crc": 0.168, "ignore": 0.145}
# One scheme of each kind, so that the lines are distinguishable.
DRAWN = ("naive", "allreduce", "ignore", "frc", "partial", "kadhe", "coded_reduce")
UNCODED = ("naive", "tree", "ring", "allreduce")
EVALUATED = 40  # rounds of a run for which loss and AUC are computed
FAMILIES = ("waits for all", "ignores stragglers", "coded, star", "coded, tree")


@dataclasses.dataclass
class Run:
    """A run of one scheme under one model; without ``steps`` if the run would not end.

    Attributes:
        problem, scheme, label, model: their names.
        load: the largest part of the examples that a rank has.
        steps: seconds of each iteration on the root.
        in_time: median of the median steps of ranks that worked in every round.
        error: largest relative error of a sum.
        used: fraction of the rounds that used the slowest rank's message; NaN if no rank is slower.
        overrun: fraction of the time by which real computation exceeded the model, on the worst rank.
        times, losses, areas: the course of the training.
    """

    problem: str
    scheme: str
    label: str
    model: str
    load: float
    exact: bool
    steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    in_time: float = np.nan
    error: float = np.nan
    used: float = np.nan
    overrun: float = np.nan
    times: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    losses: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    areas: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def ends(self):
        return len(self.steps) > 0

    @property
    def mean(self):
        return self.steps.mean() if self.ends else np.nan

    @property
    def family(self):
        if self.scheme in UNCODED:
            return FAMILIES[0]
        if not self.exact:
            return FAMILIES[1]
        return FAMILIES[3 if self.scheme.startswith("coded_reduce") else 2]

    def row(self):
        """Return the row of the table."""
        return {
            "problem": self.problem,
            "model": self.model,
            "scheme": self.scheme,
            "label": self.label,
            "ends": "yes" if self.ends else "does not end",
            "load": f"{self.load:.4f}",
            "rounds": len(self.steps),
            "step_median_s": number(np.median(self.steps) if self.ends else np.nan),
            "step_p95_s": number(
                np.quantile(self.steps, 0.95) if self.ends else np.nan
            ),
            "step_mean_s": number(self.mean),
            "step_median_ranks_in_time_s": number(self.in_time),
            "final_loss": number(self.losses[-1] if len(self.losses) else np.nan),
            "final_test_auc": number(self.areas[-1] if len(self.areas) else np.nan),
            "max_relative_error": number(self.error),
            "slowest_rank_used": number(self.used),
            "overrun": number(self.overrun),
        }


def number(value):
    return f"{value:.5g}" if np.isfinite(value) else ""


def runs(cases, results, problems, schemes, ranks):
    """Return the figures of all runs, from the ranks' files.

    Raises:
        SystemExit: a sum that should be exact is not.
    """
    out = []
    for case in cases:
        scheme, seen = schemes[case["scheme"]], results[case["name"]]
        plan, root = scheme.plan(ranks), seen[0]
        problem = problems[case["problem"]]
        run = Run(
            case["problem"],
            case["scheme"],
            scheme.label,
            case["model_name"],
            float(plan.load),
            scheme.exact,
            steps=np.diff(root["ends"], prepend=0.0),
            in_time=in_time(seen),
            error=float(root["errors"].max()),
            used=slowest_used(case, plan, problem, seen),
            overrun=max(float(r["overrun"] / r["ends"][-1]) for r in seen.values()),
        )
        if scheme.exact and not run.error < TOLERANCE:
            raise SystemExit(
                f"{case['name']}: a sum is off by {run.error:.1e} of the exact one, more "
                f"than {TOLERANCE:.0e}"
            )
        if root["thetas"].size:
            last = len(root["ends"]) - 1
            at = np.unique(np.linspace(0, last, EVALUATED).round().astype(int))
            run.losses, run.areas = problem.scores(root["thetas"][at])
            # the parameters of a round exist at the end of the previous round
            run.times = np.concatenate([[0.0], root["ends"]])[at]
        out.append(run)
    return out


def in_time(seen):
    medians = [
        np.median(np.diff(r["ends"], prepend=0.0))
        for rank, r in seen.items()
        if rank and r["worked"].all()
    ]
    return float(np.median(medians)) if medians else np.nan


def slowest_used(case, plan, problem, seen):
    """Return the fraction of rounds in which the slowest rank's message entered its parent's sum."""
    loads = np.array([float(plan.load_of(rank)) for rank in range(plan.size)])
    work = loads * problem.examples * case["an_example"]
    delays = named(case["model"]).rounds(plan.size, seed=1)
    used = {rank: {} for rank in seen}
    for rank, arrays in seen.items():
        if "numbers" in arrays:
            used[rank] = dict(zip(arrays["numbers"].tolist(), arrays["used"]))
    hits = []
    for count, delay in zip(range(1, len(seen[0]["ends"]) + 1), delays):
        times = delay.time(work)
        slowest = int(times.argmax())
        if times[slowest] < 1.05 * work[slowest]:
            continue  # no rank is slow
        if "numbers" not in seen[0]:
            hits.append(True)  # without the engine all ranks wait for each other
            continue
        parent = plan.tree.parents[slowest]
        row = used.get(parent, {}).get(count)
        if row is not None:
            hits.append(bool(row[seen[parent]["children"].tolist().index(slowest)]))
    return float(np.mean(hits)) if hits else np.nan


def that_do_not_end(chosen, schemes):
    """Return the runs that would wait for a dead rank for ever, and that are therefore not done."""
    return [
        Run("real", name, schemes[name].label, "killed", np.nan, schemes[name].exact)
        for name in chosen
        if not schemes[name].survives
    ]


def write(runs, path):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(runs[0].row()))
        writer.writeheader()
        writer.writerows(run.row() for run in runs)


def table(runs):
    """Return the table as text, with a block for each model."""
    for problem, model in dict.fromkeys((run.problem, run.model) for run in runs):
        print(f"\n{problem}, {model}")
        print(
            f"{'':28}{'load':>7}{'rounds':>8}{'median':>10}{'p95':>10}{'mean':>10}"
            f"{'loss':>9}{'AUC':>8}{'error':>10}{'slowest':>9}"
        )
        for run in runs:
            if (run.problem, run.model) != (problem, model):
                continue
            if not run.ends:
                print(f"{run.label:28}{'does not end':>25}")
                continue
            row = run.row()
            p = np.quantile(run.steps, [0.5, 0.95])
            loss, area = row["final_loss"][:6], row["final_test_auc"][:6]
            used = f"{run.used:.0%}" if np.isfinite(run.used) else "–"
            print(
                f"{run.label:28}{run.load:7.3f}{len(run.steps):8}"
                f"{p[0] * 1e3:7.0f} ms{p[1] * 1e3:7.0f} ms{run.mean * 1e3:7.0f} ms"
                f"{loss:>9}{area:>8}{run.error:10.0e}{used:>9}"
            )
    print(
        '\n"error": the largest of a round, relative to the gradient over all examples;\n'
        '"slowest": share of the rounds in which the slowest rank\'s message was used'
    )
    over = [run for run in runs if run.ends and run.overrun > 0.1]
    if over:
        worst = max(over, key=lambda run: run.overrun)
        print(
            f"in {len(over)} runs real computation took more than 10 % longer than the "
            f"compute model says (worst: {worst.label}, {worst.model}, "
            f"{worst.overrun:.0%}): the machine is too busy for these figures"
        )


def one_host(runs, folder, naive):
    if not runs:
        return
    write(runs, folder / "training.csv")
    table(runs)
    real = [run for run in runs if run.problem == "real"]
    models = list(dict.fromkeys(run.model for run in real))
    if real:
        bars(
            real,
            models,
            folder / "iterations.png",
            f"One host: {who_wins(real, models)}",
        )
        for what, label in (("losses", "training loss"), ("areas", "test AUC")):
            curves(real, models, what, label, folder / f"{what}.png")
    mixture = [run for run in runs if run.problem == "mixture"]
    if mixture:
        curves(mixture, ["bursty"], "losses", "training loss", folder / "mixture.png")
    print(f"\nA rank's work takes {naive * 1e3:.0f} ms where nothing is coded.")
    for model in models:
        verdict([run for run in real if run.model == model], model)


def verdict(runs, model):
    """Return a text that compares the best exact scheme with today's methods."""
    coded = [r for r in runs if r.ends and r.exact and r.scheme not in UNCODED]
    plain = [r for r in runs if r.scheme in UNCODED]
    if not coded or not plain:
        return
    best = min(coded, key=lambda run: run.mean)
    words = f"{model}: the fastest exact code is {best.label} ({best.mean * 1e3:.0f} ms"
    ending = [run for run in plain if run.ends]
    if not ending:
        print(f"{words} an iteration); without a code nothing ends")
        return
    other = min(ending, key=lambda run: run.mean)
    print(
        f"{words} an iteration), which takes {best.mean / other.mean:.2f} times as long "
        f"as the best without a code: {other.label}"
    )


def who_wins(runs, models):
    """Return the title of a picture of iterations: which scheme wins."""
    won = []
    for model in models:
        exact = [run for run in runs if run.model == model and run.ends and run.exact]
        best = min(exact, key=lambda run: run.mean, default=None)
        if best and best.scheme not in UNCODED:
            won.append(model)
    if not won:
        return "no exact code is faster than waiting for all"
    return f"an exact code is fastest under: {', '.join(won)}"


def bars(runs, models, path, title):
    """Draw the mean seconds of an iteration, in a panel for each model."""
    labels = list(dict.fromkeys(run.label for run in runs))
    columns = min(4, len(models))
    rows = -(-len(models) // columns)
    size = 2.2 + 2.4 * columns, 0.9 + rows * (0.6 + 0.19 * len(labels))
    with picture(path, rows, columns, size, sharey=True, squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", fontsize="medium")
        for ax, model in zip(axes.flat, models):
            for run in (run for run in runs if run.model == model):
                y = labels.index(run.label)
                if run.ends:
                    colour = COLOURS[FAMILIES.index(run.family)]
                    ax.barh(y, run.mean, color=colour, height=0.7)
                else:
                    ax.text(0, y, " does not end", va="center", fontsize=7)
            ax.set_title(model)
            ax.grid(axis="y", visible=False)
        for ax in axes.flat[len(models) :]:
            ax.set_visible(False)
        for ax in axes[:, 0]:
            ax.set_yticks(range(len(labels)), labels)
        axes[0, 0].invert_yaxis()
        for ax in axes[-1]:
            ax.set_xlabel("seconds per iteration")
        used = [f for f in FAMILIES if any(run.family == f for run in runs)]
        from matplotlib.patches import Patch

        handles = [Patch(color=COLOURS[FAMILIES.index(f)], label=f) for f in used]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(used))


def curves(runs, models, what, label, path):
    """Draw loss or AUC against wall-clock time, in a panel for each model."""
    columns = min(4, len(models))
    rows = -(-len(models) // columns)
    size = 1.6 + 2.5 * columns, 1.0 + 2.2 * rows
    drawn = [run for run in runs if run.scheme in DRAWN and run.ends]
    title = {
        "losses": "How soon the loss falls under each straggler model",
        "areas": "How soon the model tells the test set's classes apart",
    }[what]
    with picture(path, rows, columns, size, sharey=True, squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", fontsize="medium")
        lines = {}
        for ax, model in zip(axes.flat, models):
            for run in (run for run in drawn if run.model == model):
                number = DRAWN.index(run.scheme)
                values = getattr(run, what)
                first = what == "areas"  # all initial scores are equal
                lines[run.label] = ax.plot(
                    run.times[first:],
                    values[first:],
                    color=COLOURS[number],
                    marker=MARKERS[number],
                    markevery=0.25,
                    markersize=4,
                )[0]
            ends = [run.times[-1] for run in drawn if run.model == model]
            if ends:  # all runs had the same time, apart from a single long round
                ax.set_xlim(0, 1.2 * np.median(ends))
            ax.set_title(model)
        for ax in axes.flat[len(models) :]:
            ax.set_visible(False)
        for ax in axes[:, 0]:
            ax.set_ylabel(label)
        for ax in axes[-1]:
            ax.set_xlabel("wall clock, seconds")
        fig.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=columns + 1
        )


def tandon(runs, folder, workers):
    """Draw the measurements next to the published figure."""
    write(runs, folder / "tandon.csv")
    by_name = {run.scheme: run for run in runs}
    print(f"\nTandon et al. 2017, seconds of an iteration: {workers} workers, s = 1")
    print(f"{'':28}{'here':>10}{'÷ naive':>9}{'published':>11}{'÷ naive':>9}")
    naive = by_name.get("naive")
    for name, published in PUBLISHED.items():
        if name in by_name:
            run = by_name[name]
            ratio = run.mean / naive.mean if naive else np.nan
            print(
                f"{run.label:28}{run.mean:10.3f}{ratio:9.2f}{published:11.3f}"
                f"{published / PUBLISHED['naive']:9.2f}"
            )
    print(
        "The delays are ours, their scale fitted to the published figure, whose machines'\n"
        "delays are not known: comparable is the order, not the seconds. Here the root goes\n"
        "on with one answer of every group of fractional repetition, often before n − s."
    )
    if naive:
        shown = [name for name in PUBLISHED if name in by_name]
        with picture(folder / "tandon.png") as (_, ax):
            x = np.arange(len(shown))
            measured = [by_name[name].mean / naive.mean for name in shown]
            reference = [PUBLISHED[name] / PUBLISHED["naive"] for name in shown]
            ax.bar(x - 0.2, measured, 0.4, label="here")
            ax.bar(x + 0.2, reference, 0.4, label="published")
            ax.set_xticks(
                x, [by_name[name].label.replace(", ", ",\n") for name in shown]
            )
            ax.set_ylabel("seconds per iteration ÷ naive")
            order = sorted(shown, key=lambda name: by_name[name].mean)
            first = by_name[order[0]].label
            ax.set_title(f"{workers} workers, s = 1: {first} is fastest here")
            ax.grid(axis="x", visible=False)
            ax.legend()


def many_ranks(runs, folder, ranks, fanout):
    write(runs, folder / f"training-{ranks}.csv")
    table(runs)
    models = list(dict.fromkeys(run.model for run in runs))
    bars(
        runs,
        models,
        folder / f"iterations-{ranks}.png",
        f"{ranks - 1} workers: {who_wins(runs, models)}",
    )
    print(f"\n{ranks - 1} workers, fan-out {fanout}:")
    for model in models:
        verdict([run for run in runs if run.model == model], model)


def several_hosts(runs, folder, hosts, rate):
    write(runs, folder / f"training-hosts-{hosts}.csv")
    table(runs)
    models = list(dict.fromkeys(run.model for run in runs))
    labels = list(dict.fromkeys(run.label for run in runs))
    titles = {"none": "nobody straggles", "fixed": "one worker 10 times slower"}
    from matplotlib.ticker import LogLocator

    size = 1.8 + 3.4 * len(models), 4.0
    path = folder / f"training-hosts-{hosts}.png"
    with picture(path, 1, len(models), size, sharey=True, squeeze=False) as (fig, axes):
        longest = max(int(run.problem) for run in runs)
        largest = [run for run in runs if int(run.problem) == longest]
        firsts = [
            min(
                (r for r in largest if r.model == model),
                key=lambda r: np.median(r.steps),
            )
            for model in models
        ]
        names = " and ".join(dict.fromkeys(run.label for run in firsts))
        title = f"{hosts} hosts at {rate}: fastest for p = {longest:,} is {names}"
        fig.suptitle(title, x=0.01, ha="left", fontsize="medium")
        for ax, model in zip(axes[0], models):
            for number, label in enumerate(labels):
                some = [r for r in runs if (r.model, r.label) == (model, label)]
                ax.loglog(
                    [int(run.problem) for run in some],
                    [np.median(run.steps) for run in some],
                    color=COLOURS[number],
                    marker=MARKERS[number],
                    label=label,
                )
            ax.set_title(titles.get(model, model))
            ax.set_xlabel("p, float32 numbers in the gradient")
        axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0, 0].yaxis.set_major_formatter("{x:g}")
        axes[0, 0].yaxis.set_minor_formatter("")
        axes[0, 0].set_ylabel("seconds per iteration, median")
        handles, names = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, names, loc="outside lower center", ncols=3)
    print(f"\n{hosts} hosts, {rate} to and from each:")
    for problem in dict.fromkeys(run.problem for run in runs):
        for model in models:
            some = [r for r in runs if (r.problem, r.model) == (problem, model)]
            verdict(some, f"p = {int(problem):,}, {titles.get(model, model)}")
