"""From 10 to 1,000,000 ranks: where do ring, tree, star and coded tree cross?

    .venv/bin/python benchmarks/scaling.py

Simulated (`jaxcoded.tools.simulator`; simulate.py tests its accuracy). Weak scaling:
for any number of ranks, a rank takes 100 ms for its equal part of the batch, and the
sum has 100 MB. Straggler models: a light tail (work takes 1 + x times as long, x
exponential with mean 0.2), a heavy one (x Pareto with shape 1.5 and scale 0.2), and the
last rank always ten times slower. Links have 1, 10 or 100 Gb/s and 50 µs.

Parents add up their children's messages, or families form long sums in sections, as the
engine does between hosts. Trees, stars and codes show the best of several fan-outs and
numbers of stragglers, as a user would choose. So the comparison is between the best settings with a code and without a
code, not between one setting of each. Results are medians over rounds, as means of heavy tails need too many rounds.
The benchmark prints the fastest schemes, and stores all results with a picture.
"""

import argparse
import csv
import dataclasses
import itertools
import pathlib

import numpy as np
from tqdm import tqdm

from jaxcoded.tools.report.pictures import COLOURS, MARKERS, picture
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate, stragglers

MODELS = {
    "light tail": stragglers.Exponential(work=0.2),
    "heavy tail": stragglers.Pareto(shape=1.5, scale=0.2),
    "one slow rank": stragglers.FixedSlow(ranks=(-1,), factor=10),
}
GIGABITS = (1, 10, 100)
WORK, PAYLOAD = 0.1, 100e6  # seconds of a rank's equal part, and bytes of the sum
FANOUTS = (2, 4, 8, 16, 32, 100, 1000)
IN_SECTIONS = "in sections"  # how the engine forms long sums between hosts


def layouts(size):
    """Return the variants of each scheme, by name."""
    star = size - 1
    trees = [n for n in FANOUTS if n < star]
    lost = sorted({max(1, round(star * part)) for part in (0.01, 0.05)})
    stars = {"": Layout.balanced(size, star)}
    coded_stars = {f"s={s}": Layout.balanced(size, star, s) for s in lost if s < star}
    uncoded_trees = {f"n={n}": Layout.balanced(size, n) for n in trees}
    coded_trees = {
        f"n={n} s={s}": Layout.balanced(size, n, s)
        for n, s in itertools.product(trees, (1, 2, 4))
        if s < n / 2
    }
    chosen = {
        "ring": {"": Ring(size)},
        "tree": uncoded_trees,
        "star": stars,
        "coded star": coded_stars,
        f"star {IN_SECTIONS}": stars,
        f"coded star {IN_SECTIONS}": coded_stars,
        "coded tree": coded_trees,
        f"tree {IN_SECTIONS}": uncoded_trees,
        f"coded tree {IN_SECTIONS}": coded_trees,
    }
    return {scheme: some for scheme, some in chosen.items() if some}


def study(sizes, most_rounds, events):
    """Return rows: model, Gb/s, ranks, scheme, variant, load in equal parts, seconds."""
    rows = []
    with tqdm(total=sum(sizes) * len(MODELS) * len(GIGABITS), desc="ranks") as progress:
        for size in sizes:
            schemes = layouts(size)
            rounds = int(np.clip(events / size, 5, most_rounds))
            for (name, model), rate in itertools.product(MODELS.items(), GIGABITS):
                for scheme, some in schemes.items():
                    network = Network.of(rate)
                    if not scheme.endswith(IN_SECTIONS):
                        network = dataclasses.replace(network, sections_from=0)
                    times = {
                        which: np.median(
                            simulate(
                                layout,
                                network,
                                payload=PAYLOAD,
                                work=WORK * size,
                                stragglers=model,
                                rounds=rounds,
                            ).seconds[1:]
                        )
                        for which, layout in some.items()
                    }
                    best = min(times, key=times.__getitem__)
                    load = some[best].loads.max() * size
                    rows.append((name, rate, size, scheme, best, load, times[best]))
                progress.update(size)
    return rows


def verdicts(rows):
    """Return the fastest schemes over ranges of ranks."""
    for model, rate in itertools.product(MODELS, GIGABITS):
        some = [row for row in rows if row[:2] == (model, rate)]
        winners = []
        for size in dict.fromkeys(row[2] for row in some):
            winners.append((size, min((r[6], r[3]) for r in some if r[2] == size)[1]))
        runs = [
            (winner, [size for size, _ in run])
            for winner, run in itertools.groupby(winners, key=lambda pair: pair[1])
        ]
        text = ", ".join(
            f"{winner} for {run[0]:,}" + (f" to {run[-1]:,}" if len(run) > 1 else "")
            for winner, run in runs
        )
        print(f"{model}, {rate} Gb/s: {text} ranks")


def draw(rows, path):
    schemes = list(dict.fromkeys(row[3] for row in rows))
    shapes = list(
        dict.fromkeys(name.removesuffix(f" {IN_SECTIONS}") for name in schemes)
    )
    with picture(
        path, len(MODELS), len(GIGABITS), size=(9.5, 7.6), sharex=True, sharey=True
    ) as (figure, axes):
        for (i, model), (j, rate) in itertools.product(
            enumerate(MODELS), enumerate(GIGABITS)
        ):
            for scheme in schemes:
                some = [
                    row for row in rows if row[:2] + row[3:4] == (model, rate, scheme)
                ]
                number = shapes.index(scheme.removesuffix(f" {IN_SECTIONS}"))
                line = "--" if scheme.endswith(IN_SECTIONS) else "-"
                axes[i, j].loglog(
                    [row[2] for row in some],
                    [row[6] for row in some],
                    f"{MARKERS[number]}{line}",
                    color=COLOURS[number],
                    markersize=4,
                    label=scheme,
                )
            axes[i, j].set_title(f"{model}, {rate} Gb/s")
        for ax in axes[:, 0]:
            ax.set_ylabel("median time of a step, s")
            ax.set_ylim(0.1, 200)
        for ax in axes[-1]:
            ax.set_xlabel("ranks")
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=5)
        figure.suptitle(
            "With heavy tails or a slow rank coded trees win large jobs, coded stars small ones",
            x=0.01,
            ha="left",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    sizes = (
        [10, 100] if args.smoke else [10, 30, 100, 300, 1000, 3000, 10**4, 10**5, 10**6]
    )
    rows = study(sizes, 20 if args.smoke else 200, 3e5)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "scaling.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["model", "Gb/s", "ranks", "scheme", "which", "load", "seconds"]
        )
        writer.writerows(rows)
    draw(rows, args.out / "scaling.png")
    verdicts(rows)


if __name__ == "__main__":
    main()
