import dataclasses
import functools
import os
from typing import Self

from jaxcoded import _require
from jaxcoded.transport import check
from jaxcoded.transport.check import Check
from jaxcoded.transport.deadline import Deadline

PIECE = 256 << 10  # bytes in a piece, by default, between hosts
LONGEST_PIECE = 2**30  # MPI counts bytes of a message in 31 bits
_MOST = 2**62  # the largest number of bytes that an option may have
_MOST_ROUNDS = 2**24  # a round's record takes about 100 bytes, and more for each child


@dataclasses.dataclass(frozen=True)
class Options:
    """How a group runs its rounds. All options are for the engine. With the mpi4jax
    transport, a ``check``, or an ``on_deadline`` other than ``"wait"``, raises an
    error, and all other options have no effect.

    Attributes:
        deadline: how long the root waits if more children are late than a round tolerates: seconds from the
            beginning of a round, ``"3x"`` or ``None``. ``"3x"`` is 3 times the median time of the latest rounds of
            the same call that met the deadline. It has no effect before there are 5 such rounds. If the root is
            ``H`` layers above the lowest leaf, a parent that is ``h`` layers above its lowest leaf waits ``h / H``
            of the time. For up to ``stragglers`` late children a parent does not wait at all.
        on_deadline: what happens after the deadline. ``"wait"``: a parent logs for which ranks it waits, once per
            round (logger ``jaxcoded``), and continues to wait. If a child makes no call for the same time (10 s
            with ``"3x"``) while rounds continue without it, the parent logs the child. ``"raise"``: the round
            fails on all ranks with `DeadlineExceeded`, even if the root's own program is late. ``"approximate"``:
            parents use the least-squares combination of the messages that have arrived. ``residual=True`` in a
            call also returns how far its sum is from the exact sum. With shared work the sum has the blocks that
            are computed at the deadline; see ``docs/sharing.md``.
        piece_bytes: size of the pieces in which long messages are sent, at most 1 GiB. Shorter pieces pass through
            a deep tree sooner, longer pieces cost less work. Default: 256 KiB, 128 KiB on one host, or the choice
            of `CodedGroup.auto`.
        sections_from: sums of at least this many bytes are formed in sections: the root and each of its children
            form one section (``docs/engine.md``). This is possible only if the children's messages are as long
            as the sum. 0: no sections. Default: the size above which sections are faster on the group's hosts.
        history_bytes: how many bytes of results a rank keeps for late ranks. A rank
            keeps at least 64 rounds, unless they need more than 1 GiB.
        telemetry_rounds: how many of the latest rounds `CodedGroup.telemetry` covers; 0 turns it off.
        check: a `Check`, which compares the ranks' messages and looks for NaN, or ``False``. `DEBUG` detects
            mistakes in the program; a warning names parents whose children cannot be checked. Default: `DEBUG` if
            the environment has ``JAXCODED_DEBUG=1``, otherwise ``False``. If ``check=DEBUG`` would raise an error
            for a group, the variable only causes a warning.

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
        """Return the options with ``None`` replaced by the defaults, see `validate`."""
        return dataclasses.replace(self, check=check.asked(self.check))

    def validate(self) -> None:
        """Raise an error unless these options, after `complete`, are valid.

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
        # the engine reads these variables
        for name in ("JAXCODED_STATUS_SIGNAL", "JAXCODED_PTRACER"):
            if os.environ.get(name, "ON") not in ("", "ON", "OFF"):
                raise ValueError(f"{name} must be ON or OFF, got {os.environ[name]!r}")

    @functools.cached_property
    def waits(self) -> Deadline:
        """Return how long a parent waits for its children, and what it does after that."""
        return Deadline.parsed(self.deadline, self.on_deadline)
