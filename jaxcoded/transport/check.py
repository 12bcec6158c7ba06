import dataclasses
import os
from typing import Any

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.transport.deadline import Deadline

VARIABLE = "JAXCODED_DEBUG"
ACTIONS = {
    "warn": "a line in the log",
    "drop": "the round continues without the wrong rank if this rank is known, and fails otherwise",
    "raise": "the round fails",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """Compare the messages that form a sum with surplus messages, which the parent does not need for its sum,
    and look for NaN and infinities. A check detects faulty memory and processors (``docs/verify.md``). The
    check `DEBUG` also detects mistakes in the program.

    Attributes:
        action: what happens if messages differ by more than rounding explains (``docs/theory.md``). ``"raise"``
            fails the round with `InconsistentMessages` on all ranks. ``"warn"`` logs the difference and continues.
            ``"drop"`` logs the difference and forms the sum without the wrong child.
            The round fails if the wrong child is unknown, or if the other children do
            not suffice. One surplus message shows which children may be wrong; two show
            which child is wrong. With shared work, two ranks compute one block of each
            round. Their results show only that one of the two is wrong, so ``"drop"``
            then fails the round.
        wait: for which messages to wait. With ``False``, a parent does not wait for surplus messages. It compares
            the messages that have arrived when the sum can be formed, and often there is no surplus message. With
            ``True``, it waits for the messages of all living children, at most until the deadline, to have as many
            surplus messages as possible. With ``"all"``, it waits for the messages of all children before any rank
            gets the sum; this needs ``"raise"``. With shared work and ``"all"``, no rank computes blocks of late
            ranks.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.Options(check=jaxcoded.Check("drop", wait=True)).check
        Check(action='drop', wait=True)
        >>> jaxcoded.DEBUG
        Check(action='raise', wait='all')
    """

    action: str = "raise"
    wait: bool | str = False

    def __post_init__(self) -> None:
        if not isinstance(self.action, str) or self.action not in ACTIONS:
            words = ", ".join(f"{name!r} ({what})" for name, what in ACTIONS.items())
            raise ValueError(
                f"action must be one of {words}, got {_require.shown(self.action)}"
            )
        if self.wait != "all" and not isinstance(self.wait, bool):
            raise ValueError(
                f"wait must be True, False or 'all', got {_require.shown(self.wait)}"
            )
        if self.wait == "all" and self.action != "raise":
            raise ValueError(
                f"wait='all' fails the round if messages differ: leave out action={self.action!r}"
            )

    def why_not(self, plan: Plan, deadline: Deadline, transport: str) -> str:
        """Return why a group cannot have this check, or an empty text if it can."""
        if transport != "engine":
            return "needs the engine"
        if deadline.approximates:
            return (
                'waits for all ranks, so on_deadline="approximate" has no effect'
                if self == DEBUG
                else 'compares exact sums: on_deadline must be "wait" or "raise"'
            )
        return plan.strategy.why_not_compared(plan, self.wait)


DEBUG = Check(wait="all")


def asked(check: Any) -> Any:
    """Return ``check``, or the value from the environment if ``check`` is ``None``; see
    `validate`."""
    if check is not None:
        return check
    value = os.environ.get(VARIABLE, "")
    return {"": False, "0": False, "1": DEBUG}.get(value, f"{VARIABLE}={value}")


def validate(check: Any) -> None:
    """Raise a ValueError unless this value, from `asked`, is a `Check` or False."""
    if check is not False and not isinstance(check, Check):
        raise ValueError(
            f"check must be a jaxcoded.Check such as jaxcoded.DEBUG, False or None ({VARIABLE} 1 or 0), got "
            f"{_require.shown(check)}"
        )
