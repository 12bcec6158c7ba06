"""How long a parent waits for its children, and what it does then."""

import dataclasses
import re
from typing import Any, Self

from jaxcoded import _require

ACTIONS = ("wait", "raise", "approximate")


@dataclasses.dataclass(frozen=True)
class Deadline:
    """What was asked for with ``deadline`` and ``on_deadline``.

    Attributes:
        seconds: from the beginning of a round; 0 without such a limit.
        rounds: or so many times what it takes as a rule; 0 without such a limit.
        action: one of `ACTIONS`.

    Example:
        >>> from jaxcoded.transport.deadline import Deadline
        >>> Deadline.parsed("3x", "raise")
        Deadline(seconds=0.0, rounds=3.0, action='raise')
    """

    seconds: float
    rounds: float
    action: str

    @classmethod
    def parsed(cls, deadline: Any, action: Any) -> Self:
        """A number of seconds, a text such as ``"3x"``, or ``None``.

        Raises:
            ValueError: it is something else, or there is no such action.
        """
        if action not in ACTIONS:
            raise ValueError(
                f"on_deadline must be one of {', '.join(ACTIONS)}, got {action!r}"
            )
        if deadline is None:
            if action != "wait":
                raise ValueError(f"on_deadline={action!r} needs a deadline")
            return cls(0.0, 0.0, action)
        text = isinstance(deadline, str)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*x", deadline) if text else None
        if found and float(found[1]) > 1:
            return cls(0.0, float(found[1]), action)
        if _require.is_positive(deadline):
            return cls(float(deadline), 0.0, action)
        raise ValueError(
            'deadline must be a number of seconds > 0, or a text such as "3x" for 3 '
            f"(> 1) times the median round, got {deadline!r}"
        )
