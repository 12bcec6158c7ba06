"""Find out whether to share a job's work, to take a code and which one, or neither.

The job is simulated with shared work, with many trees and codes, and without a code: ring
all-reduce and uncoded trees. docs/planning.md tells how, and what is not looked at.

    jaxcoded plan --ranks 13 --payload 4MB --compute 1.2 --model "pareto(shape=1.5)"
"""

import argparse
import json
import math
from typing import Any

from jaxcoded import _format, _require
from jaxcoded._parse import count, number_of_bytes, number_of_seconds
from jaxcoded._progress import progress
from jaxcoded.planner import Estimate, LeftOut, Ranking, best_plans
from jaxcoded.simulator import Network, stragglers
from jaxcoded.transport.options import PIECE

_HEADER = (
    *("", "fan-out", "s", "m", "code", "piece", "root", "step", "± error"),
    *("5 … 95 % of steps", "load", "message", "κ"),
)
# Not from NumPy, which does not know bfloat16.
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_LEGEND = (
    "s: children of each parent that may be late; m: messages are so many times shorter; piece: "
    "bytes in which they move; root: whether it computes too\n"
    "shared: others compute a late rank's blocks; replicas: how many others hold its data\n"
    "step: mean of up to {} simulated steps; load: part of the batch that the busiest rank "
    "computes; κ: how much rounding may grow"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--ranks", type=int, required=True, help="in the job")
    payload = parser.add_mutually_exclusive_group(required=True)
    payload.add_argument(
        "--payload",
        metavar="BYTES",
        help="that are summed in every step, such as 4e6 or 4MB",
    )
    payload.add_argument(
        "--parameters",
        metavar="COUNT",
        help="of the model, such as 25M or 7B (billions), whose gradient is summed in every "
        "step: instead of --payload",
    )
    parser.add_argument(
        "--dtype",
        choices=_ITEM_BYTES,
        help="of the gradient, with --parameters; default float32",
    )
    parser.add_argument(
        "--compute",
        required=True,
        metavar="SECONDS",
        help="such as 1.2 or 500ms, that one usual rank would take for the gradient of the whole batch on its "
        "own: about the uncoded computation of a step times the number of ranks",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default="none",
        help="of the stragglers: one of "
        f"{', '.join(stragglers.MODELS)}, such as 'pareto(shape=1.5)' or "
        "'bursty(begin=0.01) + fixed(factor=3)'; default none",
    )
    model.add_argument(
        "--trace",
        metavar="FILE",
        help="of the stragglers: factors that were measured, .npy or text with commas, a "
        "line for each round and a column for each rank",
    )
    parser.add_argument(
        "--gigabits", type=float, default=10.0, help="Gb/s of a link; default 10"
    )
    parser.add_argument(
        "--send-gigabits",
        type=float,
        help="Gb/s that a port can send; default the same",
    )
    parser.add_argument(
        "--latency", type=float, default=50e-6, help="seconds; default 50e-6"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="other ranks that may hold each rank's part of the batch, to share the work; 0: "
        "no shared work; default all",
    )
    parser.add_argument(
        "--reading",
        metavar="SECONDS",
        help="that a rank would take to read the data of the whole batch, of which it reads "
        "in every step what it holds; default 0",
    )
    parser.add_argument("--top", type=int, default=5, help="coded rows; default 5")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws and random codes; default 0"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> None:
    """Print the ranking."""
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    if args.trace is None:
        model = stragglers.named(args.model)
    else:
        model = stragglers.Trace(args.trace)
        columns = model.table.shape[1]
        if columns != args.ranks:
            raise ValueError(
                f"{args.trace} has {columns} columns, and --ranks is {args.ranks}: it must "
                "have one for each rank"
            )
    receiving = _require.positive("--gigabits", args.gigabits)
    sending = receiving
    if args.send_gigabits is not None:
        sending = _require.positive("--send-gigabits", args.send_gigabits)
    reading = 0.0
    if args.reading is not None:
        reading = number_of_seconds("--reading", args.reading)
    if args.parameters is not None:
        items = count("--parameters", args.parameters)
        payload = items * _ITEM_BYTES[args.dtype or "float32"]
    elif args.dtype is not None:
        raise ValueError(
            f"--dtype={args.dtype} goes with --parameters: --payload is in bytes already"
        )
    else:
        payload = number_of_bytes("--payload", args.payload)
    with progress("planning") as tell:
        ranking = best_plans(
            args.ranks,
            payload,
            number_of_seconds("--compute", args.compute),
            Network(
                latency=args.latency,
                bandwidth=receiving * 1e9 / 8,
                send_bandwidth=sending * 1e9 / 8,
            ),
            model,
            seed=args.seed,
            replicas=args.replicas,
            reading=reading,
            progress=tell,
        )
    show = _json if args.json else _table
    print(show(ranking, args.top, args.seed))


def _chosen(ranking: Ranking, top: int) -> list[Estimate]:
    """The best of the coded ones, and of each uncoded and shared one."""
    coded = [e for e in ranking.estimates if e.candidate.coded][:top]
    uncoded: dict[int, Estimate] = {}
    for estimate in ranking.estimates:
        if estimate.candidate.plain:
            uncoded.setdefault(estimate.candidate.fanout, estimate)
    shared = [e for e in ranking.estimates if e.candidate.shared]
    shown = [*coded, *shared, *uncoded.values()]
    return [e for e in ranking.estimates if e in shown]


def _python(ranking: Ranking, seed: int) -> str:
    """The line that makes the group."""
    it = ranking.best.candidate
    if not it.tree:
        return "jaxcoded.baselines.ring_allreduce(gradients, comm)"
    arguments = f"fanout={it.fanout}, stragglers={it.stragglers}"
    if it.shared:
        arguments = f'code="{it.code}"' + ", root_computes=False" * (
            not it.root_computes
        )
    arguments += f", slices={it.slices}" * (it.slices > 1)
    arguments += ", root_computes=True" * (it.root_computes and not it.shared)
    arguments += f", seed={seed}" * (seed > 0)
    if it.piece != PIECE:
        arguments += f", options=jaxcoded.Options(piece_bytes={it.piece})"
    return f"jaxcoded.CodedGroup(comm, {arguments})"


def _table(ranking: Ranking, top: int, seed: int) -> str:
    rows = [_HEADER, *(_row(e, ranking.best) for e in _chosen(ranking, top))]
    return "\n".join(
        [
            *_format.table(rows),
            _LEGEND.format(max(len(e.seconds) for e in ranking.estimates)),
            "",
            ranking.verdict,
            _python(ranking, seed),
        ]
    )


def _row(estimate: Estimate, best: Estimate) -> tuple[str, ...]:
    it = estimate.candidate
    low, high = estimate.usual
    return (
        "→" if estimate is best else "",
        *(
            (str(it.fanout), str(it.stragglers), str(it.slices))
            if it.tree and not it.shared
            else ("–",) * 3
        ),
        estimate.code if it.tree else "ring all-reduce",
        f"{it.piece >> 10} KiB" if it.tree else "–",
        ("yes" if it.root_computes else "no") if it.tree else "–",
        _seconds(estimate.step),
        _seconds(estimate.error),
        f"{_seconds(low)} … {_seconds(high)}",
        f"{estimate.load:.3g}",
        _bytes(estimate.message),
        f"{estimate.amplification:.3g}",
    )


def _json(ranking: Ranking, top: int, seed: int) -> str:
    return json.dumps(
        {
            "ranks": ranking.ranks,
            "payload": ranking.payload,
            "compute": ranking.work,
            "code": ranking.best.candidate.coded,
            "verdict": ranking.verdict,
            "python": _python(ranking, seed),
            "best": _fields(ranking.best),
            "left_out": _left_out(ranking.left_out),
            "ranking": [_fields(e) for e in _chosen(ranking, top)],
        },
        indent=2,
        ensure_ascii=False,
    )


def _left_out(it: LeftOut | None) -> dict[str, Any] | None:
    if it is None:
        return None
    return {
        "fanout": it.candidate.fanout,
        "stragglers": it.candidate.stragglers,
        "slices": it.candidate.slices,
        "gain": _finite(it.gain),
        "ranks": it.ranks or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _fields(estimate: Estimate) -> dict[str, Any]:
    """Numbers in seconds and bytes; those that do not end are null."""
    it = estimate.candidate
    low, high = estimate.usual
    times = {"step": estimate.step, "error": estimate.error, "p5": low, "p95": high}
    return {
        "kind": "shared" if it.shared else "tree" if it.tree else "ring",
        "fanout": it.fanout if it.tree and not it.shared else None,
        "stragglers": it.stragglers,
        "slices": it.slices,
        "blocks": it.blocks or None,
        "replicas": it.replicas if it.shared else None,
        "code": estimate.code,
        "piece": it.piece if it.tree else None,
        "root_computes": it.root_computes if it.tree else None,
        **{key: _finite(value) for key, value in times.items()},
        "load": estimate.load,
        "held": estimate.held,
        "message": estimate.message,
        "amplification": estimate.amplification,
    }


def _seconds(value: float) -> str:
    return _format.seconds(value, "never")


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
