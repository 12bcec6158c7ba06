import dataclasses
import math
import re
from typing import Any, Self

from jaxcoded import _require

ACTIONS = ("wait", "raise", "approximate")


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The values of the options ``deadline`` and ``on_deadline``."""

    seconds: float  # the limit in seconds, from the beginning of a round; 0: no limit
    rounds: float  # the limit as a multiple of the median time of a round; 0: no limit
    action: str  # one of `ACTIONS`

    @property
    def approximates(self) -> bool:
        """Return whether parents continue with an approximation of the sum."""
        return self.action == "approximate"

    @property
    def waits_on(self) -> bool:
        """Return whether parents log for which ranks they wait, and continue to
        wait."""
        return self.action == "wait"

    @classmethod
    def parsed(cls, deadline: Any, action: Any) -> Self:
        """Return the deadline for seconds, a text such as ``"3x"``, or ``None``. Raise
        a ValueError for any other value."""
        if not isinstance(action, str) or action not in ACTIONS:
            raise ValueError(
                f"on_deadline must be one of {', '.join(ACTIONS)}, got "
                f"{_require.shown(action)}"
            )
        if deadline is None:
            if action != "wait":
                raise ValueError(f"on_deadline={action!r} needs a deadline")
            return cls(0.0, 0.0, action)
        text = isinstance(deadline, str)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*x", deadline) if text else None
        if match and 1 < float(match[1]) < math.inf:
            return cls(0.0, float(match[1]), action)
        if _require.is_positive(deadline):
            return cls(float(deadline), 0.0, action)
        raise ValueError(
            'deadline must be a number of seconds > 0, or a text such as "3x" for 3 '
            f"(> 1) times the median round, got {_require.shown(deadline)}"
        )
