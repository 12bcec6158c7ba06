"""Draw the states of a group and of a late rank, and the calls that lead back
(``docs/recovery.md``).
"""

import pathlib

from .canvas import WIDTH, Picture

BOX, HEIGHT = 160, 54
COLUMNS = (24, 280, 536)


def state(
    picture: Picture, column: int, y: float, name: str, says: str, kind: str
) -> None:
    x = COLUMNS[column]
    picture.box(x, y, BOX, HEIGHT, f"state {kind}", 8)
    picture.words(x + BOX / 2, y + 23, name, "", "middle")
    picture.words(x + BOX / 2, y + 42, says, "small", "middle")


def between(
    picture: Picture, column: int, y: float, above: str, below: str = ""
) -> None:
    """Draw an arrow to the next column."""
    begin, end = COLUMNS[column] + BOX, COLUMNS[column + 1]
    picture.path(f"M{begin} {y}H{end - 3}", tip=True)
    picture.words((begin + end) / 2, y - 7, above, "small", "middle")
    picture.words((begin + end) / 2, y + 17, below, "small", "middle")


def recovery(file: pathlib.Path) -> None:
    """Draw the states of a group and of a rank after faults."""
    picture = Picture(
        WIDTH,
        520,
        "A group with full tolerance has less of it after a death; recovered leads to a smaller group with full "
        "tolerance, extended to one with all ranks. If the root or too many ranks die, a step fails, and recovered "
        "and tree_bcast lead on. A late rank catches up, or calls resync.",
    )
    picture.words(24, 32, "The group", "title")
    top, middle, low = 72, 200, 296
    state(picture, 0, top, "full tolerance", "all ranks live", "c")
    state(picture, 1, top, "less tolerance", "steps continue", "b")
    state(picture, 2, top, "a step fails", "an error on all ranks", "bad-state")
    state(picture, 1, middle, "full tolerance", "fewer ranks", "c")
    state(picture, 1, low, "start again", "from a checkpoint", "e")
    between(picture, 0, top + 27, "a rank dies")
    between(picture, 1, top + 27, "too many", "dead or stuck")
    picture.path(f"M144 {top}V50H576V{top - 3}", tip=True)
    picture.words(360, 44, "the root dies", "small", "middle")
    bottom = top + HEIGHT
    picture.path(f"M360 {bottom}V{middle - 3}", tip=True)
    picture.words(352, 168, "recovered()", "call", "end")
    picture.path(f"M616 {bottom}V{middle + 27}H443", tip=True)
    picture.words(608, 160, "recovered(put_out=True),", "call", "end")
    picture.words(608, 177, "tree_bcast()", "call", "end")
    picture.path(f"M280 {middle + 27}H124V{bottom + 3}", tip=True)
    picture.words(132, 160, "extended(k),", "call")
    picture.words(132, 177, "tree_bcast()", "call")
    picture.path(f"M664 {bottom}V{low + 27}H443", tip=True)
    picture.words(656, low + 19, "too few ranks are left", "small", "end")
    picture.path(f"M280 {low + 27}H64V{bottom + 3}", tip=True)
    picture.words(72, low + 19, "a new job with all ranks", "small")

    picture.words(24, 394, "One late rank", "title")
    top = 414
    state(picture, 0, top, "in step", "lag() is 0", "c")
    state(picture, 1, top, "behind", "skips gradients", "b")
    state(picture, 2, top, "Desynchronized", "out of the history", "bad-state")
    between(picture, 0, top + 17, "late")
    picture.path(f"M280 {top + 37}H187", tip=True)
    picture.words(232, top + 54, "catches up", "small", "middle")
    between(picture, 1, top + 27, "very late")
    picture.path(f"M616 {top + HEIGHT}V500H104V{top + HEIGHT + 3}", tip=True)
    picture.words(360, 493, "resync()", "call", "middle")
    picture.save(file)
