"""The options of `jaxcoded plan` and `jaxcoded simulate` that describe a job."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import click

from jaxcoded import _format, _require, codes
from jaxcoded._files import table
from jaxcoded._parse import count, number_of_bytes, number_of_seconds
from jaxcoded.tools.launch import places
from jaxcoded.tools.planner.measurement import Measurement
from jaxcoded.tools.simulator import Costs, Network, stragglers

# This table is not from NumPy, which does not know bfloat16.
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FILE = click.Path(exists=True, dir_okay=False)
_GIGABITS = 10.0
_NOBODY = "none, as no --model, --trace or --measured is given"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job and its machines."""

    ranks: int
    payload: float  # bytes that are summed in every step
    work: float  # seconds that one usual rank would take for the whole batch
    network: Network
    stragglers: stragglers.Stragglers
    model: str  # the user's name of the stragglers
    seed: int  # the seed of the draws and of random codes
    costs: Costs | None = None  # the costs of the examples, unless all cost the same

    @property
    def words(self) -> str:
        """Return a line that describes the job, so that a user notices wrong
        options."""
        network = self.network
        links = f"{8e-9 * network.bandwidth:.3g} Gb/s"
        if network.sending != network.bandwidth:
            links += f" to receive and {8e-9 * network.sending:.3g} Gb/s to send"
        costs = ""
        if self.costs is not None:
            each = self.costs.each
            costs = (
                f"; batches of {self.costs.batch_size} of {len(each)} examples, whose most expensive example costs "
                f"{each.max():.3g} times the mean"
            )
        return (
            f"{self.ranks} ranks sum {_format.size(self.payload)} in every step, and the whole batch would take one "
            f"rank {_format.seconds(self.work)}; links: {links}, latency {_format.seconds(network.latency)}; stragglers: "
            f"{self.model}{costs}"
        )


class Command(click.Command):
    """A command with a `Cluster`'s options. Its help lists models and codes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params[:0] = _OPTIONS

    def invoke(self, ctx: click.Context) -> Any:
        given = {
            str(option.name): ctx.params.pop(str(option.name)) for option in _OPTIONS
        }
        ctx.params["cluster"] = _cluster(**given)
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {name: getattr(codes, name) for name in codes.NAMES}
        for title, kinds in (("Models", stragglers.MODELS), ("Codes", named)):
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (_call(name, kind), _sentence(kind))
                        for name, kind in kinds.items()
                    ]
                )


def _call(name: str, what: Callable[..., Any]) -> str:
    """Return a call as text, without the arguments that a plan gives to all codes."""
    arguments = [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in inspect.signature(what).parameters.values()
        if each.name not in _COMMON
    ]
    return f"{name}({', '.join(arguments)})" if arguments else name


def _sentence(what: Callable[..., Any]) -> str:
    """Return the first sentence of a docstring, without its verb. Read it from the source, since ``python -OO`` does
    not keep docstrings in memory."""
    definition: Any = ast.parse(inspect.getsource(what)).body[0]
    paragraph, *_ = (ast.get_docstring(definition) or "").split("\n\n")
    first, *_ = re.split(r"(?<=\.) (?=[A-Z])", " ".join(paragraph.split()))
    first = re.sub("^Return (?:an? )?(.)", lambda start: start[1].upper(), first)
    return first.replace("``", "").replace("`", "")


_COMMON = ("n", "stragglers", "slices", "seed")
_OPTIONS = (
    click.Option(
        [*places.RANKS],
        type=int,
        help=f"Number of ranks in the job, up to {places.MOST_RANKS:,}. Default: the number in the --measured file.",
    ),
    click.Option(
        ["--payload"],
        metavar="BYTES",
        help="Number of bytes that every step sums, such as 4e6 or 4MB.",
    ),
    click.Option(
        ["--parameters"],
        metavar="COUNT",
        help="Instead of --payload: number of parameters of the model whose gradient every step sums, such as 25M or "
        "7B (billions).",
    ),
    click.Option(
        ["--dtype"],
        type=click.Choice(list(_ITEM_BYTES)),
        help="Type of the gradient, with --parameters. Default: float32.",
    ),
    click.Option(
        ["--compute"],
        required=True,
        metavar="SECONDS",
        help="Time of one usual rank for the gradient of the whole batch, such as 1.2 or 500ms: "
        "about the computation of an uncoded step times the number of ranks.",
    ),
    click.Option(
        ["--model"],
        metavar="MODEL",
        help="Model of the stragglers: one of the models below, such as 'pareto(shape=1.5)' or 'bursty(begin=0.01) + "
        "fixed(factor=3)'. Default: the stragglers in the --measured file; without this file, no stragglers.",
    ),
    click.Option(
        ["--trace"],
        type=_FILE,
        help="Instead of --model: a file of factors: how many times as long as usual each rank took in each step. It "
        "has a line for each step and a column for each rank; .npy or text with commas.",
    ),
    click.Option(
        ["--measured"],
        type=_FILE,
        help="File with the links and ranks that jaxcoded bench --save has measured.",
    ),
    click.Option(
        ["--costs"],
        type=_FILE,
        help="File with the cost of each example of the data set, such as its length, if costs are unequal and "
        "known: .npy or text with commas. Batches are then divided by cost.",
    ),
    click.Option(
        ["--batch-size"],
        type=int,
        help="Number of examples in a batch; only with --costs.",
    ),
    click.Option(
        ["--gigabits"],
        type=float,
        help=f"Gb/s of a link. Default: the measured value, or {_GIGABITS:g} without --measured.",
    ),
    click.Option(
        ["--send-gigabits"],
        type=float,
        help="Gb/s that a port can send. Default: as much as the port can receive.",
    ),
    click.Option(
        ["--latency"],
        type=float,
        help="Seconds until a small message arrives. Default: the measured value, or 50e-6 without --measured.",
    ),
    click.Option(
        ["--seed"],
        type=int,
        default=0,
        show_default=True,
        help="Seed of the random draws and of random codes.",
    ),
)


def _cluster(
    *,
    ranks: int | None,
    payload: str | None,
    parameters: str | None,
    dtype: str | None,
    compute: str,
    model: str | None,
    trace: str | None,
    measured: str | None,
    costs: str | None,
    batch_size: int | None,
    gigabits: float | None,
    send_gigabits: float | None,
    latency: float | None,
    seed: int,
) -> Cluster:
    only_one(payload=payload, parameters=parameters)
    only_one(model=model, trace=trace)
    seen = None if measured is None else Measurement.load(measured)
    if ranks is None:
        if seen is None:
            raise ValueError("how many ranks? Give --ranks, or --measured with a file")
        ranks = len(seen.speeds)
    ranks = _require.integer("--ranks", ranks, 2, places.MOST_RANKS)
    return Cluster(
        ranks,
        _payload(payload, parameters, dtype),
        number_of_seconds("--compute", compute),
        _network(seen, gigabits, send_gigabits, latency),
        *_stragglers(ranks, model, trace, measured, seen),
        _require.integer("--seed", seed, 0),
        _costs(costs, batch_size),
    )


def only_one(**given: Any) -> None:
    """Raise a ValueError that names two of these options if more than one is given."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{names[1]} cannot go with {names[0]}: leave one of them out")


def _payload(payload: str | None, parameters: str | None, dtype: str | None) -> float:
    if parameters is not None:
        size = _ITEM_BYTES[dtype or "float32"]
        return _require.positive(
            "--parameters", count("--parameters", parameters) * size
        )
    if payload is None:
        raise ValueError(
            "how much is summed? Give --payload, such as 4MB, or --parameters, such as 25M"
        )
    if dtype is not None:
        raise ValueError(
            f"--dtype={dtype} goes with --parameters: --payload is in bytes already"
        )
    return number_of_bytes("--payload", payload)


def _costs(path: str | None, batch_size: int | None) -> Costs | None:
    if path is None:
        if batch_size is not None:
            raise ValueError(
                f"--batch-size={batch_size} goes with --costs: without costs, all examples cost the same"
            )
        return None
    if batch_size is None:
        raise ValueError("--costs needs --batch-size: how many examples has a batch?")
    costs = table(path)
    if costs.ndim != 1 and costs.size != max(costs.shape, default=0):
        raise ValueError(
            f"--costs {path}: must have one number for each example, in a line or a column, got {costs.shape}"
        )
    try:
        return Costs.of(costs.reshape(-1), batch_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--costs {path}: {error}") from None


def _network(
    seen: Measurement | None,
    gigabits: float | None,
    send_gigabits: float | None,
    latency: float | None,
) -> Network:
    """Return the measured or usual network, changed by the given options."""
    network = Network.of(_GIGABITS) if seen is None else seen.network
    changes: dict[str, float] = {}
    if gigabits is not None:
        rate = _require.positive("--gigabits", gigabits) * 1e9 / 8
        changes |= {"bandwidth": rate, "send_bandwidth": rate}
    if send_gigabits is not None:
        rate = _require.positive("--send-gigabits", send_gigabits) * 1e9 / 8
        changes["send_bandwidth"] = rate
    if latency is not None:
        changes["latency"] = _require.not_negative("--latency", latency)
    return dataclasses.replace(network, **changes)  # type: ignore[arg-type]


def _stragglers(
    ranks: int,
    model: str | None,
    trace: str | None,
    measured: str | None,
    seen: Measurement | None,
) -> tuple[stragglers.Stragglers, str]:
    if trace is not None:
        recorded: Any = stragglers.Trace(trace)
        columns = recorded.table.shape[1]
    elif model is not None:
        return stragglers.named(model), model
    elif seen is None:
        return stragglers.named("none"), _NOBODY
    else:
        recorded, columns, trace = seen.stragglers, len(seen.speeds), measured
    if columns != ranks:
        raise ValueError(
            f"{trace} has {columns} columns, but --ranks is {ranks}: give a file with one column for each rank, or a "
            "--model of the stragglers"
        )
    return recorded, f"from {trace}"
