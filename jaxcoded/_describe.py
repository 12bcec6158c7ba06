"""A plan in words."""

from fractions import Fraction

from jaxcoded.plan import Plan


def describe(plan: Plan) -> str:
    """See `Plan.describe`."""
    tree = plan.tree
    if plan.size == 1:
        return "1 rank: it computes the whole batch, uncoded"
    workers = plan.size - 1
    lines = [
        f"{plan.size} ranks: root {plan.root} ({'with' if plan.root_computes else 'without'} data) and {workers} workers "
        f"in {tree.depth} layer{'s' * (tree.depth > 1)}",
        f"load r = {_fraction(plan.load)} of the batch for the busiest rank "
        f"(uncoded 1/{workers + plan.root_computes}), amplification κ = {plan.amplification:.3g}",
        "",
    ]
    header = ("layer", "ranks", "children", "code", "may miss", "s/n", "κ", "load", "spare", "message")
    rows = [header]
    for layer in range(tree.depth + 1):
        ranks = [rank for rank in tree.order if tree.layers[rank] == layer]
        parents = [rank for rank in ranks if plan.layouts[rank] is not None]
        own = [plan.given[rank] / plan.capacities[rank] * plan.load * plan.computes(rank) for rank in ranks]
        spare = [(plan.capacities[rank] - plan.given[rank]) * plan.load for rank in ranks]
        codings = [coding for rank in parents if (coding := plan.layouts[rank]) is not None]
        rows.append(
            (
                str(layer),
                str(len(ranks)),
                _range([len(tree.children[rank]) for rank in parents]),
                ", ".join(dict.fromkeys(coding.code.name for coding in codings)) or "–",
                _range([coding.code.stragglers for coding in codings]),
                _range([f"{coding.code.stragglers / coding.code.n:.2f}" for coding in codings]),
                _range([f"{coding.code.amplification:.3g}" for coding in codings]),
                _range([_fraction(value) for value in sorted(own)]),
                _range([_fraction(value) for value in sorted(spare)]),
                "–" if layer == 0 else _range([_part(plan.slices_above[rank]) for rank in ranks]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for rank, coding in enumerate(plan.layouts):
        if coding is None:
            continue
        n, s, m = coding.code.n, coding.code.stragglers, coding.code.m
        if (s, m) != (plan.stragglers, plan.slices):
            lines.append(
                f"rank {rank} has {n} child{'ren' * (n > 1)} and keeps s = {s}, m = {m} "
                f"instead of s = {plan.stragglers}, m = {plan.slices}"
            )
    lines.append("load and spare are parts of the batch per rank, message is the part of a gradient that a rank sends up")
    return "\n".join(lines)


def _fraction(value: Fraction) -> str:
    """The fraction itself while it is short, else four digits."""
    text = str(value)
    return text if len(text) <= 7 else f"{float(value):.4f}"


def _part(slices: int) -> str:
    return "1" if slices == 1 else f"1/{slices}"


def _range(values: list) -> str:
    distinct = list(dict.fromkeys(values))
    if not distinct:
        return "–"
    if len(distinct) == 1:
        return str(distinct[0])
    if all(isinstance(value, int) for value in distinct):
        return f"{min(distinct)}…{max(distinct)}"
    return f"{distinct[0]}…{distinct[-1]}"
