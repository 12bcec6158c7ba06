from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxcoded._format import fraction, s, table

if TYPE_CHECKING:
    from jaxcoded.plan import Plan
    from jaxcoded.plan.code_tree import CodeTree

LEGEND = "load and unused: parts of the batch per rank; message: gradients that a rank sends up"


def describe(plan: "Plan", strategy: "CodeTree") -> str:
    """See `Plan.describe`."""
    workers, depth = plan.size - 1, plan.tree.depth
    with_data = "with" if strategy.root_computes else "without"
    uncoded = 1 / sum(map(plan.speed, range(plan.size)))
    codes = [coding.code for _, coding in plan.coded_parents]
    least = max(strategy.stragglers, min(code.stragglers for code in codes))
    missing = f"any {least}" if least else "none"
    lines = [
        (
            f"{plan.size} ranks: root {plan.root} ({with_data} data) and {workers} "
            f"worker{s(workers)} in {depth} layer{s(depth)}; "
            f"{missing} of a parent's children may be missing"
            + " (the sum is then approximate)"
            * plan.approximate
        ),
        (
            f"load r = {fraction(plan.load)} of the batch for the busiest rank "
            f"(uncoded {uncoded}), amplification kappa = {plan.amplification:.3g}"
        ),
        "",
    ]
    layers = [_layer(plan, layer) for layer in range(depth + 1)]
    rows = [list(layers[0]), *(list(layer.values()) for layer in layers)]
    return "\n".join([*lines, *table(rows), *_exceptions(plan, strategy), LEGEND])


def _layer(plan: "Plan", layer: int) -> dict[str, str]:
    """Return a row of the table, by its headings."""
    ranks = [rank for rank in plan.tree.order if plan.tree.layers[rank] == layer]
    codes = [coding.code for rank in ranks if (coding := plan.codings[rank])]
    unused = [plan.capacities[rank] - plan.assigned[rank] for rank in ranks]
    largest = plan.capacities[plan.root]
    return {
        "layer": str(layer),
        "ranks": str(len(ranks)),
        "children": _span(code.n for code in codes),
        "code": ", ".join(dict.fromkeys(code.name for code in codes)) or "-",
        "tolerance": _span(code.stragglers for code in codes),
        "s/n": _span((code.stragglers / code.n for code in codes), "{:.2f}".format),
        "kappa": _span((code.amplification for code in codes), "{:.3g}".format),
        "load": _span(map(plan.load_of, ranks), fraction),
        "unused": _span((part / largest for part in unused), fraction),
        "message": _span(
            Fraction(plan.parts_above[r], plan.slices_above[r])
            for r in ranks
            if r != plan.root
        ),
    }


def _exceptions(plan: "Plan", strategy: "CodeTree") -> list[str]:
    """Return a line for every parent whose code differs from the request."""
    lines = []
    for rank, coding in plan.coded_parents:
        n, (lost, m) = coding.code.n, strategy.parameters(plan.tree, rank)
        if (lost, m) != (strategy.stragglers, strategy.slices):
            lines.append(
                f"rank {rank} has {n} child{'ren' * (n > 1)}: its code has s = {lost}, "
                f"m = {m} instead of s = {strategy.stragglers}, m = {strategy.slices}"
            )
    if not plan.speeds:
        return lines
    for rank, coding in plan.coded_parents:
        whole = coding.capacity
        lines += [
            f"rank {child} is fast enough for "
            f"{fraction(plan.capacities[child] / whole)} times the whole set of "
            f"its parent {rank}: it is assigned that set and no more"
            for child in plan.tree.children[rank]
            if plan.capacities[child] > whole
        ]
    return lines


def _span(values: Iterable[Any], show: Callable[[Any], str] = str) -> str:
    """Return the smallest and the largest value, or one value if all are equal."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    least, most = show(ordered[0]), show(ordered[-1])
    return least if least == most else f"{least} to {most}"
