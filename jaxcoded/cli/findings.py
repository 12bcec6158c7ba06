"""What was looked at, what was found, and what to do about it."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence

GOOD, NOTE, BAD = "ok", "note", "bad"
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        about: what was looked at, in a word or two.
        state: `GOOD`, `NOTE` (it works, but not as well as it could) or `BAD` (it does not).
        found: in words.
        remedy: what to do; empty if nothing.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each, and the remedies below."""
    widest = max(len(each.about) for each in findings)
    lines = []
    for each in findings:
        margin = f"{each.state:4}  {each.about:{widest}}  "
        for words, mark in ((each.found, ""), (each.remedy, "→ ")):
            for line in words.splitlines():
                lines += textwrap.wrap(
                    mark + line,
                    _WIDTH,
                    initial_indent=margin,
                    subsequent_indent=" " * (len(margin) + len(mark)),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                margin = " " * len(margin)
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects with the fields of `Finding`."""
    return json.dumps(
        [dataclasses.asdict(each) for each in findings], indent=2, ensure_ascii=False
    )
