"""A plan in words."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxcoded._format import table

if TYPE_CHECKING:
    from jaxcoded.plan import Plan
    from jaxcoded.plan.placement import Placement

HEADER = [
    "layer",
    "ranks",
    "children",
    "code",
    "tolerance",
    "s/n",
    "kappa",
    "load",
    "unused",
    "message",
]
LEGEND = "load and unused: parts of the batch per rank; message: gradients that a rank sends up"


def describe(plan: "Plan") -> str:
    """See `Plan.describe`."""
    if plan.size == 1:
        return "1 rank: it computes the whole batch, uncoded"
    if plan.placement is not None:
        return _shared(plan, plan.placement)
    workers, depth = plan.size - 1, plan.tree.depth
    with_data = "with" if plan.root_computes else "without"
    uncoded = 1 / sum(map(plan.speed, range(plan.size)))
    codes = [coding.code for coding in plan.codings if coding is not None]
    least = max(plan.stragglers, min(code.stragglers for code in codes))
    missing = f"any {least}" if least else "none"
    lines = [
        (
            f"{plan.size} ranks: root {plan.root} ({with_data} data) and {workers} "
            f"worker{_s(workers)} in {depth} layer{_s(depth)}; "
            f"{missing} of a parent's children may be missing"
            + ", the sum is then approximate"
            * plan.approximate
        ),
        (
            f"load r = {_fraction(plan.load)} of the batch for the busiest rank "
            f"(uncoded {uncoded}), amplification kappa = {plan.amplification:.3g}"
        ),
        "",
    ]
    rows = [HEADER, *(_layer(plan, layer) for layer in range(depth + 1))]
    return "\n".join([*lines, *table(rows), *_exceptions(plan), LEGEND])


def _shared(plan: "Plan", placed: "Placement") -> str:
    """Of a plan whose work is shared."""
    n, blocks, others = len(placed.ranks), placed.blocks, placed.replicas
    missing = (
        f"any {others} ranks" if others > 1 else "any rank" if others else "no rank"
    )
    helped = (
        "whoever is done computes blocks of others"
        if others
        else "with replicas=0 nobody else has its data, and everybody waits for it"
    )
    each = Fraction(1, n)
    with_data = "with" if plan.root_computes else "without"
    return "\n".join(
        [
            (
                f"{plan.size} ranks: root {plan.root} ({with_data} data) and "
                f"{plan.size - 1} worker{_s(plan.size - 1)}, which share the work: "
                f"{missing} {'but the root ' * (others > 0)}may be missing"
            ),
            (
                f"a rank computes {_fraction(each)} of the batch, in {blocks} "
                f"block{_s(blocks)}, where nobody is late; {helped}"
            ),
            (
                f"a rank holds the data of {_fraction((1 + others) * each)} of the batch: "
                f"each block lies on its owner"
                + f" and {others} other{_s(others)}"
                * (others > 0)
            ),
        ]
    )


def _layer(plan: "Plan", layer: int) -> list[str]:
    """One row of the table."""
    ranks = [rank for rank in plan.tree.order if plan.tree.layers[rank] == layer]
    codes = [coding.code for rank in ranks if (coding := plan.codings[rank])]
    unused = [plan.capacities[rank] - plan.assigned[rank] for rank in ranks]
    return [
        str(layer),
        str(len(ranks)),
        _span(code.n for code in codes),
        ", ".join(dict.fromkeys(code.name for code in codes)) or "-",
        _span(code.stragglers for code in codes),
        _span((code.stragglers / code.n for code in codes), "{:.2f}".format),
        _span((code.amplification for code in codes), "{:.3g}".format),
        _span(map(plan.load_of, ranks), _fraction),
        _span((part / plan.capacities[plan.root] for part in unused), _fraction),
        _span(
            Fraction(plan.parts_above[r], plan.slices_above[r])
            for r in ranks
            if r != plan.root
        ),
    ]


def _exceptions(plan: "Plan") -> list[str]:
    """A line for every parent whose code is not what was asked for."""
    lines = []
    for rank, coding in enumerate(plan.codings):
        if coding is None:
            continue
        n, (s, m) = coding.code.n, plan.code_parameters(rank)
        if (s, m) != (plan.stragglers, plan.slices):
            lines.append(
                f"rank {rank} has {n} child{'ren' * (n > 1)}: its code has s = {s}, "
                f"m = {m} instead of s = {plan.stragglers}, m = {plan.slices}"
            )
    for rank, coding in enumerate(plan.codings):
        if coding is None or not plan.speeds:
            continue
        whole = coding.capacity
        fast = [c for c in plan.tree.children[rank] if plan.capacities[c] > whole]
        for child in fast:
            lines.append(
                f"rank {child} is fast enough for "
                f"{_fraction(plan.capacities[child] / whole)} times the whole set of "
                f"its parent {rank}: it is assigned that set and no more"
            )
    return lines


def _span(values: Iterable[Any], show: Callable[[Any], str] = str) -> str:
    """The value, or the smallest and the largest one."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    least, most = show(ordered[0]), show(ordered[-1])
    return least if least == most else f"{least} to {most}"


def _fraction(value: Fraction) -> str:
    """The fraction itself while it is short, else four digits."""
    text = str(value)
    return text if len(text) <= 7 else f"{float(value):.4f}"


def _s(count: int) -> str:
    return "s" * (count != 1)
