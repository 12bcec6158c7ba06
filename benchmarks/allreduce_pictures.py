"""Draw what ``allreduce.py`` has measured, for one number of ranks and for several.

.venv/bin/python benchmarks/allreduce_pictures.py build/benchmarks
"""

import csv
import pathlib
import sys

from jaxcoded._pictures import COLOURS, MARKERS, picture

# The engine in full lines, the others in dashed ones. What else there is, is in the tables.
ENGINE = (
    "engine, s=0, token",
    "engine, s=1, token",
    "engine, s=2, token",
    "engine, s=0, m=2, token",
    "engine, s=1, m=2, token",
    "engine, s=2, m=2, token",
)
OTHERS = (
    "mpi4jax transport, s=1",
    "mpi4jax.allreduce",
    "psum over gloo",
    "ring",
    "master-worker",
    "mpi4py Allreduce",
)
LOOKS = {
    name: {
        "label": name,
        "color": colour,
        "marker": marker,
        "linestyle": style,
        "markerfacecolor": colour if style == "-" else "white",
        "markersize": 4.5,
        "linewidth": 1.4,
    }
    for names, style in ((ENGINE, "-"), (OTHERS, "--"))
    for name, colour, marker in zip(names, COLOURS, MARKERS)
}
TIME = "time of a call [ms]"


def read(folder):
    """The rows of all tables in a folder."""
    rows = []
    for path in folder.glob("allreduce-*.csv"):
        with path.open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    for row in rows:
        row["ranks"], row["bytes"] = int(row["ranks"]), int(row["bytes"])
        row["p50 [ms]"], row["p99 [ms]"] = (1e3 * float(row[p]) for p in ("p50", "p99"))
        row["bus [GB/s]"] = float(row["bus_bandwidth"]) / 1e9
    return sorted(rows, key=lambda row: (row["ranks"], row["bytes"]))


def of(rows, **wanted):
    """The rows with these values."""
    return [row for row in rows if wanted.items() <= row.items()]


def words(size):
    """A number of bytes."""
    units = ["B", "KiB", "MiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:g} {units[0]}"


def draw_lines(axes, rows, x, y, until=None):
    """A line for each collective that is there, and bars up to another column; in the
    legend they stand as the lines end."""
    ends = {}
    for name, look in LOOKS.items():
        line = of(rows, collective=name)
        if line:
            where, values = [[row[column] for row in line] for column in (x, y)]
            (drawn,) = axes.plot(where, values, **look)
            ends[drawn] = values[-1]
            if until:
                tops = [row[until] for row in line]
                axes.vlines(where, values, tops, color=look["color"], alpha=0.3)
    axes.set(yscale="log")
    return sorted(ends, key=ends.get, reverse=True)


def against_size(path, rows, y, label, title, until=None):
    with picture(path, size=(7.8, 4.4)) as (_, axes):
        lines = draw_lines(axes, rows, "bytes", y, until)
        sizes = sorted({row["bytes"] for row in rows})
        axes.set(title=title, xlabel="message", ylabel=label, xscale="log")
        axes.set_xticks(sizes, map(words, sizes), rotation=30)
        axes.minorticks_off()
        axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1, 0.5))


def against_ranks(path, rows):
    """The smallest, a middle and the largest message that all tables have."""
    counts = sorted({row["ranks"] for row in rows})
    sizes = sorted(
        set.intersection(
            *({row["bytes"] for row in of(rows, ranks=ranks)} for ranks in counts)
        )
    )
    sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    with picture(path, 1, len(sizes), size=(10, 4), squeeze=False) as (figure, axes):
        for size, ax in zip(sizes, axes[0]):
            lines = draw_lines(ax, of(rows, bytes=size), "ranks", "p50 [ms]")
            ax.set(title=words(size), xlabel="ranks", ylabel=TIME)
            ax.set_xticks(counts)
        figure.legend(handles=lines, loc="outside right center")
        figure.suptitle(
            "More ranks on the same machine: median time of a call, nobody straggling",
            x=0.01,
            ha="left",
        )


def draw(folder):
    """Pictures of every table in a folder, and of all of them together."""
    rows = read(folder)
    counts = sorted({row["ranks"] for row in rows})
    for ranks in counts:
        its = of(rows, ranks=ranks)
        coded = of(its, collective=f"engine, s={int(ranks > 2)}, token")
        ratios = [float(row["mpi4jax.allreduce"]) for row in coded]
        against_size(
            folder / f"allreduce-{ranks}-latency.png",
            its,
            "p50 [ms]",
            f"{TIME}, median and up to p99",
            f"{ranks} ranks: {coded[0]['collective']} takes {min(ratios):.2g} to "
            f"{max(ratios):.2g} times as long as mpi4jax.allreduce",
            until="p99 [ms]",
        )
        best, other = (
            max(row["bus [GB/s]"] for row in lines)
            for lines in (coded, of(its, collective="mpi4jax.allreduce"))
        )
        against_size(
            folder / f"allreduce-{ranks}-bandwidth.png",
            its,
            "bus [GB/s]",
            "bus bandwidth [GB/s]",
            f"{ranks} ranks: {coded[0]['collective']} reaches {best:.2g} GB/s, "
            f"mpi4jax.allreduce {other:.2g} GB/s",
        )
    if len(counts) > 1:
        against_ranks(folder / "allreduce-ranks.png", rows)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]))
