"""How a group makes its rounds. What it sums does not depend on this."""

import dataclasses
import functools
import os
from typing import Self

from jaxcoded import _require
from jaxcoded.transport import check
from jaxcoded.transport.check import Check
from jaxcoded.transport.deadline import Deadline

PIECE = 256 << 10  # bytes, between hosts
LONGEST_PIECE = 2**30  # MPI counts bytes of a message in 31 bits
_MOST = 2**62  # bytes
_MOST_ROUNDS = 2**24  # each takes some 100 bytes, and more for each child


@dataclasses.dataclass(frozen=True)
class Options:
    """How a group makes its rounds. All of it is for the engine: with mpi4jax a deadline
    that does more than wait, and a ``check``, are errors, and the other
    options have no effect.

    Attributes:
        deadline: how long the root waits for more children than a round can do
            without, in seconds from the beginning of a round; or ``"3x"``, 3 times
            what it takes as a rule (the median of the latest rounds of the same call in
            which nobody missed the deadline, once there are 5); or ``None``. A parent
            further down, ``h`` layers above the lowest leaf below it, has ``h / H`` of
            the time. Never needed for up to ``stragglers`` late children.
        on_deadline: what happens then. ``"wait"``: a parent logs whom it waits for,
            once per round (``logging``, logger ``jaxcoded``), and waits on. After the
            same time again it logs which child calls nothing while rounds go on without
            it.
            ``"raise"``: the round fails on all ranks with `DeadlineExceeded`, also where
            it is the root's program that has not called it.
            ``"approximate"``: parents go on with the least-squares combination of what
            has come. ``residual=True`` in a call tells how far its sum is from the
            exact one. Where work is shared the sum is of the blocks that are computed by
            then, see ``docs/sharing.md``.
        piece_bytes: bytes in which long messages move, at most 1 GiB. Shorter pieces go
            through a deep tree sooner, longer ones cost less work. Default: 256 KiB,
            128 KiB on one host, or what `CodedGroup.auto` finds.
        sections_from: sums of so many bytes and more are formed in sections, each by
            another of the root and its children, where their messages are as long as the
            vector (``docs/engine.md``); 0: none. Default: what pays on the hosts of the
            group.
        history_bytes: memory of a rank for results that late ranks lack, in bytes; at
            least 64 rounds are kept up to 1 GiB.
        telemetry_rounds: how many of the latest rounds `CodedGroup.telemetry` tells of;
            0 turns it off.
        check: a `Check`: compare what ranks send, and look for NaN. `DEBUG` looks for mistakes in
            the program; parents whose children cannot be checked are named in a warning. ``False``: nothing.
            Default: `DEBUG` with ``JAXCODED_DEBUG=1`` in the environment, which leaves groups as they are (with a
            warning) where ``check=DEBUG`` is an error.

    Example:
        >>> import jaxcoded
        >>> from mpi4py import MPI
        >>> options = jaxcoded.Options(deadline="3x", on_deadline="raise")
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, transport="engine", options=options) as group:
        ...     group.options.deadline
        '3x'
    """

    deadline: float | str | None = 10.0
    on_deadline: str = "wait"
    piece_bytes: int | None = None
    sections_from: int | None = None
    history_bytes: int = 256 << 20
    telemetry_rounds: int = 1024
    check: Check | bool | None = None

    def complete(self) -> Self:
        """With what stands for ``None``, see `validate`."""
        return dataclasses.replace(self, check=check.asked(self.check))

    def validate(self) -> None:
        """Raise unless these options, made `complete`, are sound.

        Raises:
            ValueError: the message names the value and the remedy.
        """
        if self.piece_bytes is not None:
            _require.integer("piece_bytes", self.piece_bytes, 1, LONGEST_PIECE)
        if self.sections_from is not None:
            _require.integer("sections_from", self.sections_from, 0, _MOST)
        _require.integer("history_bytes", self.history_bytes, 0, _MOST)
        _require.integer("telemetry_rounds", self.telemetry_rounds, 0, _MOST_ROUNDS)
        Deadline.parsed(self.deadline, self.on_deadline)
        check.validate(self.check)
        # which the engine reads
        for name in ("JAXCODED_STATUS_SIGNAL", "JAXCODED_PTRACER"):
            if os.environ.get(name, "ON") not in ("", "ON", "OFF"):
                raise ValueError(f"{name} must be ON or OFF, got {os.environ[name]!r}")

    @functools.cached_property
    def waits(self) -> Deadline:
        """How long a parent waits for its children, and what it does then."""
        return Deadline.parsed(self.deadline, self.on_deadline)
