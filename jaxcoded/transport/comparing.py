"""Whether parents compare what their children send, and what a group can see of it."""

import os
from typing import Any

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.transport.deadline import Deadline

VARIABLE = "JAXCODED_DEBUG"
# What happens where messages do not agree.
POLICIES = {
    "warn": "a line in the log",
    "drop": "the round goes on without who is wrong, where that is known, and fails otherwise",
    "raise": "the round fails",
}


def asked(debug: Any) -> Any:
    """``debug``, or what the environment says where it is ``None``: a bool if it is
    sound, see `check`."""
    if debug is not None:
        return debug
    value = os.environ.get(VARIABLE, "")
    return {"": False, "0": False, "1": True}.get(value, f"{VARIABLE}={value}")


def check(debug: Any, verify: Any, verify_wait: Any) -> None:
    """Raise unless ``debug`` is a bool, as `asked` found it, and the others are sound.

    Raises:
        ValueError: they are not.
    """
    if verify not in (None, *POLICIES):
        words = ", ".join(f"{name!r} ({what})" for name, what in POLICIES.items())
        raise ValueError(
            f"verify must be one of {words}, or None, got {_require.shown(verify)}"
        )
    if not isinstance(verify_wait, bool):
        raise ValueError(  # noqa: TRY004  # as the others
            f"verify_wait must be True or False, got {_require.shown(verify_wait)}"
        )
    if verify_wait and verify is None:
        raise ValueError(
            "verify_wait=True means nothing without verify: say what is to happen, "
            f"verify={' or '.join(map(repr, POLICIES))}"
        )
    if not isinstance(debug, bool):
        raise ValueError(  # noqa: TRY004  # it may be a text of the environment
            f"debug must be True, False or None ({VARIABLE} 1 or 0), got "
            f"{_require.shown(debug)}"
        )


def why_not(plan: Plan, deadline: Deadline, transport: str, option: str) -> str:
    """Why a group cannot have ``debug`` or ``verify``, in words; empty if it can."""
    if transport != "engine":
        return "needs the engine"
    if deadline.action == "approximate":
        return (
            'waits for all ranks, so that on_deadline="approximate" means nothing'
            if option == "debug"
            else 'compares exact sums: on_deadline must be "wait" or "raise"'
        )
    return plan.strategy.why_not_compared(plan, option)
