"""States of a job and of a late rank (``docs/recovery.md``)."""

import pathlib

from .canvas import WIDTH, Picture


def state(
    picture: Picture, x: float, y: float, width: float, name: str, says: str, kind: str
) -> None:
    picture.box(x, y, width, 54, f"state {kind}", 8)
    picture.words(x + width / 2, y + 23, name, "", "middle")
    picture.words(x + width / 2, y + 42, says, "small", "middle")


def states(file: pathlib.Path) -> None:
    """What faults make of a group, and which call leads back."""
    it = Picture(
        WIDTH,
        470,
        "States of a group: full tolerance; after a death less of it; a failed step; and recovered, tree_bcast, "
        "extended and checkpoints, which lead back. States of a late rank: in step, behind, out of the history.",
    )
    it.words(24, 32, "The group", "title")
    left, middle, right, wide = 24, 268, 512, 184
    state(it, left, 56, wide, "full tolerance", "all ranks live", "c")
    state(it, middle, 56, wide, "less tolerance", "steps continue", "b")
    state(it, right, 56, wide, "a step fails", "an error on all ranks", "late-box")
    state(it, middle, 186, wide, "full tolerance", "fewer ranks", "c")
    state(it, right, 186, wide, "the job ends", "", "late-box")
    it.path(f"M{left + wide} 83H{middle - 3}", tip=True)
    it.words((left + wide + middle) / 2, 48, "a rank dies", "small", "middle")
    it.path(f"M{middle + wide} 83H{right - 3}", tip=True)
    it.words(
        (middle + wide + right) / 2, 48, "the root, or too many", "small", "middle"
    )
    it.path(f"M{middle + 60} 110V183", tip=True)
    it.words(middle + 52, 150, "recovered()", "code", "end")
    it.path(
        f"M{right + 30} 110C{right + 30} 150 {middle + 150} 140 {middle + 150} 183",
        tip=True,
    )
    it.words(right - 8, 168, "recovered(), tree_bcast()", "code")
    it.save(file)
