"""Show which ranks straggled in a job, what coding saved, and how long other plans would have taken.

FILES are files that group.telemetry().save(FILE) wrote on the root and, if you have them, on other ranks of the job.
The command prints a summary and draws pictures.

    jaxcoded report rank-*.npz --out pictures
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from jaxcoded import _format
from jaxcoded._format import seconds, unit
from jaxcoded.group.telemetry import Telemetry
from jaxcoded.plan import Plan
from jaxcoded.plan.placement import Placement
from jaxcoded.tools.report import analysis
from jaxcoded.tools.report.pictures import COLOURS, picture
from jaxcoded.tools.terminal import output

_BLUE, _RED, _GREEN = COLOURS[:3]
_GREY = "0.75"
_SMALL: dict[str, Any] = {"va": "center", "fontsize": "x-small", "color": "0.5"}
_ROWS = 30  # the most rows in a picture; the remaining ranks share one row
_POINTS = 3000  # the most points in a row
_COLUMNS = 200  # the most columns of rounds in a picture


@click.command("report")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    default="report",
    show_default=True,
    metavar="FOLDER",
    help="Folder for the pictures.",
)
@output.json_option
def command(files: tuple[pathlib.Path, ...], out: pathlib.Path, json: bool) -> None:
    """Print a summary of the files, and draw pictures."""
    report = _report(_loaded(files))
    pictures = _draw(report, out)
    if json:
        output.as_json(_fields(report) | {"pictures": list(map(str, pictures))})
        return
    _say(report)
    for path in pictures:
        output.say(f"wrote {path}")


@dataclasses.dataclass(frozen=True)
class _Report:
    files: list[Telemetry]  # the root's file comes first, if it is given
    plan: Plan
    shared: bool  # whether ranks compute blocks of each other
    savings: dict[int, analysis.Savings]  # the savings of each parent
    late: np.ndarray  # see `analysis.too_late`
    measured: float  # mean seconds of a round; NaN if unknown
    plans: list[analysis.Predicted]  # the replayed plans, the job's own plan first

    @property
    def parents(self) -> list[Telemetry]:
        """Return the files of ranks with children."""
        return [seen for seen in self.files if len(seen.children)]

    @property
    def off(self) -> float:
        """Return the factor by which the replay of the job's plan differs from the
        job."""
        return analysis.disagreement(self.measured, self.plans[0].seconds)

    @property
    def ranked(self) -> list[analysis.Predicted]:
        """Return the plans, if their order can be trusted."""
        known = self.plans and self.off <= analysis.WRONG and not self.unknown
        return self.plans if known else []

    @property
    def unknown(self) -> list[int]:
        """Return the ranks whose unknown speeds prevent a comparison of plans."""
        return analysis.unknown(self.files)


def _report(files: list[Telemetry]) -> _Report:
    plan = Plan.from_json(files[0].plan)
    shared = plan.strategy.by_blocks
    savings = {}
    for seen in files:
        if len(seen.children) and not np.isnan(seen.lateness).all():
            saved = analysis.savings(seen, files)
            # With shared work, other ranks computed blocks of a late child. So its time without
            # sharing is unknown.
            if len(saved.rounds) and not shared:
                savings[seen.rank] = saved
    known = files[0].rank == plan.root and not shared
    measured = analysis.step_seconds(files[0]) if known else np.nan
    plans = analysis.compare(files) if known else []
    late = analysis.too_late(files)
    return _Report(files, plan, shared, savings, late, measured, plans)


def _draw(report: _Report, out: pathlib.Path) -> list[pathlib.Path]:
    """Draw all pictures, and return their paths."""
    pictures = []
    for seen in report.parents if not report.shared else []:
        if np.isnan(seen.lateness).all():
            continue
        pictures.append(out / f"arrivals-{seen.rank}.png")
        _draw_arrivals(pictures[-1], seen)
        if seen.rank in report.savings:
            pictures.append(out / f"savings-{seen.rank}.png")
            _draw_savings(pictures[-1], seen, report.savings[seen.rank])
    if report.shared and report.files[0].divided.any():
        pictures.append(out / "blocks.png")
        _draw_blocks(pictures[-1], report.files[0], report.plan.placement)
    if not (report.shared or np.isnan(report.late).all()):
        pictures.append(out / "stragglers.png")
        _draw_stragglers(pictures[-1], report.files[0], report.late)
    if report.ranked:
        pictures.append(out / "plans.png")
        _draw_plans(pictures[-1], report.measured, report.ranked)
    return pictures


def _loaded(paths: Sequence[pathlib.Path]) -> list[Telemetry]:
    """Return the files' telemetry: first the root's, then the other ranks' in order."""
    files = [Telemetry.load(path) for path in paths]
    ranks: set[int] = set()
    for path, seen in zip(paths, files):
        if seen.plan != files[0].plan:
            raise ValueError(
                f"{path} belongs to another job, or to another plan, than {paths[0]}"
            )
        if seen.rank in ranks:
            raise ValueError(
                f"{path} belongs to rank {seen.rank}, like a file before it"
            )
        ranks.add(seen.rank)
    return sorted(files, key=lambda seen: (seen.parents[seen.rank] >= 0, seen.rank))


# As text.


def _say(report: _Report) -> None:
    for seen in report.parents or report.files[:1]:
        for line in seen.summary().splitlines():
            # links are not shown, since there may be many
            if not line.startswith("from rank "):
                output.say(line)
        if seen.rank in report.savings:
            output.say(_savings_in_words(seen, report.savings[seen.rank]))
    if report.shared:
        output.say(
            "these files do not tell what sharing the work saved, or how long other plans would have taken: jaxcoded "
            "plan simulates that"
        )
    elif report.files[0].rank != (root := report.plan.root):
        output.say(
            f"to compare with other plans, also give the file of rank {root}, the root"
        )
    elif report.plans:
        replayed = report.plans[0].seconds
        output.say(_replay_in_words(report.measured, replayed, report.off))
        if report.unknown and report.off <= analysis.WRONG:
            output.say(
                f"{_format.ranks(report.unknown)} came too late in most rounds, but these files do not tell how slow "
                "they are: to compare with other plans, also give their own files"
            )
        if report.ranked:
            _say_plans(report)
    else:
        output.say("too few rounds to replay them with other plans")


def _fields(report: _Report) -> dict[str, Any]:
    """Return the fields of the JSON output; unknown or infinite numbers are null."""
    first = report.files[0]
    return {
        "ranks": len(first.parents),
        "shared": report.shared,
        "rounds": [len(seen.rounds) for seen in report.files],
        "files": [seen.rank for seen in report.files],
        "too_late": list(map(output.finite, report.late.tolist())),
        "speeds": first.speeds.tolist(),
        "savings": [
            {
                "rank": rank,
                "rounds": len(saved.rounds),
                "avoided": saved.avoided,
                "share": saved.share,
                "stuck": saved.stuck,
                "inferred": int(saved.inferred.sum()),
            }
            for rank, saved in report.savings.items()
        ],
        "round": output.finite(report.measured),
        "replayed": output.finite(report.plans[0].seconds) if report.plans else None,
        "plans": [
            {
                "name": plan.name,
                "load": plan.load,
                "seconds": output.finite(plan.seconds),
                "actual": plan.actual,
            }
            for plan in report.ranked
        ],
    }


def _savings_in_words(seen: Telemetry, saved: analysis.Savings) -> str:
    ended = np.isfinite(saved.uncoded)
    text = (
        f"rank {seen.rank} waited {seconds(saved.coded[ended].sum())} for its sums in "
        f"{ended.sum()} rounds, and would have waited {seconds(saved.uncoded[ended].sum())} for "
        f"all of its children: coding avoided {seconds(saved.avoided)} ({saved.share:.0%})"
    )
    guessed = int(saved.inferred[ended].sum())
    if guessed:
        text += f", estimated in {guessed} rounds from the last child's usual time"
    if saved.stuck is not None:
        text += f"; from round {saved.stuck} on an uncoded sum would not have ended"
    return text


def _replay_in_words(measured: float, replayed: float, off: float) -> str:
    if not np.isfinite(measured):
        return "it is not known how long a round took, or how accurate its replay is"
    text = f"a round took {seconds(measured)}; replayed with the same plan "
    if np.isfinite(replayed):
        text += f"{seconds(replayed)} ({replayed / measured - 1:+.1%})"
    else:
        text += "it does not end"
    if off <= analysis.UNUSUAL:
        return text
    text += (
        ". The replay knows work, messages and bandwidth, but not what else ranks wait for, such as processes that "
        "share their cores"
    )
    if off <= analysis.WRONG:
        return (
            text + ": plans that differ by no more than this may be in the wrong order"
        )
    return text + ". It is too inaccurate to compare other plans"


def _say_plans(report: _Report) -> None:
    took = analysis.work(report.files)
    for source, known in (("step time", "only the step time"), ("others", "nothing")):
        ranks = [rank for rank, origin in enumerate(took.source) if origin == source]
        if ranks:
            output.say(
                f"{known} is known of {_format.ranks(ranks)}: their own files, or their parents' files, may tell more"
            )
    plans = sorted(report.ranked, key=lambda plan: plan.seconds)
    output.say()
    output.table(
        ["plan", "load", "a round"],
        [
            [
                plan.name,
                f"{plan.load:.4f}",
                seconds(plan.seconds)
                if np.isfinite(plan.seconds)
                else f"does not end in round {took.rounds[plan.ended]}",
            ]
            for plan in plans
        ],
        wraps=["plan"],
        best=0,
    )
    output.say()


# As pictures.


def _draw_arrivals(path: pathlib.Path, seen: Telemetry) -> None:
    """Draw when each child's message came, relative to the sum."""
    late = seen.lateness[~np.isnan(seen.decided)]
    came = np.where(np.isfinite(late), late, np.nan)
    share = (late > 0).mean(axis=0)
    usual = np.ma.median(np.ma.masked_invalid(came), axis=0)
    # the latest child at the top
    order = np.lexsort((np.ma.filled(usual, np.inf), share))
    rows = list(order[-_ROWS:, None])
    names = [f"rank {seen.children[row[0]]}" for row in rows]
    if len(order) > _ROWS:
        rows.insert(0, order[:-_ROWS])
        names.insert(0, f"{len(order) - _ROWS} others")
    size, name = unit(np.nanmax(np.abs(came), initial=0.0))
    rng = np.random.default_rng(0)
    layout: dict[str, Any] = {"columns": 2, "sharey": True, "width_ratios": (4, 1)}
    drawn = picture(path, size=(7.2, _height(len(rows))), **layout)
    with drawn as (figure, (axes, side)):
        for y, row in enumerate(rows):
            values = came[:, row].ravel() / size
            values = rng.permutation(values[~np.isnan(values)])[:_POINTS]
            if not len(values):
                words = "no message arrived in any of these rounds"
                axes.text(
                    0.02, y, words, **_SMALL, transform=axes.get_yaxis_transform()
                )
            jitter = y + rng.uniform(-0.28, 0.28, len(values))
            for chosen, colour in ((values <= 0, _BLUE), (values > 0, _RED)):
                axes.scatter(
                    values[chosen], jitter[chosen], 7, colour, alpha=0.5, linewidths=0
                )
            parts = (late[:, row] <= 0), np.isfinite(late[:, row]), np.ones(1, bool)
            widths = [100 * part.mean() for part in parts]
            for width, colour in zip(reversed(widths), (_GREY, _RED, _BLUE)):
                side.barh(y, width, 0.7, color=colour)
        axes.axvline(0, color="black", linewidth=1)
        _name_rows(axes, names)
        _spread(axes, came / size)
        axes.set_xlabel(f"arrival after the sum was complete [{name}]")
        side.set_xlabel("rounds [%]")
        side.set_xlim(0, 100)
        worst = order[-1]
        figure.suptitle(
            f"Rank {seen.children[worst]} was too late for rank {seen.rank}'s sum in "
            f"{share[worst]:.0%} of {len(late)} rounds"
            if share[worst] > 0
            else f"No child was too late for rank {seen.rank}'s sum in {len(late)} rounds",
            fontsize="medium",
        )
        what = "in time", "too late", "not heard of since"
        _legend(figure, dict(zip(what, (_BLUE, _RED, _GREY))))


def _draw_savings(path: pathlib.Path, seen: Telemetry, saved: analysis.Savings) -> None:
    """Draw the accumulated waiting times, with and without coding."""
    ended = np.isfinite(saved.uncoded)
    coded = np.cumsum(saved.coded)
    uncoded = np.cumsum(np.where(ended, saved.uncoded, 0.0))
    last = int(ended.sum()) if saved.stuck is None else int(np.argmin(ended))
    size, name = unit(max(coded[-1], uncoded[-1]))
    x = saved.rounds
    coded, uncoded = coded / size, uncoded[:last] / size
    with picture(path) as (_, axes):
        axes.plot(x, coded, color=_BLUE, label="coded, as it was")
        label = "had it waited for all children"
        axes.plot(x[:last], uncoded, color=_RED, label=label)
        axes.fill_between(x[:last], coded[:last], uncoded, color=_RED, alpha=0.12)
        if saved.stuck is None:
            title = (
                f"{seconds(saved.avoided)} of waiting saved at rank {seen.rank} "
                f"({saved.share:.0%})"
            )
        else:
            axes.axvspan(saved.stuck, x[-1], color=_RED, alpha=0.25, linewidth=0)
            label = "a child has sent nothing since"
            axes.axvline(saved.stuck, color=_RED, linestyle=":", label=label)
            title = (
                f"Without coding rank {seen.rank} would have been stuck from round "
                f"{saved.stuck} on"
            )
        axes.set(title=title, xlabel="round")
        axes.set_ylabel(f"waiting for the sums so far [{name}]")
        axes.set_ylim(0)
        axes.legend(loc="upper left")


def _draw_stragglers(path: pathlib.Path, seen: Telemetry, late: np.ndarray) -> None:
    """Draw which ranks are late and which are slow, for the worst ranks."""
    speeds, known = seen.speeds, seen.measured
    shown = np.flatnonzero(known | ~np.isnan(late))
    share = np.nan_to_num(late)
    order = shown[np.lexsort((-speeds[shown], share[shown]))][-_ROWS:]
    with picture(path, columns=2, size=(7.2, _height(len(order))), sharey=True) as (
        figure,
        (left, right),
    ):
        _bars(left, late[order], _RED, "rounds in which it was too late [%]")
        _name_rows(left, [f"rank {rank}" for rank in order])
        drawn = np.where(known, speeds, np.nan)[order]
        _bars(right, drawn, _BLUE, "speed, relative to the fastest rank [%]")
        often, slow = order[-1], shown[np.argmin(np.where(known, speeds, 2)[shown])]
        title = f"Rank {often} was too late most often"
        if share[often] == 0:
            title = "No rank was too late"
        if speeds[slow] < 1:
            title += "; it" if slow == often and share[often] else f"; rank {slow}"
            title += " is the slowest"
        _entitle(figure, title, len(order), len(shown))


def _draw_blocks(path: pathlib.Path, seen: Telemetry, placement: Placement) -> None:
    """Draw which rank computed which blocks in each round, and the ranks' speeds."""
    rows = seen.divided
    computed, rounds = seen.computed[rows], seen.rounds[rows]
    mean = computed.mean(axis=0)
    ranks = np.array(placement.ranks)
    speeds = np.where(seen.measured, seen.speeds, np.nan)
    order = ranks[np.argsort(-mean[ranks, :2].sum(axis=1), kind="stable")][-_ROWS:]
    y = np.arange(len(order))
    with picture(
        path,
        columns=3,
        size=(9.0, _height(len(order)) + 0.4),
        sharey=True,
        width_ratios=(3, 4, 2),
    ) as (figure, (bars, map_, side)):
        left = np.zeros(len(order))
        for kind, colour in enumerate((_BLUE, _GREEN, _RED)):
            bars.barh(y, mean[order, kind], 0.7, left, color=colour)
            left += mean[order, kind]
        bars.axvline(placement.blocks, color="black", linewidth=1, linestyle=":")
        bars.set_xlabel("blocks a round")
        _name_rows(bars, [f"rank {rank}" for rank in order])
        # Consecutive rounds share a pixel, which shows their mean.
        step = -(-len(rounds) // _COLUMNS)
        starts = np.arange(0, len(rounds), step)
        counts = computed[:, order, :2].sum(axis=2)
        counts = (
            np.add.reduceat(counts, starts) / np.diff([*starts, len(rounds)])[:, None]
        )
        furthest = max(abs(counts - placement.blocks).max(), 1)
        edges = np.append(rounds[starts], rounds[-1] + 1) - 0.5
        drawn = map_.pcolormesh(
            *(edges, np.append(y, len(order)) - 0.5, counts.T - placement.blocks),
            cmap="RdBu",
            vmin=-furthest,
            vmax=furthest,
        )
        map_.set_xlabel("round")
        figure.colorbar(drawn, ax=map_, label="blocks more than its own")
        _bars(side, speeds[order], "0.5", "speed [%]")
        worst = ranks[np.argmin(mean[ranks, 0])]
        left_to_others = 1 - mean[worst, 0] / placement.blocks
        title = (
            f"Rank {worst} left {left_to_others:.0%} of its blocks to others"
            if left_to_others
            else "Every rank computed its own blocks"
        )
        _entitle(figure, title, len(order), len(ranks))
        _legend(figure, {"its own": _BLUE, "of others": _GREEN, "not used": _RED})


def _draw_plans(
    path: pathlib.Path, measured: float, plans: Sequence[analysis.Predicted]
) -> None:
    """Draw the predicted rounds of the plans, the fastest at the top."""
    plans = sorted(plans, key=lambda plan: plan.seconds, reverse=True)
    finite = [plan.seconds for plan in plans if np.isfinite(plan.seconds)]
    longest = max([*finite, np.nan_to_num(measured)])
    size, name = unit(longest)
    with picture(path, size=(7.2, _height(len(plans)))) as (_, axes):
        for y, plan in enumerate(plans):
            if np.isfinite(plan.seconds):
                x = plan.seconds / size
                text, colour = f"{x:.3g}", {"color": _RED if plan.actual else _BLUE}
            else:
                text, x = "does not end", 1.1 * longest / size
                colour = {"color": "white", "edgecolor": _GREY, "hatch": "//"}
            axes.barh(y, x, 0.7, **colour)
            axes.annotate(
                text,
                (x, y),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
        if np.isfinite(measured):
            axes.axvline(measured / size, color="black", linewidth=1, linestyle="--")
            above = {"fontsize": "small", "transform": axes.get_xaxis_transform()}
            axes.text(measured / size, 1.01, " measured", **above)
        axes.set_yticks(range(len(plans)), [plan.name for plan in plans])
        axes.set_xlim(0, 1.3 * longest / size)
        best = plans[-1]
        verdict = (
            "No plan here would have been faster than the job's own plan"
            if best.actual
            else f"Fastest for this job's stragglers: {best.name}"
        )
        axes.set_title(verdict, pad=16)
        axes.set_xlabel(f"mean time of a round, replayed [{name}]")


def _spread(axes: Any, values: np.ndarray) -> None:
    """Choose a logarithmic scale if few values are far from zero and most are near it."""
    sizes = np.abs(values[np.isfinite(values)])
    near = np.quantile(sizes, 0.75) if len(sizes) else 0.0
    if near > 0 and sizes.max() > 50 * near:
        decade = 10 ** np.ceil(np.log10(near))
        axes.set_xscale("symlog", linthresh=decade, linscale=1.0)
        axes.xaxis.set_major_formatter("{x:g}")


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)


def _bars(axes: Any, shares: np.ndarray, colour: str, label: str) -> None:
    """Draw a share for each row, in per cent; NaN is unknown."""
    axes.barh(range(len(shares)), 100 * np.nan_to_num(shares), 0.7, color=colour)
    for row in np.flatnonzero(np.isnan(shares)):
        axes.text(1, row, "not known", **_SMALL)
    axes.set(xlim=(0, 100), xlabel=label)


def _entitle(figure: Any, title: str, shown: int, ranks: int) -> None:
    if shown < ranks:
        title += f" ({shown} of {ranks} ranks shown)"
    figure.suptitle(title, fontsize="medium")


def _legend(figure: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _height(rows: int) -> float:
    return 1.6 + 0.22 * max(rows, 3)
