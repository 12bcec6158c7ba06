"""How a group makes its rounds. What it sums does not depend on this."""

import dataclasses
import os
from typing import Self

from jaxcoded import _require
from jaxcoded.transport import comparing
from jaxcoded.transport.deadline import Deadline

PIECE = 256 << 10  # bytes, between hosts
LONGEST_PIECE = 2**30  # MPI counts bytes of a message in 31 bits
_MOST = 2**62  # bytes
_MOST_ROUNDS = 2**24  # each takes some 100 bytes, and more for each child


@dataclasses.dataclass(frozen=True)
class Options:
    """How a group makes its rounds. All of it is for the engine: with mpi4jax a deadline
    that does more than wait, ``debug=True`` and ``verify``, are errors, and the other
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
        debug: look for mistakes in the program. Every parent waits for all of its
            children and compares what they send, which the redundancy of the code
            allows: a round whose contributions are not coded sums of the same gradients
            fails with `InconsistentMessages` on all ranks, before anybody gets its sum
            (``docs/sharp-bits.md``). Where work is shared two ranks compute one block of
            each round, and nobody computes what others are late with. Parents whose children cannot be checked are named
            in a warning. Default: ``JAXCODED_DEBUG=1`` in the environment, which leaves
            groups as they are (with a warning) where ``debug=True`` is an error.
        verify: compare what children send with what a parent gets beyond what it needs,
            and look for NaN and infinities, in long trainings too: for ranks whose
            memory or processor is at fault (``docs/verify.md``). What does not fit by more than rounding
            explains (``docs/theory.md``) is an error of ``"raise"``, which fails the
            round with `InconsistentMessages` on all ranks; ``"warn"`` logs it, and goes
            on; ``"drop"`` logs it, and forms the sum without the child that is wrong, or
            fails the round where that is not known, or the others do not suffice. One
            message more than needed tells which children may be wrong, two tell which
            one is. Where work is shared two ranks compute one block of each round, which
            tells that one of them is wrong; ``"drop"`` fails the round then. ``debug=True``
            does more, and takes its place.
        verify_wait: wait for the messages of all children that live, at most until the
            deadline, so that there are as many as can be. Otherwise those are compared
            that have come when the sum can be formed: often none too many.

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
    debug: bool | None = None
    verify: str | None = None
    verify_wait: bool = False

    def complete(self) -> Self:
        """With what stands for ``None``, see `check`."""
        return dataclasses.replace(self, debug=comparing.asked(self.debug))

    def check(self) -> None:
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
        comparing.check(self.debug, self.verify, self.verify_wait)
        for name in (
            "JAXCODED_STATUS_SIGNAL",
            "JAXCODED_PTRACER",
        ):  # which the engine reads
            if os.environ.get(name, "ON") not in ("", "ON", "OFF"):
                raise ValueError(f"{name} must be ON or OFF, got {os.environ[name]!r}")

    @property
    def compares(self) -> bool:
        """Whether parents compare what their children send."""
        return bool(self.debug) or self.verify is not None

    @property
    def waits(self) -> Deadline:
        """How long a parent waits for its children, and what it does then."""
        return Deadline.parsed(self.deadline, self.on_deadline)
