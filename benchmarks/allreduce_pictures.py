"""Draw the measurements of ``allreduce.py``, for one number of ranks and for several.

.venv/bin/python benchmarks/allreduce_pictures.py build/benchmarks
"""

import csv
import pathlib
import sys

from jaxcoded.tools.report.pictures import COLOURS, MARKERS, picture

# The engine's lines are solid, the other lines dashed. Further collectives are only in the tables.
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
    for names, colours, style in ((ENGINE, COLOURS, "-"), (OTHERS, COLOURS[::-1], "--"))
    for name, colour, marker in zip(names, colours, MARKERS)
}
TIME = "time of a call [ms]"


def read(folder):
    """Return the rows of all tables in a folder."""
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
    """Return the rows with these values."""
    return [row for row in rows if wanted.items() <= row.items()]


def words(size):
    """Return a number of bytes as text."""
    units = ["B", "KiB", "MiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:g} {units[0]}"


def coded(rows):
    """Return the engine's rows with ``s = 1``, or 0 if there are too few ranks."""
    coded_rows, uncoded_rows = (
        of(rows, collective=f"engine, s={s}, token") for s in (1, 0)
    )
    return coded_rows or uncoded_rows


def draw_lines(axes, rows, x, y):
    """Draw a line for each collective in the rows. Return the lines in the order of
    their ends, from the top, for the legend.
    """
    ends = {}
    for name, look in LOOKS.items():
        line = of(rows, collective=name)
        if line:
            where, values = [[row[column] for row in line] for column in (x, y)]
            (drawn,) = axes.plot(where, values, **look)
            ends[drawn] = values[-1]
    axes.set(yscale="log")
    return sorted(ends, key=ends.get, reverse=True)


def joined(figure, title, lines):
    """Give all axes one title and one legend."""
    figure.suptitle(title, x=0.01, ha="left", size="medium")
    figure.legend(handles=lines, loc="outside right center")


def against_size(path, rows, columns, label, title):
    """Draw axes next to each other, one for each column, with its heading."""
    sizes = sorted({row["bytes"] for row in rows})
    count = len(columns)
    shape = {"size": (2.8 + 4.6 * count, 4.2), "squeeze": False, "sharey": True}
    with picture(path, 1, count, **shape) as (figure, (axes,)):
        lines = [draw_lines(ax, rows, "bytes", each) for ax, each in zip(axes, columns)]
        for ax, about in zip(axes, columns.values()):
            ax.set(title=about, xlabel="message", xscale="log")
            ax.set_xticks(sizes, map(words, sizes), rotation=30)
            ax.minorticks_off()
        axes[0].set(ylabel=label)
        joined(figure, title, lines[0])


def against_ranks(path, rows):
    """Draw the smallest, a middle and the largest message that all tables have, against
    ranks.
    """
    counts = sorted({row["ranks"] for row in rows})
    sizes = sorted(
        set.intersection(
            *({row["bytes"] for row in of(rows, ranks=ranks)} for ranks in counts)
        )
    )
    sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    shape = {"size": (2.4 + 3 * len(sizes), 4.2), "squeeze": False}
    with picture(path, 1, len(sizes), **shape) as (figure, (axes,)):
        for ax, size in zip(axes, sizes):
            lines = draw_lines(ax, of(rows, bytes=size), "ranks", "p50 [ms]")
            ax.set(title=words(size), xlabel="ranks")
            ax.set_xticks(counts)
        axes[0].set(ylabel=f"median {TIME}")
        joined(figure, "What more ranks cost while nobody straggles", lines)


def draw(folder):
    """Draw pictures of every table in a folder, and of all of them together."""
    rows = read(folder)
    counts = sorted({row["ranks"] for row in rows})
    for ranks in counts:
        table = of(rows, ranks=ranks)
        engine, other = coded(table), of(table, collective="mpi4jax.allreduce")
        ratios = [float(row["mpi4jax.allreduce"]) for row in engine]
        name = engine[0]["collective"].removesuffix(", token")
        against_size(
            folder / f"allreduce-{ranks}-latency.png",
            table,
            {"p50 [ms]": "median", "p99 [ms]": "99th percentile"},
            TIME,
            f"{ranks} ranks: the {name}, takes {min(ratios):.2g} to {max(ratios):.2g} "
            "times as long as mpi4jax.allreduce",
        )
        best, usual = (
            max(row["bus [GB/s]"] for row in lines) for lines in (engine, other)
        )
        against_size(
            folder / f"allreduce-{ranks}-bandwidth.png",
            table,
            {"bus [GB/s]": ""},
            "bus bandwidth [GB/s]",
            f"{ranks} ranks: the {name}, reaches {best:.2g} GB/s, "
            f"mpi4jax.allreduce {usual:.2g} GB/s",
        )
    if len(counts) > 1:
        against_ranks(folder / "allreduce-ranks.png", rows)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]))
