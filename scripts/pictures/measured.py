"""Draw results of benchmarks and simulations: faults, lengths of messages, stragglers,
numbers of ranks.
"""

import itertools
import pathlib

from .canvas import WIDTH, Picture
from .chart import Linear, Scale, along, figures, legend, upright

LIBRARIES = {
    "shared": "jaxcoded, shared",
    "coded, s=1": "jaxcoded, a code",
    "torchft, 2 s": "torchft, 2 s",
    "torchft, 60 s": "torchft, 60 s",
    "mpi4jax.allreduce": "mpi4jax",
    "psum over gloo": "psum over gloo",
}
FAULTS = {
    "slow": "10 times slower",
    "stuck": "alive, but stuck",
    "stopped": "frozen (SIGSTOP)",
    "killed": "dead (SIGKILL)",
}
SECONDS = {0: "fault", 1: "1 s", 2: "2 s", 3: "3 s", 4: "4 s", 5: "5 s"}
# a time without a step is marked from this many seconds on; slow steps are shorter
PAUSE = 0.5


def pauses(steps: list[float], end: float) -> list[tuple[float, float]]:
    """Return the beginning and end of each long time without a step."""
    gaps = itertools.pairwise([*steps, end])
    return [(begin, end) for begin, end in gaps if end - begin > PAUSE]


def faults(file: pathlib.Path) -> None:
    """Draw the steps around a fault over time, for each library."""
    picture = Picture(
        WIDTH,
        656,
        "Completed steps over time, before and after one of four ranks is slow, stuck, frozen or dead. jaxcoded's "
        "steps continue evenly; those of psum, mpi4jax and torchft become rare, or stop for seconds or for ever.",
    )
    picture.words(
        24, 32, "One of four ranks turns faulty: do steps still complete?", "title"
    )
    picture.path("M30 45v14m5 -14v14m5 -14v14", "tick a")
    picture.path("M47 45v14m5 -14v14m5 -14v14", "tick b")
    picture.words(67, 56.5, "completed steps", "small")
    picture.box(185, 45, 26, 14, "bad", 0)
    picture.words(219, 56.5, "no step", "small")
    pitch, half = 18, 6.5  # distance of lanes, and half the height of a tick
    for number, (kind, title) in enumerate(FAULTS.items()):
        top = 96 + 138 * number
        x = Linear(-0.5, 5, 138, 694)
        y = Scale(1, 10, top, top + pitch * len(LIBRARIES))
        picture.words(x.begin, top - 8, title, "title")
        last = number == len(FAULTS) - 1
        along(picture, x, y, SECONDS if last else dict.fromkeys(SECONDS, ""))
        for place, (library, name) in enumerate(LIBRARIES.items()):
            at = top + pitch * (place + 0.5)
            own = place < 2
            picture.words(x.begin - 8, at + 4.5, name, "" if own else "soft", "end")
            (row,) = figures("steps", library=library, fault=kind)
            steps = [int(step) / 1000 for step in row["steps"].split()]
            picture.path(
                "".join(f"M{x(each):.1f} {at - half:g}v{2 * half:g}" for each in steps),
                f"tick {'a' if own else 'b'}",
            )
            (known,) = figures("faults", library=library, fault=kind)
            for begin, end in pauses(steps, x.high):
                seconds = end - begin
                # the pause ends beyond the picture
                if end == x.high and known["longest_ms"]:
                    seconds = float(known["longest_ms"]) / 1000
                says = known["outcome"] or f"no step for {seconds:.1f} s"
                picture.box(x(begin), at - 8, round(x(end) - x(begin), 1), 16, "bad", 0)
                picture.words(x(max(begin, 0)) + 8, at + 4.5, says, "outcome")
        picture.path(f"M{x(0):.1f} {y.begin:g}V{y.end:g}", "line")
    picture.save(file)


RATIOS = {0.2: "0.2", 0.5: "0.5", 1: "1", 2: "2", 5: "5", 10: "10"}
SIZES = {2.0**12: "4 KiB", 2.0**16: "", 2.0**20: "1 MiB", 2.0**26: "64 MiB"}
OTHERS = {
    "ring": ("diamond", "c"),
    "mpi4jax.allreduce": ("circle", "a"),
    "mpi4py Allreduce": ("square", "b"),
}


def gains_on_one_host(ranks: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of other collectives relative to the engine's time, by size."""

    def times(collective: str) -> dict[float, float]:
        wanted = {"ranks": str(ranks), "fanout": "3", "collective": collective}
        rows = figures("allreduce", **wanted)
        return {float(row["bytes"]): float(row["p50_ms"]) for row in rows}

    own = times("engine, s=1, token")
    return {
        name: [(size, each / own[size]) for size, each in times(name).items()]
        for name in OTHERS
    }


def gains_on_hosts() -> dict[str, list[tuple[float, float]]]:
    """Return the same as `gains_on_one_host` for 13 hosts, where each collective is measured relative to the ring."""

    def times(collective: str) -> dict[float, float]:
        rows = figures("sections", collective=collective)
        return {float(row["bytes"]): float(row["over_ring"]) for row in rows}

    own = times("by the root") | times("in sections")  # only long sums have sections
    return {
        name: [(size, each / own[size]) for size, each in times(name).items()]
        for name in OTHERS
    }


def sizes(file: pathlib.Path) -> None:
    """Draw the speed of an all-reduce relative to others, by the length of the message."""
    picture = Picture(
        WIDTH,
        338,
        "Speed of a coded all-reduce with s = 1, divided by that of mpi4jax, of a ring and of mpi4py, against the "
        "length of the message",
    )
    picture.words(
        24, 32, "How many times as fast is an all-reduce with s = 1?", "title"
    )
    entries = [(shape, colour, f"÷ {name}") for name, (shape, colour) in OTHERS.items()]
    legend(picture, 30, 54, entries, [90, 160, 150])
    panels = {
        "4 ranks, one host": gains_on_one_host(4),
        "13 ranks, one host": gains_on_one_host(13),
        "13 hosts, 200 Mbit/s": gains_on_hosts(),
    }
    for number, (title, gains) in enumerate(panels.items()):
        left = 52 + 222 * number
        x = Scale(2.0**10.5, 2.0**27.5, left, left + 208)
        y = Scale(0.15, 14, 298, 100)
        picture.words(left, 90, title, "title")
        upright(picture, x, y, RATIOS, named=number == 0)
        along(picture, x, y, SIZES)
        picture.path(f"M{left} {y(1):.1f}h208", "line")
        if number == 2:
            picture.words(left + 202, y(1) + 15, "equally fast", "small", "end")
        for name, points in gains.items():
            shape, colour = OTHERS[name]
            picture.curve([(x(size), y(gain)) for size, gain in points], colour)
            for size, gain in points:
                picture.mark(x(size), y(gain), shape, colour)
    picture.save(file)


SCHEMES = {
    "uncoded": ("square", "b"),
    "uncoded, by the step before": ("bar", "b"),
    "fractional repetition": ("triangle", "d"),
    "shared, data on 11 others": ("ring", "a"),
    "shared, data on 3 others": ("diamond", "c"),
}


def stragglers(file: pathlib.Path) -> None:
    """Draw step ÷ ideal for each straggler model."""
    models = {
        "nobody slow": "nobody slow",
        "exponential": "exponential",
        "pareto": "pareto",
        "bursty": "bursty",
        "speeds": "unequal speeds",
        "one 10 × slower": "one 10 × slower",
        "two 10 × slower": "two 10 × slower",
    }
    picture = Picture(
        WIDTH,
        338,
        "Time of a step divided by that of the ideal division of the work, for seven models of stragglers: shared "
        "work takes 1.08 to 1.31, a code 1.7 to 3, uncoded up to 9.3, and balanced by the step before up to 2",
    )
    picture.words(
        24, 32, "A step ÷ the ideal division of its work, 12 workers", "title"
    )
    entries = [(shape, colour, name) for name, (shape, colour) in SCHEMES.items()]
    legend(picture, 30, 54, entries[:3], [100, 220, 170])
    legend(picture, 30, 78, entries[3:], [200, 180])
    pitch, ticks = 26, {1: "1", 2: "2", 3: "3", 5: "5", 10: "10"}
    for number, step in enumerate(("120", "30")):
        left = 136 + 290 * number
        top = 120
        x = Scale(0.9, 11, left, left + 270)
        y = Scale(1, 10, top, top + pitch * len(models))
        picture.words(left, top - 8, f"steps of {step} ms", "title")
        along(picture, x, y, ticks)
        for place, (model, name) in enumerate(models.items()):
            at = top + pitch * (place + 0.5)
            picture.path(f"M{left} {at:g}h270", "grid")
            if number == 0:
                picture.words(left - 8, at + 4.5, name, "soft", "end")
            for scheme, (shape, colour) in SCHEMES.items():
                wanted = {"step_ms": step, "stragglers": model, "scheme": scheme}
                (row,) = figures("sharing", **wanted)
                picture.mark(x(float(row["step_over_ideal"])), at, shape, colour)
    picture.save(file)


SHAPES_OF_SUMS = {
    "ring": (("ring",), "diamond", "c"),
    "star or tree": (
        ("star", "star in sections", "tree", "tree in sections"),
        *("square", "b"),
    ),
    "coded star": (("coded star", "coded star in sections"), "triangle", "d"),
    "coded tree": (("coded tree", "coded tree in sections"), "circle", "a"),
}


def ranks(file: pathlib.Path) -> None:
    """Draw the simulated time of a step against the number of ranks."""
    picture = Picture(
        WIDTH,
        338,
        "Simulated time of a step against 10 to a million ranks, for a ring, stars and trees, coded stars and coded "
        "trees; with a light tail, a heavy tail and one slow rank",
    )
    picture.words(
        24, 32, "Seconds of a step against ranks, 100 MB at 10 Gb/s, simulated", "title"
    )
    entries = [
        (shape, colour, name) for name, (_, shape, colour) in SHAPES_OF_SUMS.items()
    ]
    legend(picture, 30, 54, entries, [90, 130, 120, 120])
    models = {
        "light tail": "light tail",
        "heavy tail": "heavy tail",
        "one slow rank": "one rank 10 × slower",
    }
    powers = {10: "10", 1000: "10³", 100_000: "10⁵", 1_000_000: "10⁶"}
    for number, (model, title) in enumerate(models.items()):
        left = 52 + 222 * number
        x = Scale(6, 1_700_000, left, left + 208)
        y = Scale(0.2, 700, 298, 100)
        picture.words(left, 90, title, "title")
        seconds = {0.2: "0.2", 1: "1", 10: "10", 100: "100 s"}
        upright(picture, x, y, seconds, named=number == 0)
        along(picture, x, y, powers)
        for schemes, shape, colour in SHAPES_OF_SUMS.values():
            best: dict[float, float] = {}
            for row in figures("scaling", stragglers=model, gbit_per_s="10"):
                size, time = float(row["ranks"]), float(row["seconds"])
                if row["scheme"] in schemes:
                    best[size] = min(time, best.get(size, time))
            points = [(x(size), y(time)) for size, time in best.items() if time < 700]
            picture.curve(points, colour)
            for at in points:
                picture.mark(*at, shape, colour)
    picture.save(file)
