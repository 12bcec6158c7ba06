"""The ideas: shared work, a code, and a tree of codes."""

import pathlib

from .canvas import Picture

ROW, BAR = 34, 24


def timeline(
    picture: Picture,
    x: float,
    y: float,
    unit: float,
    rows: list[tuple[str, list[tuple[int, str, float]]]],
    end: float,
) -> None:
    """Draw the blocks of each rank, with owner, name and time, and the waits."""
    for number, (name, blocks) in enumerate(rows):
        top, at = y + ROW * number, 0.0
        late = "slow" in name
        picture.words(
            x - 10, top + BAR / 2 + 4.5, name, "late" if late else "soft", "end"
        )
        for owner, says, time in blocks:
            picture.block(x + unit * at, top, unit * time, BAR, owner, says)
            at += time
        if at < end:
            picture.box(x + unit * at + 1, top, unit * (end - at) - 2, BAR, "waits")
    bottom = y + ROW * len(rows) - ROW + BAR
    picture.path(f"M{x + unit * end:g} {y - 8}V{bottom + 8}")
    picture.words(x + unit * end, bottom + 24, "the sum", "soft", "middle")


def own(owner: int, blocks: int, time: float) -> list[tuple[int, str, float]]:
    return [(owner, str(owner * blocks + block + 1), time) for block in range(blocks)]


def sharing(file: pathlib.Path) -> None:
    """Draw three ranks that each hold two thirds of the batch; one is three times
    slower.

    Ranks 0 and 1 compute blocks of rank 2, as each holds half of them.
    """
    picture = Picture(
        720,
        372,
        "Three ranks, each with two of three parts of the batch, one late. Usually all wait "
        "for it. With jaxcoded the others compute what it would be late with.",
    )
    picture.words(24, 32, "Usual: every rank waits for the slowest", "title")
    rows = [
        ("rank 0", own(0, 3, 1.0)),
        ("rank 1", own(1, 3, 1.0)),
        ("rank 2, slow", own(2, 3, 3.0)),
    ]
    timeline(picture, 124, 52, 60, rows, 9)
    picture.words(
        24,
        212,
        "jaxcoded: ranks that are done compute blocks of the slow one",
        "title",
    )
    rows = [
        ("rank 0", [*own(0, 3, 1.0), (2, "9", 1.0)]),
        ("rank 1", [*own(1, 3, 1.0), (2, "8", 1.0)]),
        ("rank 2, slow", [(2, "7", 3.0)]),
    ]
    timeline(picture, 124, 232, 60, rows, 4)
    x = 124 + 4 * 60 + 56
    picture.words(x, 250, "The same batch, the same sum:")
    picture.words(x, 274, "nothing left out, nothing twice.")
    picture.words(x, 298, "Each rank holds 2 of 3 parts of the data.")
    picture.save(file)


def code(file: pathlib.Path) -> None:
    """Draw the example of Tandon et al. 2017, Fig. 2: n = 3, s = 1."""
    picture = Picture(720, 300, "Three messages, of which any two give the exact sum")
    picture.words(
        24, 32, "A code: the messages of any two of three children suffice", "title"
    )
    messages = ["½ g₁ + g₂", "g₂ − g₃", "½ g₁ + g₃"]
    parts = [(1, 2), (2, 3), (3, 1)]
    for child in range(3):
        x, late = 40 + 224 * child, child == 2
        picture.box(x, 214, 192, 62, "box", 8)
        picture.words(
            x + 14,
            236,
            f"rank {child + 1}" + (", late" if late else ""),
            "late" if late else "soft",
        )
        for place, part in enumerate(sorted(parts[child])):
            picture.block(x + 14 + 84 * place, 244, 82, BAR, part - 1, f"part {part}")
        up = f"M{x + 96} 210L{360 + 40 * (child - 1)} 118"
        picture.path(up, "missing" if late else "line", tip=not late)
        picture.words(
            x + 96 + (0, 12, 0)[child],
            190,
            messages[child],
            "",
            ("end", "start", "start")[child],
        )
    picture.box(130, 60, 460, 54, "box", 8)
    picture.words(360, 82, "2 · (½ g₁ + g₂) − (g₂ − g₃)  =  g₁ + g₂ + g₃", "", "middle")
    picture.words(
        360, 104, "the root, with ranks 1 and 2: the exact sum", "soft", "middle"
    )
    picture.save(file)


def tree(file: pathlib.Path) -> None:
    """Draw the (3, 2) tree of CodedReduce, with a late child of every parent."""
    picture = Picture(
        720, 296, "A tree of 13 ranks; one child of every parent may be late"
    )
    picture.words(
        24, 32, "A tree of codes: one child of every parent may be late", "title"
    )
    late = {2, 4, 8, 12}
    place = {0: (360.0, 74.0)}
    for rank in range(1, 4):
        place[rank] = (130.0 + 230 * (rank - 1), 152.0)
    for rank in range(4, 13):
        place[rank] = (130 + 230 * ((rank - 4) // 3) + 66 * ((rank - 4) % 3 - 1), 232)
    for rank in range(1, 13):
        (x, y), (above, top) = place[rank], place[(rank - 1) // 3]
        kind = "missing" if rank in late else "line"
        picture.path(
            f"M{x:g} {y - 16:g}L{above:g} {top + 18:g}", kind, tip=rank not in late
        )
    for rank, (x, y) in place.items():
        kind = "missing" if rank in late else "line"
        picture.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="16" class="{kind}" style="fill: var(--panel)"/>'
        )
        picture.words(x, y + 5, str(rank), "late" if rank in late else "", "middle")
    picture.words(390, 79, "the root: no data, the exact sum", "soft")
    picture.words(
        360,
        278,
        "dashed: late. Each parent forms its sum from two of its three children.",
        "soft",
        "middle",
    )
    picture.save(file)
