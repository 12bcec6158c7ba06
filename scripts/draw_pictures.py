"""Draw the pictures of ``README.md``, as SVG.

    .venv/bin/python scripts/draw_pictures.py [FOLDER]

They bring a panel of their own, so that they can be read on a light and on a dark page.
"""

import html
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "pictures"

# Okabe & Ito 2008, as in all pictures here; dark writing stands on them in both schemes.
COLOURS = ("#56B4E9", "#E69F00", "#2BB58D", "#CC79A7")
STYLE = """
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
svg { --panel: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #b7bfc8; --late: #b3261e; }
@media (prefers-color-scheme: dark) {
  svg { --panel: #161b22; --ink: #e6edf3; --soft: #9aa4b0; --line: #545d68; --late: #ff8f85; }
}
.panel { fill: var(--panel); stroke: var(--line); }
.title { font-weight: 600; font-size: 15px; }
.soft { fill: var(--soft); font-size: 13px; }
.late { fill: var(--late); }
.on { fill: #10151c; font-size: 13px; }
.box { fill: none; stroke: var(--line); stroke-width: 1.5; }
.line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.missing { fill: none; stroke: var(--late); stroke-width: 1.5; stroke-dasharray: 4 4; }
.waits { fill: url(#waits); }
.hatch { stroke: var(--line); stroke-width: 2; }
.tip { fill: var(--soft); }
"""
DEFINITIONS = """<defs>
<pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
  orient="auto"><path class="tip" d="M0 0L8 4L0 8Z"/></marker>
</defs>"""


class Picture:
    """Shapes and words on a panel."""

    def __init__(self, width: int, height: int, says: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{html.escape(says)}</title>",
            f"<style>{STYLE}</style>",
            DEFINITIONS,
        ]
        self.box(0.75, 0.75, width - 1.5, height - 1.5, "panel", 10)

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, round: int = 3
    ) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{round}"/>'
        )

    def block(
        self, x: float, y: float, width: float, height: float, owner: int, says: str
    ) -> None:
        """Work or data, in the colour of its owner."""
        self.parts.append(
            f'<rect fill="{COLOURS[owner]}" x="{x + 1:g}" y="{y:g}" width="{width - 2:g}" '
            f'height="{height:g}" rx="3"/>'
        )
        self.words(x + width / 2, y + height / 2 + 4.5, says, "on", "middle")

    def words(
        self, x: float, y: float, says: str, kind: str = "", anchor: str = "start"
    ) -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{html.escape(says)}</text>"
        )

    def path(self, d: str, kind: str = "line", tip: bool = False) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path class="{kind}" d="{d}"{end}/>')

    def save(self, file: pathlib.Path) -> None:
        file.write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


ROW, BAR = 34, 24


def timeline(
    picture: Picture,
    x: float,
    y: float,
    unit: float,
    rows: list[tuple[str, list[tuple[int, str, float]]]],
    end: float,
) -> None:
    """What each rank computes: an owner, a name and a time for each block; and who waits."""
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
    """Three ranks; each holds two thirds of the batch, and one is three times slower.

    The blocks of rank 2 are computed by ranks 0 and 1; as each holds half of them, both can.
    """
    it = Picture(
        720,
        372,
        "Three ranks, each with two of three parts of the batch, one late. Usually all wait "
        "for it. With jaxcoded the others compute what it would be late with.",
    )
    it.words(24, 32, "Usual: every rank waits for the slowest", "title")
    rows = [
        ("rank 0", own(0, 3, 1.0)),
        ("rank 1", own(1, 3, 1.0)),
        ("rank 2, slow", own(2, 3, 3.0)),
    ]
    timeline(it, 124, 52, 60, rows, 9)
    it.words(
        24,
        212,
        "jaxcoded: who is done computes what others would be late with",
        "title",
    )
    rows = [
        ("rank 0", [*own(0, 3, 1.0), (2, "9", 1.0)]),
        ("rank 1", [*own(1, 3, 1.0), (2, "8", 1.0)]),
        ("rank 2, slow", [(2, "7", 3.0)]),
    ]
    timeline(it, 124, 232, 60, rows, 4)
    x = 124 + 4 * 60 + 56
    it.words(x, 250, "The same batch, the same sum:")
    it.words(x, 274, "nothing left out, nothing twice.")
    it.words(x, 298, "Each rank holds 2 of 3 parts of the data.")
    it.save(file)


def code(file: pathlib.Path) -> None:
    """The example of Tandon et al. 2017, Fig. 2: n = 3, s = 1."""
    it = Picture(720, 300, "Three messages, of which any two give the exact sum")
    it.words(
        24, 32, "A code: the messages of any two of three children suffice", "title"
    )
    messages = ["½ g₁ + g₂", "g₂ − g₃", "½ g₁ + g₃"]
    parts = [(1, 2), (2, 3), (3, 1)]
    for child in range(3):
        x, late = 40 + 224 * child, child == 2
        it.box(x, 214, 192, 62, "box", 8)
        it.words(
            x + 14,
            236,
            f"rank {child + 1}" + (", late" if late else ""),
            "late" if late else "soft",
        )
        for place, part in enumerate(sorted(parts[child])):
            it.block(x + 14 + 84 * place, 244, 82, BAR, part - 1, f"part {part}")
        up = f"M{x + 96} 210L{360 + 40 * (child - 1)} 118"
        it.path(up, "missing" if late else "line", tip=not late)
        it.words(
            x + 96 + (0, 12, 0)[child],
            190,
            messages[child],
            "",
            ("end", "start", "start")[child],
        )
    it.box(130, 60, 460, 54, "box", 8)
    it.words(360, 82, "2 · (½ g₁ + g₂) − (g₂ − g₃)  =  g₁ + g₂ + g₃", "", "middle")
    it.words(360, 104, "the root, with ranks 1 and 2: the exact sum", "soft", "middle")
    it.save(file)


def tree(file: pathlib.Path) -> None:
    """The (3, 2) tree of CodedReduce, with a late child of every parent."""
    it = Picture(720, 296, "A tree of 13 ranks; one child of every parent may be late")
    it.words(24, 32, "A tree of codes: one child of every parent may be late", "title")
    late = {2, 4, 8, 12}
    place = {0: (360.0, 74.0)}
    for rank in range(1, 4):
        place[rank] = (130.0 + 230 * (rank - 1), 152.0)
    for rank in range(4, 13):
        place[rank] = (130 + 230 * ((rank - 4) // 3) + 66 * ((rank - 4) % 3 - 1), 232)
    for rank in range(1, 13):
        (x, y), (above, top) = place[rank], place[(rank - 1) // 3]
        kind = "missing" if rank in late else "line"
        it.path(f"M{x:g} {y - 16:g}L{above:g} {top + 18:g}", kind, tip=rank not in late)
    for rank, (x, y) in place.items():
        kind = "missing" if rank in late else "line"
        it.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="16" class="{kind}" style="fill: var(--panel)"/>'
        )
        it.words(x, y + 5, str(rank), "late" if rank in late else "", "middle")
    it.words(390, 79, "the root: no data, the exact sum", "soft")
    it.words(
        360,
        278,
        "dashed: late. Each parent forms its sum from two of its three children.",
        "soft",
        "middle",
    )
    it.save(file)


PICTURES = (sharing, code, tree)


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        draw(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
