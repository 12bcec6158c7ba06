"""Draw the pictures of ``README.md`` and ``docs``, as SVG.

    .venv/bin/python scripts/draw_pictures.py [FOLDER]

Each picture shows numbers from ``benchmarks/figures``, or explains an idea. Pictures have their own background, so that
they are readable on light and dark pages.
"""

import pathlib
import sys

from pictures import ideas, measured, sequences, states

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
PICTURES = (
    *(ideas.sharing, ideas.code, ideas.tree),
    *(measured.faults, measured.sizes, measured.stragglers, measured.ranks),
    *(
        sequences.messages_round,
        sequences.messages_sections,
        sequences.messages_sharing,
    ),
    states.recovery,
)


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        draw(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
