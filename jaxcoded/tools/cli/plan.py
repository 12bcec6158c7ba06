"""Find the fastest strategy for a job: share its work, use a code (and which one), or do neither.

The command simulates the job with shared work, with many trees and codes, and without a code (ring
and trees). docs/planning.md describes the simulation and what it leaves out.

    jaxcoded plan -n 13 --payload 4MB --compute 1.2 --model pareto

--measured FILE takes links and ranks from a measurement of jaxcoded bench. Without --measured, --model and
--trace, all ranks are equally fast.
"""

import math
from typing import Any

import click

from jaxcoded import _format, _require
from jaxcoded._parse import number_of_seconds
from jaxcoded.tools.cli.cluster import Cluster, Command
from jaxcoded.tools.planner import Estimate, Ranking, best_plans
from jaxcoded.tools.simulator.sections import IN_SECTIONS
from jaxcoded.tools.terminal import output
from jaxcoded.tools.terminal.progress import progress
from jaxcoded.transport.options import PIECE

_HEADER = (
    *("", "strategy", "code", "piece", "step", "± error"),
    *("5 … 95 %", "load", "message", "κ"),
)
_LEGEND = (
    "→: the advice: the fastest strategy; a code or shared work only if certainly faster; the fewest replicas that take "
    "at most 5 % longer\n"
    "Coded(stragglers): how many children of each parent may be late; Shared(replicas): how many other ranks hold a "
    "rank's data and may compute its blocks; Uncoded: a step waits for all ranks; speeds of the step before: static "
    "balancing for comparison, by these speeds (replan after each step)\n"
    "piece: the size of a message's pieces\n"
    "step: mean of up to {} simulated steps; 5 … 95 %: their quantiles; load: part of the batch that the busiest rank "
    "computes; κ: how much rounding errors may grow"
)


@click.command("plan", cls=Command)
@click.option(
    "--replicas",
    type=int,
    help="How many other ranks may hold each rank's part of the batch, to share the work; 0: no shared work. Default: "
    "all.",
)
@click.option(
    "--reading",
    metavar="SECONDS",
    help="Time that a rank would take to read the whole batch. In every step each rank reads the data that it holds. "
    "Default: 0.",
)
@click.option(
    "--top",
    type=int,
    default=5,
    show_default=True,
    help="Number of coded plans to show.",
)
@output.json_option
def command(
    cluster: Cluster, replicas: int | None, reading: str | None, top: int, json: bool
) -> None:
    """Print the ranking."""
    _require.integer("--top", top, 1)
    with progress("planning") as tell:
        ranking = best_plans(
            cluster.ranks,
            cluster.payload,
            cluster.work,
            cluster.network,
            cluster.stragglers,
            seed=cluster.seed,
            replicas=replicas,
            reading=0.0 if reading is None else number_of_seconds("--reading", reading),
            costs=cluster.costs,
            progress=tell,
        )
    if json:
        _as_json(ranking, top)
        return
    output.say(cluster.words)
    output.say()
    _as_text(ranking, top)
    if cluster.costs and ranking.best.candidate.tree:
        output.code(f"group.epoch(data, {cluster.costs.batch_size}, costs=costs)")


def _chosen(ranking: Ranking, top: int) -> list[Estimate]:
    """Return the best coded candidates, and the best candidate of each uncoded and
    shared kind."""
    coded = [e for e in ranking.estimates if e.candidate.coded][:top]
    uncoded: dict[int, Estimate] = {}
    for estimate in ranking.estimates:
        if estimate.candidate.plain:
            uncoded.setdefault(estimate.candidate.fanout, estimate)
    shared = [e for e in ranking.estimates if e.candidate.shared]
    others = [e for e in ranking.estimates if e.candidate.balanced or e.candidate.blind]
    shown = [*coded, *shared, *uncoded.values(), *others]
    return [e for e in ranking.estimates if e in shown]


def _python(ranking: Ranking) -> str:
    """Return the line of code that makes the group."""
    candidate = ranking.best.candidate
    if not candidate.tree:
        return "jaxcoded.baselines.ring_allreduce(gradients, comm)"
    options = ""
    if candidate.piece != PIECE:
        options = f", options=jaxcoded.Options(piece_bytes={candidate.piece})"
    return f"jaxcoded.CodedGroup(comm, jaxcoded.{candidate.name}{options})"


def _as_text(ranking: Ranking, top: int) -> None:
    chosen = _chosen(ranking, top)
    output.table(
        _HEADER,
        [_row(e, ranking.best) for e in chosen],
        wraps=["strategy", "code"],
        extra=["piece", "message", "5 … 95 %"],
        best=chosen.index(ranking.best),
    )
    output.say()
    output.say(_LEGEND.format(max(len(e.seconds) for e in ranking.estimates)))
    if any(e.candidate.blind for e in chosen):
        output.say(
            "costs ignored: batches divided by the number of examples, for comparison"
        )
    if ranking.best.in_sections:
        output.say(f"{ranking.best.name}: {IN_SECTIONS}")
    output.say()
    output.say(ranking.verdict)
    output.code(_python(ranking))


def _row(estimate: Estimate, best: Estimate) -> tuple[str, ...]:
    candidate = estimate.candidate
    low, high = estimate.usual
    return (
        "→" if estimate is best else "",
        candidate.name,
        estimate.code if candidate.tree else "–",
        f"{candidate.piece >> 10} KiB" if candidate.tree else "–",
        _seconds(estimate.step),
        _seconds(estimate.error),
        _span(low, high),
        f"{estimate.load:.3g}",
        _format.size(estimate.message),
        f"{estimate.amplification:.3g}",
    )


def _as_json(ranking: Ranking, top: int) -> None:
    left_out = ranking.left_out
    output.as_json(
        {
            "ranks": ranking.ranks,
            "payload": ranking.payload,
            "compute": ranking.work,
            "code": ranking.best.candidate.coded,
            "verdict": ranking.verdict,
            "python": _python(ranking),
            "best": _fields(ranking.best),
            "left_out": left_out
            and {
                "strategy": left_out.candidate.name,
                "gain": output.finite(left_out.gain),
                "ranks": left_out.ranks or None,
            },
            "ranking": [_fields(e) for e in _chosen(ranking, top)],
        }
    )


def _fields(estimate: Estimate) -> dict[str, Any]:
    """Return the fields of the JSON output, in seconds and bytes. Infinite numbers are
    null."""
    candidate = estimate.candidate
    low, high = estimate.usual
    times = {"step": estimate.step, "error": estimate.error, "p5": low, "p95": high}
    return {
        "strategy": repr(candidate.strategy) if candidate.tree else None,
        "balanced": candidate.balanced,
        "by_cost": not (candidate.blind or candidate.balanced),
        "code": estimate.code,
        "piece": candidate.piece if candidate.tree else None,
        "in_sections": estimate.in_sections,
        **{key: output.finite(value) for key, value in times.items()},
        "load": estimate.load,
        "held": estimate.held,
        "message": estimate.message,
        "amplification": estimate.amplification,
    }


def _span(low: float, high: float) -> str:
    if not math.isfinite(high):
        return f"{_seconds(low)} … never"
    size, unit = _format.unit(high)
    return f"{low / size:.3g} … {high / size:.3g} {unit}"


def _seconds(value: float) -> str:
    return _format.seconds(value, "never")
