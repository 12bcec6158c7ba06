import dataclasses
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from jaxcoded.tools.terminal import output, plain

GOOD, NOTE, BAD = "ok", "note", "bad"
_STYLES = {GOOD: "green", NOTE: "yellow", BAD: "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report."""

    about: str  # the subject, in a word or two
    # `GOOD`; `NOTE`: the subject works, but not as well as it could; or `BAD`: it does
    # not work
    state: str
    found: str  # the finding, as text
    remedy: str = ""  # the remedy; empty if none is needed


def show(findings: Sequence[Finding]) -> None:
    """Print one line for each finding, and then the remedies."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for each in findings:
        words = Text(plain.words(each.found))
        if each.remedy:
            words.append(plain.words(f"\n→ {each.remedy}"), "bold")
        grid.add_row(Text(each.state, _STYLES[each.state]), Text(each.about), words)
    output.show(grid)
