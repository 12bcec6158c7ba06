"""Draw the messages of a round, of a sum in sections, and of a round of shared work
(``docs/engine.md``).
"""

import pathlib

from .canvas import COLOURS, WIDTH, Picture

TOP = 92  # where lines of ranks begin
FALL = 9  # how far an arrow descends, as messages take time


class Sequence:
    """A sequence diagram: a line for each rank, downwards in time."""

    def __init__(
        self,
        height: int,
        says: str,
        title: str,
        ranks: dict[str, float],
        reach: float = 8,
    ):
        self.picture = Picture(WIDTH, height, says)
        self.reach = reach
        self.x = list(ranks.values())
        self.picture.words(24, 32, title, "title")
        for name, x in ranks.items():
            self.picture.words(
                x,
                TOP - 14,
                name,
                "late" if "late" in name or "slow" in name else "",
                "middle",
            )
            self.picture.path(f"M{x:g} {TOP - 6}V{height - 50}", "grid")
        bottom = height - 22
        self.picture.path(f"M24 {bottom - 4}h34", tip=True)
        self.picture.words(66, bottom, "control message", "small")
        self.picture.path(f"M196 {bottom - 4}h34", "data", tip=True)
        self.picture.words(238, bottom, "numbers, fetched by the receiver", "small")
        self.picture.box(490, bottom - 12, 8, 16, "called")
        self.picture.words(506, bottom, "waits in its call", "small")

    def sends(
        self, sender: int, to: int, y: float, says: str = "", data: bool = False
    ) -> None:
        """Draw an arrow, with words above it next to the root."""
        way = 1 if to > sender else -1
        begin, end = self.x[sender], self.x[to] - (self.reach if to else 8) * way
        kind = "data" if data else "line"
        self.picture.path(f"M{begin:g} {y:g}L{end:g} {y + FALL:g}", kind, tip=True)
        self.picture.words(sum(self.x[:2]) / 2, y - 2, says, "small over", "middle")

    def to_all(self, y: float, says: str, kind: str) -> None:
        """Draw messages from every rank to every other."""
        for begin, end in zip(self.x, self.x[1:]):
            middle = (begin + end) / 2
            self.picture.path(f"M{middle:g} {y:g}H{end - self.reach:g}", kind, tip=True)
            self.picture.path(
                f"M{middle:g} {y:g}H{begin + self.reach:g}", kind, tip=True
            )
        self.picture.words(sum(self.x[:2]) / 2, y - 8, says, "small", "middle")

    def calls(self, rank: int, begin: float, end: float) -> None:
        """Draw the time in which a rank's program waits in the round."""
        self.picture.box(self.x[rank] - 4, begin, 8, end - begin, "called")

    def works(
        self,
        rank: int,
        begin: float,
        end: float,
        owner: int,
        says: str,
        width: float = 34,
    ) -> None:
        self.picture.parts.append(
            f'<rect fill="{COLOURS[owner]}" x="{self.x[rank] - width / 2:g}" y="{begin + 1:g}" '
            f'width="{width:g}" height="{end - begin - 2:g}" rx="3"/>'
        )
        self.picture.words(self.x[rank], (begin + end) / 2 + 4.5, says, "on", "middle")

    def notes(self, rank: int, y: float, *lines: str) -> None:
        """Write on the left of a rank's line what the rank does."""
        for number, line in enumerate(lines):
            at = y + 16 * number
            self.picture.words(self.x[rank] - 14, at, line, "small over", "end")


FOUR = {"rank 0, the root": 152.0, "rank 1": 330.0, "rank 2": 490.0}


def messages_round(file: pathlib.Path) -> None:
    """Draw a round with s = 1 and a late third child."""
    sequence = Sequence(
        540,
        "Messages of a round: two children offer, the root fetches both messages and announces the result; the late "
        "child asks for it later",
        "A round: a parent fetches from the first children that suffice",
        FOUR | {"rank 3, late": 640.0},
    )
    sequence.sends(1, 0, 120, "offer")
    sequence.sends(2, 0, 146, "offer")
    sequence.notes(0, 170, "any 2 of 3 suffice:", "coefficients")
    sequence.sends(1, 0, 196, "message", data=True)
    sequence.sends(2, 0, 222, "message", data=True)
    sequence.notes(0, 246, "forms the sum:", "decided")
    sequence.sends(0, 1, 266, "result")
    sequence.sends(0, 2, 288, "result")
    sequence.sends(0, 3, 310, "note")
    sequence.sends(0, 1, 334, "the sum", data=True)
    sequence.sends(0, 2, 358, "the sum", data=True)
    sequence.sends(3, 0, 384, "want")
    sequence.sends(0, 3, 410, "result")
    sequence.sends(0, 3, 436, "the sum", data=True)
    sequence.calls(0, 104, 276)
    sequence.calls(1, 104, 350)
    sequence.calls(2, 110, 374)
    sequence.works(3, TOP, 464, 3, "", 8)
    sequence.picture.words(sequence.x[3] + 10, 250, "computes", "small")
    sequence.calls(3, 464, 484)
    sequence.notes(3, 478, "has the sum; its message is dropped")
    sequence.picture.save(file)


def messages_sections(file: pathlib.Path) -> None:
    """Draw a sum in sections."""
    sequence = Sequence(
        530,
        "Messages of a sum in sections: three children offer, the root delegates, all fetch from all, form a "
        "section each and fetch those of the others",
        "In sections: the root decides, and all ranks move the numbers",
        FOUR | {"rank 3": 640.0},
    )
    for rank in (1, 2, 3):
        sequence.sends(rank, 0, 98 + 22 * rank, "offer")
        sequence.sends(0, rank, 178 + 22 * rank, "delegate")
    sequence.notes(0, 184, "these suffice:", "who forms what")
    sequence.to_all(284, "pieces of messages", "data")
    sequence.to_all(350, "formed", "line")
    sequence.to_all(382, "pieces of sections", "data")
    sequence.notes(0, 394, "has all sections:", "decided")
    for rank in (1, 2, 3):
        sequence.sends(0, rank, 386 + 22 * rank, "result")
    for rank in range(4):
        sequence.calls(rank, 104, 410 if rank == 0 else 402 + 22 * rank)
        sequence.works(rank, 296, 328, rank, f"section {rank + 1}", 78)
    sequence.picture.save(file)


def messages_sharing(file: pathlib.Path) -> None:
    """Draw a round of shared work: one rank is twice as slow, and the other gets its
    last block.
    """
    sequence = Sequence(
        580,
        "Messages of a round of shared work: rank 1 runs out of blocks, the root recalls block 6 from the slow rank "
        "and grants it to rank 1, then fetches both vectors",
        "Shared work: the ledger of the root moves a block",
        {"rank 0, the ledger": 170.0, "rank 1": 420.0, "rank 2, slow": 632.0},
        reach=20,
    )
    sequence.sends(1, 0, 114, "offer: I compute 1, 2, 3")
    sequence.sends(2, 0, 134, "offer: I compute 4, 5, 6")
    sequence.notes(0, 162, "1 2 3: rank 1", "4 5 6: rank 2")
    sequence.sends(1, 0, 246, "offer: the last one has begun")
    sequence.sends(0, 2, 266, "order: recall 6")
    sequence.sends(2, 0, 284, "offer: 6 is returned")
    sequence.sends(0, 1, 304, "order: grant 6")
    sequence.notes(0, 312, "1 2 3 6: rank 1", "4 5: rank 2")
    sequence.sends(1, 0, 390, "offer: my vector is 1 + 2 + 3 + 6")
    sequence.sends(2, 0, 414, "offer: my vector is 4 + 5")
    sequence.notes(0, 432, "every block once")
    sequence.sends(1, 0, 440, "vector", data=True)
    sequence.sends(2, 0, 464, "vector", data=True)
    sequence.notes(0, 480, "forms the sum:", "decided")
    sequence.sends(0, 1, 492, "result")
    sequence.sends(0, 2, 514, "result")
    for number in range(3):
        sequence.works(1, 110 + 68 * number, 178 + 68 * number, 0, str(number + 1))
    sequence.works(1, 314, 382, 1, "6")
    sequence.works(2, 110, 246, 1, "4")
    sequence.works(2, 246, 382, 1, "5")
    sequence.calls(1, 384, 504)
    sequence.calls(2, 384, 526)
    sequence.picture.save(file)
