"""Simulate steps with one strategy and, for comparison, uncoded and ideal steps.

    jaxcoded simulate -n 13 --payload 4MB --compute 1.2 --model pareto --strategy "Coded(stragglers=1, fanout=3)"

Uncoded steps use the same tree, which waits for all ranks, or a ring all-reduce. Balanced steps use the uncoded tree,
with loads in proportion to the speeds of the step before, whatever examples cost. In ideal steps all ranks compute
until all work is done, and messages take no time. All strategies use the same draws of the stragglers. jaxcoded plan
finds the best plan; docs/simulation.md describes the simulation.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np

from jaxcoded import _format, _require
from jaxcoded.plan import Coded, Plan, Shared, Strategy, make_plan
from jaxcoded.tools.cli.cluster import Cluster, Command
from jaxcoded.tools.report.pictures import picture
from jaxcoded.tools.simulator import Layout, Ring, ideal_seconds, simulate
from jaxcoded.tools.simulator.sections import IN_SECTIONS, forms_sections
from jaxcoded.tools.simulator.stragglers import Delays, Stragglers
from jaxcoded.tools.terminal import output
from jaxcoded.tools.terminal.progress import progress

_PICTURES = (".png", ".svg", ".pdf")
_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
_PLAN, _UNCODED, _RING, _IDEAL = "this plan", "uncoded tree", "ring all-reduce", "ideal"
_BALANCED, _BLIND = "uncoded, balanced", "uncoded, costs ignored"


@click.command("simulate", cls=Command)
@click.option(
    "--strategy",
    default=repr(Shared()),
    show_default=True,
    help="The strategy, such as 'Shared(replicas=2)', 'Coded(stragglers=1, fanout=3)' with one of the codes below, or "
    "'Uncoded()'.",
)
@click.option(
    "--rounds",
    type=int,
    default=500,
    show_default=True,
    help="Number of steps to simulate.",
)
@click.option(
    "--picture",
    "path",
    metavar="FILE",
    help=f"Draw a picture of how long steps take, to a file that ends with {' or '.join(_PICTURES)}.",
)
@output.json_option
def command(
    cluster: Cluster, strategy: str, rounds: int, path: str | None, json: bool
) -> None:
    """Print the simulated steps."""
    rounds = _require.integer("--rounds", rounds, 1)
    if path is not None and not path.endswith(_PICTURES):
        raise ValueError(f"--picture {path}: must end with {' or '.join(_PICTURES)}")
    plan = make_plan(cluster.ranks, Strategy.parse(strategy, "--strategy"))
    seconds = _simulated(cluster, plan, rounds)
    if path is not None:
        _draw(path, seconds)
    if json:
        output.as_json(_fields(cluster, plan, rounds, seconds))
        return
    output.say(cluster.words)
    output.say(f"this plan: {plan.strategy!r}, {plan.describe().splitlines()[0]}")
    output.say()
    ideal = seconds[_IDEAL].mean()
    output.table(
        ["a step", "mean", *_QUANTILES, "mean ÷ ideal"],
        [
            [
                name,
                *(_format.seconds(each, "never") for each in _summary(took).values()),
                f"{took.mean() / ideal:.3g}" if np.isfinite(took.mean()) else "–",
            ]
            for name, took in seconds.items()
        ],
        best=0,
    )
    output.say()
    output.say(f"over {rounds} steps")
    if forms_sections(Layout.of(plan), cluster.network, cluster.payload):
        output.say(f"this plan: {IN_SECTIONS}")
    output.say("--strategy gives another strategy; jaxcoded plan finds the fastest")
    if path is not None:
        output.say(f"wrote {path}")


def _simulated(cluster: Cluster, plan: Plan, rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of each step, for each strategy."""
    uncoded = Coded(stragglers=0, root_computes=True, parents=plan.parents)
    tree, costs = Layout.of(make_plan(cluster.ranks, uncoded)), cluster.costs
    layouts: dict[str, Layout | Ring] = {_PLAN: Layout.of(plan), _UNCODED: tree}
    if costs:
        layouts[_BLIND] = tree
    layouts |= {_BALANCED: tree, _RING: Ring(cluster.ranks)}
    out = {}
    with progress("simulating") as tell:
        for number, (name, layout) in enumerate(layouts.items()):
            before, total = number * rounds, len(layouts) * rounds
            out[name] = simulate(
                layout,
                cluster.network,
                payload=cluster.payload,
                work=cluster.work,
                stragglers=_Told(cluster.stragglers, tell, before, total),
                rounds=rounds,
                seed=cluster.seed,
                balanced=name == _BALANCED,
                costs=costs.unknown if costs and name == _BLIND else costs,
            ).seconds
    out[_IDEAL] = ideal_seconds(
        cluster.ranks,
        work=cluster.work,
        stragglers=cluster.stragglers,
        rounds=rounds,
        seed=cluster.seed,
        costs=costs,
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Told(Stragglers):
    """A model that reports which fraction of the rounds of all simulations has been drawn."""

    model: Stragglers
    tell: Callable[[float], None]
    before: int  # number of rounds in the simulations before
    total: int

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        for number, delays in enumerate(self.model.rounds(size, seed), self.before):
            self.tell(number / self.total)
            yield delays


def _summary(took: np.ndarray) -> dict[str, float]:
    quantiles = np.quantile(took, list(_QUANTILES.values()), method="nearest")
    return {"mean": float(took.mean()), **dict(zip(_QUANTILES, quantiles.tolist()))}


def _fields(
    cluster: Cluster, plan: Plan, rounds: int, seconds: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Return the fields of the JSON output in seconds; infinite numbers are null."""
    return {
        "ranks": cluster.ranks,
        "payload": cluster.payload,
        "compute": cluster.work,
        "rounds": rounds,
        "strategy": repr(plan.strategy),
        "plan": plan.describe().splitlines(),
        "load": float(plan.load),
        "steps": {
            name: {key: output.finite(each) for key, each in _summary(took).items()}
            for name, took in seconds.items()
        },
    }


def _draw(path: str, seconds: dict[str, np.ndarray]) -> None:
    """Draw, for each strategy, which fraction of the steps takes longer than a given
    time."""
    usual = np.concatenate([took[np.isfinite(took)] for took in seconds.values()])
    if not len(usual):
        raise ValueError(f"--picture {path}: no step ends, so there is nothing to draw")
    size, unit = _format.unit(float(np.median(usual)))
    right = 1.5 * usual.max() / size
    with picture(path) as (_, axes):
        for name, took in seconds.items():
            ended = np.sort(took[np.isfinite(took)]) / size
            x = np.concatenate([ended[:1], ended, [right]])
            longer = np.append(1 - np.arange(len(ended) + 1) / len(took), np.nan)
            if len(ended) < len(took):  # some steps never end
                longer[-1] = longer[-2]
            style = "--" if name == _IDEAL else "-"
            axes.step(x, 100 * longer[-len(x) :], style, where="post", label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(_labelled)
        axes.set_xlabel(f"a step takes [{unit}]")
        axes.set_ylabel("steps that take longer [%]")
        axes.set_title(f"{_most(seconds, _PLAN)}; {_most(seconds, _UNCODED)}")
        axes.legend()


def _labelled(x: float, _: int) -> str:
    """Label some of the ticks between powers of ten."""
    first = f"{x:e}"[0]
    return f"{x:g}" if first in "25" else ""


def _most(seconds: dict[str, np.ndarray], name: str) -> str:
    took = _format.seconds(_summary(seconds[name])["p95"], "")
    if not took:
        return f"{name}: steps do not end"
    return f"{name}: 95 % of the steps take up to {took}"
