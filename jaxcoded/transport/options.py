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
    """How a group runs its rounds. All options are for the engine. With mpi4jax a
    ``check``, or an ``on_deadline`` other than ``"wait"``, raises an error. Other
    options have no effect.

    Attributes:
        deadline: how long the root waits if more children are late than a round tolerates: seconds from the
            beginning of a round, ``"3x"`` or ``None``. ``"3x"`` is 3 times the median time of the latest rounds of
            the same call that met the deadline, once there are 5 such rounds. The root is ``H`` layers above the
            lowest leaf. A parent that is ``h`` layers above the lowest leaf below it has ``h / H`` of the time. Up
            to ``stragglers`` late children need no deadline.
        on_deadline: what happens after the deadline. ``"wait"``: a parent logs for which ranks it waits, once per
            round (logger ``jaxcoded``), and continues to wait. After the same time again it logs which child makes
            no call while rounds continue without it. ``"raise"``: the round fails on all ranks with
            `DeadlineExceeded`, even if the root's own program is late. ``"approximate"``: parents use the
            least-squares combination of the messages that have arrived. ``residual=True`` in a call also returns
            how far its sum is from the exact sum. With shared work the sum has the blocks that are computed by
            then, see ``docs/sharing.md``.
        piece_bytes: size of the pieces in which long messages are sent, at most 1 GiB. Shorter pieces pass through
            a deep tree sooner, longer pieces cost less work. Default: 256 KiB, 128 KiB on one host, or the choice
            of `CodedGroup.auto`.
        sections_from: sums of at least this many bytes are formed in sections: the root and each of its children
            form one section (``docs/engine.md``). The children's messages must be as long as the vector. 0: no
            sections. Default: the size from which sections are faster on the group's hosts.
        history_bytes: memory of a rank for results that late ranks lack, in bytes. At
            least 64 rounds are kept, up to 1 GiB.
        telemetry_rounds: how many of the latest rounds `CodedGroup.telemetry` covers; 0 turns it off.
        check: a `Check`: compare the ranks' messages, and look for NaN. `DEBUG` detects mistakes in the program; a
            warning names parents whose children cannot be checked. ``False``: no check. Default: `DEBUG` with
            ``JAXCODED_DEBUG=1`` in the environment. For a group in which
            ``check=DEBUG`` would raise an error, the variable only causes a warning.

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
