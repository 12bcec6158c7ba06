"""Draw shapes and words on a panel, as SVG for light and dark pages."""

import html
import pathlib
from collections.abc import Iterable

WIDTH = 720  # width of a page's column, so that text keeps its size
SHAPES = {
    "circle": "M4.5 0A4.5 4.5 0 1 1 -4.5 0A4.5 4.5 0 1 1 4.5 0Z",
    "ring": "M7 0A7 7 0 1 1 -7 0A7 7 0 1 1 7 0Z",
    "square": "M-4 -4H4V4H-4Z",
    "triangle": "M0 -5L5 4H-5Z",
    "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
    "bar": "M0 -9V9",
}

# Okabe & Ito 2008, as in all pictures; dark text is readable on these colours on light and dark pages.
COLOURS = ("#56B4E9", "#E69F00", "#2BB58D", "#CC79A7")
STYLE = """
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
svg { --panel: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #b7bfc8; --late: #b3261e;
  --a: #0072B2; --b: #D55E00; --c: #00805D; --d: #B0568A; }
@media (prefers-color-scheme: dark) {
  svg { --panel: #161b22; --ink: #e6edf3; --soft: #9aa4b0; --line: #545d68; --late: #ff8f85;
    --a: #56B4E9; --b: #E69F00; --c: #2BB58D; --d: #DD93BC; }
}
.panel { fill: var(--panel); stroke: var(--line); }
.title { font-weight: 600; font-size: 15px; }
.soft { fill: var(--soft); font-size: 13px; }
.late { fill: var(--late); }
.outcome { fill: var(--late); font-size: 12px; }
.on { fill: #10151c; font-size: 13px; }
.box { fill: none; stroke: var(--line); stroke-width: 1.5; }
.line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.missing { fill: none; stroke: var(--late); stroke-width: 1.5; stroke-dasharray: 4 4; }
.waits { fill: url(#waits); }
.hatch { stroke: var(--line); stroke-width: 2; }
.tip { fill: var(--soft); }
.tip-data { fill: var(--a); }
.grid { fill: none; stroke: var(--line); stroke-width: 0.75; opacity: 0.6; }
.frame { fill: none; stroke: var(--line); stroke-width: 1; }
.small { font-size: 12px; fill: var(--soft); }
.bad { fill: var(--late); opacity: 0.16; }
.data { fill: none; stroke: var(--a); stroke-width: 3; }
.called { fill: var(--soft); }
.over { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.tick { fill: none; stroke-width: 1.25; }
.mark { stroke-width: 1.75; }
.state { fill: none; stroke-width: 2; }
.bad-state { stroke: var(--late); }
.call { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.a { stroke: var(--a); color: var(--a); }
.b { stroke: var(--b); color: var(--b); }
.c { stroke: var(--c); color: var(--c); }
.d { stroke: var(--d); color: var(--d); }
.e { stroke: var(--soft); color: var(--soft); }
"""
DEFINITIONS = """<defs>
<pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
  markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0 0L8 4L0 8Z"/></marker>
<marker id="tip-data" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="11" markerHeight="11"
  markerUnits="userSpaceOnUse" orient="auto"><path class="tip-data" d="M0 0L8 4L0 8Z"/></marker>
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
        """Draw work or data in the colour of its owner."""
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
        name = "tip-data" if kind == "data" else "tip"
        end = f' marker-end="url(#{name})"' if tip else ""
        self.parts.append(f'<path class="{kind}" d="{d}"{end}/>')

    def curve(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        self.path(
            "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), f"curve {colour}"
        )

    def mark(self, x: float, y: float, shape: str, colour: str) -> None:
        """Draw a point of a chart. Its shape and its colour each identify its series."""
        fill = "none" if shape == "ring" else "currentColor"
        self.parts.append(
            f'<path class="mark {colour}" style="fill: {fill}" '
            f'transform="translate({x:.1f} {y:.1f})" d="{SHAPES[shape]}"/>'
        )

    def save(self, file: pathlib.Path) -> None:
        file.write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")
